"""Every format: what is written is read back, what cannot be said is said to be so, and bad files are refused."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foretell.errors import InfeasibleError, InputError, UnknownNameError
from foretell.hardware import cluster
from foretell.hardware.cluster import Cluster
from foretell.plan.training import emit
from foretell.simulate.training import CHOICES, TrainingPlan
from foretell.simulate.training.stages import layers_of
from foretell.workload.llm.config import LLMConfig, MoE

DENSE = LLMConfig("dense", layers=24, hidden=2048, heads=32, kv_heads=8, intermediate=5632, vocab=32_000)
EXPERTS = LLMConfig(
    "experts", layers=24, hidden=2048, heads=32, intermediate=5632, vocab=32_000,
    moe=MoE(experts=16, top_k=2, intermediate=1408, shared_intermediate=1408, first_dense=1),
)  # fmt: skip

_POWERS = st.sampled_from([1, 2, 4, 8])


def machine(devices: int) -> Cluster:
    """A cluster of so many H100."""
    return cluster(f"{devices}x h100-sxm" if devices <= 8 else f"{devices // 8}x dgx-h100")


@st.composite
def plans(draw: st.DrawFn) -> tuple[LLMConfig, TrainingPlan]:
    """Any plan of which the sizes fit; what a framework refuses of it is for the framework to say."""
    config = draw(st.sampled_from([DENSE, EXPERTS]))
    tp, cp, dp = draw(_POWERS), draw(st.sampled_from([1, 1, 2, 4])), draw(_POWERS)
    pp, vp = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.sampled_from([1, 1, 2, 3]))
    if tp * cp * dp * pp > 8:
        dp *= 8 // math.gcd(8, tp * cp * dp * pp)
    micro = draw(st.sampled_from([1, 2, 4]))
    flags = {
        name: draw(st.booleans())
        for name in (
            *("sequence_parallel", "overlap_grad_reduce", "overlap_param_gather", "overlap_tp", "overlap_p2p"),
            *("overlap_ep", "cuda_graph"),
        )
    }
    names = {name: draw(st.sampled_from(values)) for name, values in CHOICES.items() if name != "schedule"}
    several = ["interleaved", "interleaved", "zero-bubble"]
    usual = ["1f1b", "1f1b", "gpipe", "zero-bubble", "layered"] if vp == 1 else several
    names["schedule"] = draw(st.sampled_from(usual))
    plan = TrainingPlan(
        global_batch=micro * dp * pp * draw(st.integers(1, 4)), seq_len=4096, micro_batch=micro,
        tp=tp, cp=cp, dp=dp, pp=pp, vp=vp, ep=draw(st.sampled_from([1, 1, 2, 4])), zero=draw(st.integers(0, 3)),
        shard=draw(st.sampled_from([0, 0, 2, 4, 8])), first_layers=draw(st.sampled_from([0, 0, 0, 3, 6])),
        last_layers=draw(st.sampled_from([0, 0, 0, 3, 5])), recompute_layers=draw(st.sampled_from([0, 0, 1, 2, 6])),
        lora_rank=draw(st.sampled_from([0, 0, 0, 8])), document_len=draw(st.sampled_from([0, 0, 0, 512])),
        **names, **flags,
    )  # fmt: skip
    return config, plan


NAMES = list(emit.FORMATS)
#: The plan that each format says in full.
WHOLE = {
    "megatron": TrainingPlan(
        64, 4096, tp=4, dp=4, pp=2, vp=3, schedule="interleaved", recompute="full", recompute_layers=6
    ),
    "torchtitan": TrainingPlan(
        64, 4096, tp=4, dp=4, pp=2, vp=3, schedule="interleaved", framework="fsdp2", zero=3, shard=2, recompute="full"
    ),
    "deepspeed": TrainingPlan(
        64, 4096, tp=4, dp=4, pp=2, framework="deepspeed", recompute="full", overlap_p2p=False,
        overlap_param_gather=False, attention="flash2",
    ),
}  # fmt: skip


def differing(config, plan, found) -> set[str]:
    """Fields that a plan read from a file has otherwise; layers of the ends by what they make of every stage."""
    again = found.training_plan()
    fields = {f.name for f in dataclasses.fields(plan) if getattr(plan, f.name) != getattr(again, f.name)}
    ends = {"first_layers", "last_layers"}
    if fields & ends:
        dealt = [layers_of(config, p.pp, p.vp, p.first_layers, p.last_layers).tolist() for p in (plan, again)]
        fields = fields - ends if dealt[0] == dealt[1] else fields
    return fields


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_that_fits_comes_back_whole(name: str) -> None:
    plan = WHOLE[name]
    text = emit.emit(name, DENSE, plan, machine(plan.devices))
    found = emit.FORMATS[name].read(text, "plan")
    assert emit.FORMATS[name].unsaid(DENSE, plan) == {}
    assert found.training_plan() == plan
    assert "not said: " not in text


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_what_a_format_can_say_comes_back_and_the_rest_is_listed(name: str, data: st.DataObject) -> None:
    config, plan = data.draw(plans())
    try:
        text = emit.emit(name, config, plan, machine(plan.devices))
    except InfeasibleError:
        assume(False)
    lost = emit.FORMATS[name].unsaid(config, plan)
    found = emit.FORMATS[name].read(text, "plan")
    assert differing(config, plan, found) <= set(lost) | emit.idle(config, plan)
    for field, reason in lost.items():
        assert field in text, field
        assert reason in text, field


@pytest.mark.parametrize("name", NAMES)
def test_each_lost_field_is_lost_for_a_reason(name: str) -> None:
    """No field is listed as lost where the file does hold it: changing it alone changes nothing that is read."""
    base = WHOLE[name]
    changes = {
        "lora_rank": 8, "document_len": 512, "cuda_graph": True, "state_dtype": "bf16", "precision": "fp16",
        "attention": "unfused", "overlap_ep": True, "grad_dtype": "bf16", "recompute": "none", "micro_batch": 2,
    }  # fmt: skip
    first = emit.FORMATS[name].read(emit.emit(name, DENSE, base, machine(32)), "plan").training_plan()
    for field, value in changes.items():
        plan = base.replace(**{field: value, **({"recompute_layers": 0} if field == "recompute" else {})})
        if field == "cuda_graph":
            plan = plan.replace(recompute="none", recompute_layers=0)
            first_again = emit.FORMATS[name].read(
                emit.emit(name, DENSE, plan.replace(cuda_graph=False), machine(32)), "plan"
            ).training_plan()
        else:
            first_again = first
        lost = emit.FORMATS[name].unsaid(DENSE, plan)
        again = emit.FORMATS[name].read(emit.emit(name, DENSE, plan, machine(32)), "plan").training_plan()
        if field in emit.idle(DENSE, plan):
            continue
        assert (getattr(again, field) == getattr(first_again, field)) == (field in lost), field


IDLE = {
    "one": (EXPERTS, TrainingPlan(8, 4096, zero=3), {
        "sequence_parallel", "overlap_tp", "context_scheme", "schedule", "vp", "first_layers", "last_layers",
        "overlap_p2p", "dispatcher", "overlap_ep", "recompute_layers", "shard", "zero", "overlap_grad_reduce",
        "overlap_param_gather",
    }),
    "all": (
        EXPERTS,
        TrainingPlan(64, 4096, tp=2, cp=2, dp=4, pp=2, vp=3, ep=2, schedule="interleaved", shard=4, recompute="full"),
        set(),
    ),
    "dense": (
        DENSE, TrainingPlan(64, 4096, tp=2, cp=2, dp=4, pp=2, zero=0),
        {"overlap_p2p", "dispatcher", "overlap_ep", "recompute_layers", "shard", "overlap_param_gather"},
    ),
    "alone": (
        DENSE, TrainingPlan(64, 4096, dp=8, zero=2, shard=1),
        {
            "sequence_parallel", "overlap_tp", "context_scheme", "schedule", "vp", "first_layers", "last_layers",
            "overlap_p2p", "dispatcher", "overlap_ep", "recompute_layers", "shard", "zero",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", IDLE)
def test_what_changes_nothing(case: str) -> None:
    config, plan, fields = IDLE[case]
    assert emit.idle(config, plan) == fields


@pytest.mark.parametrize("name", NAMES)
def test_experts_are_said(name: str) -> None:
    plan = WHOLE[name].replace(ep=2, tp=1, dp=16, pp=2)
    found = emit.FORMATS[name].read(emit.emit(name, EXPERTS, plan, machine(32)), "plan")
    assert found.plan["ep"] == 2
    assert found.plan["dispatcher"] == "alltoall"


@pytest.mark.parametrize("name", NAMES)
def test_another_number_of_devices_is_infeasible(name: str) -> None:
    with pytest.raises(InfeasibleError, match=r"tp 4 · cp 1 · dp 4 · pp 2 = 32 devices, '2x dgx-h100' has 16"):
        emit.emit(name, DENSE, WHOLE[name], machine(16))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_that_does_not_split_is_infeasible(name: str) -> None:
    with pytest.raises(InfeasibleError, match="multiple of"):
        emit.emit(name, DENSE, WHOLE[name].replace(global_batch=70), machine(32))


@pytest.mark.parametrize("name", NAMES)
def test_files_are_told_by_ending_and_by_content(name: str, tmp_path) -> None:
    plan = WHOLE[name]
    text = emit.emit(name, DENSE, plan, machine(32))
    for ending in (*emit.FORMATS[name].endings, ""):
        path = tmp_path / f"plan{ending}"
        path.write_text(text)
        found = emit.read(path)
        assert (found.format, found.training_plan()) == (name, plan)


def test_unknown_names_and_files(tmp_path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'megatron'"):
        emit.emit("megatorn", DENSE, WHOLE["megatron"], machine(32))
    path = tmp_path / "readme"
    path.write_text("nothing of the kind")
    with pytest.raises(InputError, match="no configuration that is known"):
        emit.read(path)
    path.write_text("--num-layers 2\n" + "#" * 1_000_001)
    with pytest.raises(InputError, match="larger than 1,000,000 bytes"):
        emit.read(path)
    with pytest.raises(InputError, match="no such file"):
        emit.read(tmp_path / "absent.toml")


def test_a_format_or_ending_is_registered_once() -> None:
    item = emit.FORMATS["megatron"]
    with pytest.raises(ValueError, match="twice"):
        emit._registry(item, item)
    with pytest.raises(ValueError, match="twice"):
        emit._registry(item, dataclasses.replace(item, name="other"))


def test_what_is_missing_of_a_plan_is_named() -> None:
    found = emit.FORMATS["megatron"].read("--num-layers 2\n--micro-batch-size 2", "plan")
    with pytest.raises(InputError, match=re.escape("does not say global_batch and seq_len; give --global-batch")):
        found.training_plan()
    assert found.training_plan(global_batch=8, seq_len=128).micro_batch == 2
    assert found.config is None


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=300), cut=st.integers(0, 2000))
def test_any_text_is_read_or_refused(name: str, text: str, cut: int) -> None:
    whole = emit.emit(name, DENSE, WHOLE[name], machine(32))
    for bad in (text, whole[:cut] + text + whole[cut:], whole[:cut]):
        with contextlib.suppress(InputError):
            assert emit.FORMATS[name].read(bad, "plan").format == name


def test_a_very_long_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.txt"
    path.write_text("--" + "a" * 900_000, encoding="utf-8")
    with pytest.raises(InputError, match="a line of 900,002 characters"):
        emit.read(path)


def test_notes_hold_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    path = tmp_path / "run.txt"
    path.write_text("--micro-batch-size 1\n--no\x1b]0;x\x07ne 3\n", encoding="utf-8")
    assert all(note.isprintable() for note in emit.read(path).notes)
    assert any("--no?]0;x?ne" in note for note in emit.read(path).notes)
