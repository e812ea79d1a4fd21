"""What an engine leaves for its cache: a published table, what must hold, and what is refused."""

import pytest

from foretell.accuracy.serving.cache_budgets import Logged, logged
from foretell.cost.kv_budget import default_load, default_share, kv_budget, visible_bytes, what_helps
from foretell.errors import InfeasibleError, InputError
from foretell.hardware import device
from foretell.simulate.serving.iteration import Iterations
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
    """Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", SOSP 2023, table 1.

    It does not say what share of the GPU they are of: within 13 %, or a fortieth of the GPU where little is left.
    """
    place, config = device(on), llm.config(model)
    budget = kv_budget(config, place, tokens=2048, tensor_parallel=gpus, step=2560, version="0.1.0")
    each = kv.kv_cache(config, tokens=2048, tensor_parallel=gpus).bytes_per_token
    assert budget.tokens * each == pytest.approx(slots * each, rel=0.13, abs=visible_bytes(place) / 40)


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
    left = [kv_budget(llm.config("llama-3.3-70b"), h100, tokens=4096, tensor_parallel=n).kv_bytes for n in (4, 8)]
    assert left[0] < left[1]


def test_a_smaller_share_leaves_less() -> None:
    a100 = device("a100-sxm4-80gb")
    left = [kv_budget(llm.config("llama-3.1-8b"), a100, tokens=4096, share=x).kv_bytes for x in (0.5, 0.9)]
    assert left[1] - left[0] == pytest.approx(0.4 * visible_bytes(a100), abs=2)


def test_experts_in_mxfp4_take_what_the_model_card_says() -> None:
    """gpt-oss model card (arXiv 2508.10925), table 1: checkpoints of 60.8 and 12.8 GiB; scales are not counted here."""
    for name, on, gib in (("gpt-oss-120b", "h100-sxm", 60.8), ("gpt-oss-20b", "l4", 12.8)):
        weights = kv_budget(llm.config(name), device(on), tokens=1, expert_dtype="fp4").weights_bytes
        assert 0.92 * gib < weights / 2**30 < gib


def test_no_room_is_infeasible_and_says_what_takes_it() -> None:
    with pytest.raises(InfeasibleError, match=r"131 GiB of weights.*it lacks 1\d\d GiB"):
        kv_budget(llm.config("llama-3.3-70b"), device("t4"), tokens=1)


#: By how much budgets may be off: 5 %, but on small GPUs without NVLink, where 0.2 GiB is 7 %, and for an engine of
#: TensorRT's whose buffers for 2,048 sequences are a third of the memory.
FAR_OFF = {("l4", "sglang"): 0.07, ("rtx-5090", "trtllm"): 0.12}


@pytest.mark.parametrize("one", logged(), ids=lambda one: one.budget.label)
def test_logs(one: Logged) -> None:
    """What engines' logs say they left."""
    budget = one.budget
    found = Iterations.of(budget.config, budget.plan, budget.cluster).budget
    within = FAR_OFF.get((one.device, one.engine), 0.05)
    assert found.kv_bytes == pytest.approx(budget.nbytes, rel=within)
    if budget.tokens:
        assert found.tokens == pytest.approx(budget.tokens, rel=within)


def test_engines_of_tensorrt_hold_buffers_for_all_sequences() -> None:
    """Lines of two logs: 8.42 GB for 2,048 of 151,936 words (issue 1188), 223.6 MB for 256 of 32,000 (memory.md)."""
    for name, seqs, nbytes in (("qwen2.5-0.5b", 2048, 8.42e9), ("llama-2-7b", 256, 223.6e6)):
        config, place = llm.config(name), device("a100-sxm4-80gb")
        parts = [
            kv_budget(config, place, tokens=1, engine="trtllm", version=version, seqs=seqs).activations_bytes
            for version in ("0.19.0", "1.0.0")
        ]
        assert parts[0] - parts[1] == pytest.approx(nbytes, rel=0.02)


def test_one_function_for_command_and_simulator() -> None:
    """A plan's budget and weights are those of `kv_budget` with its settings."""
    one = logged()[0]
    budget = one.budget
    made = Iterations.of(budget.config, budget.plan, budget.cluster)
    same = kv_budget(
        budget.config, device(one.device), tokens=16, engine=one.engine, version=one.version, tensor_parallel=one.tp,
        share=one.percent / 100.0, step=one.step, seqs=one.seqs, weight_dtype="fp8", expert_dtype="fp8",
    )  # fmt: skip
    assert made.budget == same
    assert made.weights_bytes == pytest.approx(same.weights_bytes, rel=1e-3)


@pytest.mark.parametrize("engine", kv.engines())
@pytest.mark.parametrize("on", ["h100-sxm", "a100-sxm4-80gb", "l40s"])
def test_more_work_at_once_leaves_less(engine: str, on: str) -> None:
    def left(step: int | None = None, seqs: int | None = None) -> int:
        config = llm.config("llama-3.1-8b")
        return kv_budget(config, device(on), tokens=4096, engine=engine, step=step, seqs=seqs).kv_bytes

    most = 12288 if engine == "sglang" else 65536  # SGLang sets aside 1.5 MiB for each token
    for found in ([left(step=n) for n in (512, 8192, most)], [left(seqs=n) for n in (1, 256, 1024, 4096)]):
        assert found == sorted(found, reverse=True)
        assert found[-1] > 0


def test_the_sampler_is_the_peak_of_many_sequences_whatever_the_version_sorts() -> None:
    """Qwen3-14B in vLLM 0.16 and 0.17: peaks of 5.64 and 2.23 GiB (llm-d-planner, accuracy/blog-gpu-capacity.md)."""
    for version, gib in (("0.16.0", 5.64), ("0.17.0", 2.23)):
        for gpus in (1, 4):
            found = kv_budget(
                llm.config("qwen3-14b"), device("h100-sxm"), tokens=1, version=version, tensor_parallel=gpus
            )
            assert found.activations_bytes / 2**30 == pytest.approx(gib, rel=0.02)


def test_only_gpus_with_nvlink_hold_buffers_for_each_other() -> None:
    for on, gpus, linked in (("h100-sxm", 1, False), ("h100-sxm", 2, True), ("l40s", 2, False)):
        found = kv_budget(llm.config("llama-3.1-8b"), device(on), tokens=1, tensor_parallel=gpus)
        assert (found.communication_bytes > 0) is linked
        assert found.framework_bytes > found.communication_bytes


@pytest.mark.parametrize(
    ("on", "degrees", "version", "seen", "within"),
    [
        # sgl-project/sglang, issue 29092 (June 2026): 0.828 on one H100.
        ("h100-sxm", {}, None, 0.828, 0.005),
        # By hand, in MiB: (24564 - 512 - 1.5 * 2048 - 2 * 24 - 128) / 24564.
        ("rtx-4090", {}, "0.5.4", 0.847, 0.005),
        # (81559 - 512 - 1.5 * 8192 - 2 * 512 - 1024) / 81559.
        ("h100-sxm", {"tensor_parallel": 8}, "0.5.4", 0.818, 0.005),
        # Eight ranks' attention apart: 512 * 8 * 4.5 more, and no graphs of prompts.
        ("h200-sxm", {"data_parallel": 8}, None, 0.768, 0.005),
        ("h100-sxm", {"tensor_parallel": 8}, "0.4.3", 0.81, 0.0),
        # A chunk of 2,048 leaves an H100 10 GiB.
        ("h100-sxm", {"step": 2048}, None, 0.874, 0.005),
    ],
)
def test_share_of_sglang(on: str, degrees: dict[str, int], version: str | None, seen: float, within: float) -> None:
    found = default_share(device(on), "sglang", version, **degrees)
    assert found == pytest.approx(seen, abs=within + 1e-9)


def test_share_is_that_of_the_budget() -> None:
    for engine in ("vllm", "sglang", "trtllm"):
        for on, gpus in (("h100-sxm", 1), ("a100-sxm4-80gb", 4), ("l40s", 2)):
            found = kv_budget(llm.config("llama-3.1-8b"), device(on), tokens=1, engine=engine, tensor_parallel=gpus)
            assert found.share == default_share(device(on), engine, tensor_parallel=gpus)


def test_usual_load_follows_the_gpu() -> None:
    found = [default_load(device(on)) for on in ("h100-sxm", "a100-sxm4-80gb", "l4")]
    assert found == [(8192, 1024), (2048, 256), (2048, 256)]
    assert default_load(device("h100-sxm"), version="0.6.0") == (8192, 256)
    chunks = [default_load(device(on), "sglang")[0] for on in ("t4", "l4", "l40s", "h100-sxm", "b200-sxm")]
    assert chunks == [2048, 2048, 4096, 8192, 16384]


def test_what_helps_fits() -> None:
    found = what_helps(llm.config("llama-3.3-70b"), device("h100-sxm"), tokens=1)
    assert [text.split(" leaves")[0] for text in found] == ["--tp 2", "--tp 4"]
    assert what_helps(llm.config("llama-3.1-405b"), device("t4"), tokens=1) == []


def test_refused() -> None:
    a100, model = device("a100-sxm4-80gb"), llm.config("llama-3.1-8b")
    with pytest.raises(InputError, match="cannot be divided"):
        kv_budget(model, a100, tokens=1, tensor_parallel=5)
    with pytest.raises(InputError, match="seqs is 0"):
        kv_budget(model, a100, tokens=1, seqs=0)
    with pytest.raises(InputError, match="share"):
        kv_budget(model, a100, tokens=1, share=1.5)


def test_a_cache_of_windows_alone_has_slots() -> None:
    """Phi-3-mini: every layer keeps 2,047 tokens, so that a further one of a long sequence takes nothing."""
    budget = kv_budget(llm.config("phi-3-mini"), device("rtx-4090"), tokens=4096)
    each = 2 * 32 * 32 * 96 * 2
    assert 0 <= budget.kv_bytes - budget.tokens * each < 16 * each
