"""What an engine leaves for its cache: a published table, what must hold, and what is refused."""

import pytest

from foretell.cost.kv_budget import kv_budget
from foretell.errors import InfeasibleError, InputError
from foretell.hardware import device
from foretell.workload import kv, llm


@pytest.mark.parametrize(
    ("model", "on", "gpus", "slots"),
    [
        ("opt-13b", "a100-sxm4-40gb", 1, 15_700),
        ("opt-66b", "a100-sxm4-40gb", 4, 9_700),
        ("gpt-3-175b", "a100-sxm4-80gb", 8, 60_100),
    ],
)
def test_slots_of_the_pagedattention_paper(model: str, on: str, gpus: int, slots: int) -> None:
    """Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", SOSP 2023, table 1."""
    budget = kv_budget(llm.config(model), device(on), tokens=2048, tensor_parallel=gpus, step=2560)
    assert budget.tokens == pytest.approx(slots, rel=0.13)


@pytest.mark.parametrize("engine", kv.engines())
def test_parts_fill_the_device(engine: str) -> None:
    a100 = device("a100-sxm4-80gb")
    budget = kv_budget(llm.config("llama-3.1-8b"), a100, tokens=4096, engine=engine)
    parts = (budget.reserve_bytes, budget.framework_bytes, budget.weights_bytes, budget.activations_bytes)
    assert sum(parts) + budget.kv_bytes == a100.memory_bytes
    assert budget.weights_bytes == pytest.approx(2 * 8_030_261_248, rel=1e-3)
    assert min(parts) >= 0
    one = kv.kv_cache_bytes("llama-3.1-8b", tokens=4096, engine=engine)
    assert budget.sequences == budget.kv_bytes // one
    assert 0 <= budget.kv_bytes - budget.tokens * 131_072 < 256 * 131_072


def test_more_gpus_leave_more_for_each() -> None:
    h100 = device("h100-sxm")
    left = [
        kv_budget(llm.config("llama-3.3-70b"), h100, tokens=4096, tensor_parallel=n).kv_bytes for n in (4, 8)
    ]
    assert left[0] < left[1]


def test_a_smaller_share_leaves_less() -> None:
    a100 = device("a100-sxm4-80gb")
    left = [kv_budget(llm.config("llama-3.1-8b"), a100, tokens=4096, share=x).kv_bytes for x in (0.5, 0.9)]
    assert a100.memory_bytes is not None
    assert left[1] - left[0] == pytest.approx(0.4 * a100.memory_bytes, abs=2)


def test_experts_in_mxfp4_take_what_the_model_card_says() -> None:
    """gpt-oss model card (arXiv 2508.10925), table 1: checkpoints of 60.8 and 12.8 GiB; scales are not counted here."""
    for name, on, gib in (("gpt-oss-120b", "h100-sxm", 60.8), ("gpt-oss-20b", "l4", 12.8)):
        weights = kv_budget(llm.config(name), device(on), tokens=1, expert_dtype="fp4").weights_bytes
        assert 0.92 * gib < weights / 2**30 < gib


def test_no_room_is_infeasible_and_says_what_takes_it() -> None:
    with pytest.raises(InfeasibleError, match="131 GiB of weights"):
        kv_budget(llm.config("llama-3.3-70b"), device("t4"), tokens=1)


def test_refused() -> None:
    a100, model = device("a100-sxm4-80gb"), llm.config("llama-3.1-8b")
    with pytest.raises(InputError, match="cannot be divided"):
        kv_budget(model, a100, tokens=1, tensor_parallel=5)
    with pytest.raises(InputError, match="share"):
        kv_budget(model, a100, tokens=1, share=1.5)
