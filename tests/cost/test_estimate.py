"""Estimates: their parts add up, and the roofline behaves as a roofline must."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.cost import BOUNDS, Memory, Settings, estimate, explain, lower, models
from foretell.cost.model import Registry
from foretell.cost.predict import dearest_modules
from foretell.cost.program import Program
from foretell.errors import InputError, UnknownNameError
from foretell.graph import Graph, OpTable, Storage, Tensor, make_op
from foretell.hardware import device
from foretell.hardware.device import Device, FrozenMap
from foretell.units import format_time

CARD = Device(
    name="card",
    title="A card",
    vendor="none",
    kind="gpu",
    architecture="test",
    multiprocessors=100,
    boost_clock_hz=1.5e9,
    peaks=FrozenMap({"fp32.vector": 2e13, "tf32.tensor": 1.5e14, "fp16.tensor": 3e14, "bf16.tensor": 3e14}),
    memory_bandwidth_bytes_per_s=2e12,
    memory_bytes=80 << 30,
    l2_bytes=40 << 20,
    tdp_w=400.0,
    idle_w=50.0,
    price_usd_per_h=3.6,
)
NO_MEMORY = Memory(0, 0, 0, {}, -1, None)
DTYPES = ("float32", "float16", "bfloat16")


def make(specs: list[tuple], batch: int = 2) -> Graph:
    """A graph of independent ops, one per (what, a, b, c, dtype, causal) of `specs`."""
    tensors: list[Tensor] = []
    ops = []

    def tensor(*shape: int, dtype: str) -> int:
        tensors.append(Tensor(shape, dtype, len(tensors)))
        return len(tensors) - 1

    for i, (what, a, b, c, dtype, causal) in enumerate(specs):
        where = {"module": f"block{i % 3}.part{i}"}
        if what == "mm":
            ins = (tensor(a, b, dtype=dtype), tensor(b, c, dtype=dtype))
            ops.append(make_op("aten.mm.default", [*tensors, Tensor((a, c), dtype, 0)], ins, (len(tensors),), **where))
            tensor(a, c, dtype=dtype)
        elif what == "conv":
            groups = a if causal else 1
            ins = (tensor(batch, a, b, b, dtype=dtype), tensor(c * groups, a // groups, 3, 3, dtype=dtype))
            out = tensor(batch, c * groups, b, b, dtype=dtype)
            ops.append(make_op("aten.convolution.default", tensors, ins, (out,), attrs={"groups": groups}, **where))
        elif what == "sdpa":
            q = tensor(batch, 2, a, 64, dtype=dtype)
            out = tensor(batch, 2, a, 64, dtype=dtype)
            ops.append(make_op("foretell.sdpa.default", tensors, (q, q, q), (out,), attrs={"causal": causal}, **where))
        else:
            x = tensor(a, b, dtype=dtype)
            ops.append(make_op(f"aten.{what}.default", tensors, (x,), (tensor(a, b, dtype=dtype),), **where))
    storages = tuple(Storage(t.nbytes, "temporary") for t in tensors)
    return Graph("made", "inference", "amp", tuple(ops), tuple(tensors), storages, 0, 0, {"images": batch})


specs = st.lists(
    st.tuples(
        st.sampled_from(("mm", "conv", "sdpa", "relu", "_softmax", "view")),
        st.integers(1, 300),
        st.integers(1, 60),
        st.integers(1, 300),
        st.sampled_from(DTYPES),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)
runtimes = st.sampled_from(("eager", "compiled"))


gpu_models = st.sampled_from(("roofline", "kernel", "learned"))
# A learned residual is no monotone function of a device or a step; physics is.
physical = st.sampled_from(("roofline", "kernel"))


def predicted(graph: Graph, device: Device = CARD, runtime: str = "eager", model: str = "roofline"):
    return estimate(graph, device, runtime=runtime, model=model, memory=NO_MEMORY)


@given(specs, runtimes, gpu_models)
@settings(deadline=None)
def test_parts_sum_to_the_total(specs, runtime, model):
    e = predicted(make(specs), runtime=runtime, model=model)
    assert e.time_s > 0
    assert set(e.breakdown_s) == set(BOUNDS)
    assert all(part >= 0 for part in e.breakdown_s.values())
    assert sum(e.breakdown_s.values()) == pytest.approx(e.time_s)
    assert e.ops.time_s.sum() == pytest.approx(e.time_s)
    assert sum(time for _, time in e.modules) == pytest.approx(e.time_s)
    assert e.energy_j == pytest.approx(e.ops.energy_j.sum())
    assert e.time_interval_s[0] < e.time_s < e.time_interval_s[1]
    assert e.time_s >= e.host_s * (1 - 1e-9)


@given(specs, runtimes, gpu_models)
@settings(deadline=None)
def test_utilisation_never_exceeds_one(specs, runtime, model):
    e = predicted(make(specs), runtime=runtime, model=model)
    assert e.mfu is None or 0 < e.mfu <= 1
    assert (e.mfu is None) == (e.flops == 0)


@given(specs, runtimes, physical, st.floats(1, 100), st.sampled_from(("bandwidth", *CARD.peaks, "all")))
@settings(deadline=None)
def test_more_bandwidth_or_peak_never_predicts_slower(specs, runtime, model, factor, what):
    graph = make(specs)
    if what == "bandwidth":
        better = replace(CARD, memory_bandwidth_bytes_per_s=2e12 * factor)
    else:
        peaks = {k: v * (factor if what in (k, "all") else 1.0) for k, v in CARD.peaks.items()}
        better = replace(CARD, peaks=FrozenMap(peaks))
    plain = predicted(graph, CARD, runtime, model).time_s
    assert predicted(graph, better, runtime, model).time_s <= plain * (1 + 1e-9)


@given(specs, runtimes, physical, st.integers(0, 7), st.integers(2, 100))
@settings(deadline=None)
def test_repeating_an_op_never_predicts_faster(specs, runtime, model, which, times):
    graph = make(specs)
    index = which % len(graph.ops)
    ops = list(graph.ops)
    ops[index] = replace(ops[index], repeat=times)
    more = predicted(replace(graph, ops=tuple(ops)), CARD, runtime, model).time_s
    assert more >= predicted(graph, CARD, runtime, model).time_s


@given(specs, gpu_models)
@settings(deadline=None)
def test_energy_lies_between_idle_and_the_power_limit(specs, model):
    e = predicted(make(specs), model=model)
    assert 50.0 * e.time_s * (1 - 1e-9) <= e.energy_j <= 400.0 * e.time_s * (1 + 1e-9)


def test_cost_is_price_times_time():
    e = predicted(make([("mm", 256, 60, 256, "float16", False)]))
    assert e.cost_usd == pytest.approx(e.time_s * 3.6 / 3600)
    assert predicted(make([("mm", 8, 8, 8, "float16", False)]), replace(CARD, price_usd_per_h=None)).cost_usd is None


def test_unknown_power_is_said():
    graph = make([("mm", 256, 60, 256, "float16", False)])
    e = predicted(graph, replace(CARD, tdp_w=None))
    assert e.energy_j is None
    assert any("tdp" in note for note in e.notes)
    assert any("15%" in note for note in predicted(graph, replace(CARD, idle_w=None)).notes)


def test_a_large_product_is_compute_bound_and_a_small_one_launch_bound():
    assert predicted(make([("mm", 8192, 8192, 8192, "float16", False)])).bound == "compute"
    assert predicted(make([("mm", 8, 8, 8, "float16", False)])).bound == "launch"
    assert predicted(make([("relu", 2**14, 2**14, 1, "float16", False)])).bound == "memory"


def test_a_step_that_waits_for_the_host_is_less_sure():
    def width(graph: Graph) -> float:
        low, high = predicted(graph).time_interval_s
        return high / low

    waiting, busy = make([("mm", 8, 8, 8, "float16", False)] * 5), make([("mm", 8192, 8192, 8192, "float16", False)])
    assert width(waiting) > 1.2 * width(busy)
    assert "hosts" in predicted(waiting).interval_basis
    assert "hosts" not in predicted(busy).interval_basis


def test_a_card_that_was_measured_is_surer_than_one_that_was_not():
    graph = make([("mm", 8192, 8192, 8192, "float16", False)])
    seen = predicted(graph, replace(CARD, compute_capability="8.6"))
    assert "families" in seen.interval_basis
    low, high = seen.time_interval_s
    wider_low, wider_high = predicted(graph).time_interval_s
    assert wider_high / wider_low > high / low


def test_what_is_left_out_is_listed():
    e = predicted(make([("mm", 8, 8, 8, "float16", False), ("mystery", 8, 8, 8, "float16", False)]))
    assert e.not_counted["aten.mystery.default"] == 1
    assert e.not_counted["data loading"] == 0


def test_unknown_names_are_refused():
    graph = make([("mm", 8, 8, 8, "float16", False)])
    with pytest.raises(UnknownNameError, match="roofline"):
        estimate(graph, CARD, model="rooflien", memory=NO_MEMORY)
    with pytest.raises(UnknownNameError, match="compiled"):
        estimate(graph, CARD, runtime="compile", memory=NO_MEMORY)


def test_the_registry_refuses_duplicates_and_strangers():
    registry = Registry()
    registry.register(models()["roofline"])
    with pytest.raises(ValueError, match="exists already"):
        registry.register(models()["roofline"])
    with pytest.raises(TypeError, match="no CostModel"):
        registry.register(object())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(models()))
def test_every_model_keeps_the_contract(name):
    """Columns as long as the table, nothing negative, arithmetic no faster than the peak."""
    graph = make([(w, 200, 30, 100, "float16", True) for w in ("mm", "conv", "sdpa", "relu", "view")])
    program = lower(graph)
    model, setting = models()[name], Settings.of(graph)
    card = device("epyc-9654") if name == "cpu" else CARD
    assert model.name == name
    t = model.op_times(program, card, setting)
    for column in (t.compute_s, t.memory_s, t.launch_s, t.host_s, t.ideal_s, *t.details.values()):
        assert len(column) == len(program)
        assert (column >= 0).all()
    assert (t.ideal_s <= t.busy_s * (1 + 1e-9)).all()
    step = model.step(program, t, setting)
    assert step.time_s >= t.busy_s.sum() * (1 - 1e-9)
    low, high, basis = model.interval(program, t, step, card, setting)
    assert 0 < low < 1 < high
    assert basis
    assert all(len(line) <= 80 for row in range(len(program)) for line in model.formula(program, t, row, card))


# --- modules ---------------------------------------------------------------------------------------------------------


def test_modules_are_split_where_the_time_is():
    paths = ["stem.conv", *(f"blocks.{i}.attn" for i in range(4)), *(f"blocks.{i}.mlp" for i in range(4)), "head"]
    modules = dict(dearest_modules(paths, [1.0, *[10.0] * 4, *[12.0] * 4, 1.0]))
    assert modules == {"blocks.0": 22.0, "blocks.1": 22.0, "blocks.2": 22.0, "blocks.3": 22.0, "stem": 1.0, "head": 1.0}


def test_a_wrapper_is_looked_into():
    assert dict(dearest_modules(["net.a", "net.b"], [3.0, 4.0])) == {"net.a": 3.0, "net.b": 4.0}


def test_a_module_with_ops_of_its_own_keeps_them():
    assert sum(t for _, t in dearest_modules(["a", "a.x", "a.y"], [1.0, 5.0, 5.0])) == 11.0


# --- explain ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["eager", "compiled"])
def test_explain_shows_the_numbers(runtime):
    graph = make([("mm", 1024, 512, 256, "float16", False), ("relu", 4096, 4096, 1, "float16", False)])
    text = explain(graph, CARD, 0, runtime=runtime)
    assert "1024 × 512 float16" in text
    assert "134 M multiply-adds" in text
    assert "300 TFLOP/s" in text
    assert "2 TB/s" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    shown = explain(graph, CARD, 1, runtime=runtime)
    assert "memory bound" in shown
    assert "32 MiB" in shown


def test_explain_says_of_an_op_without_work_that_it_costs_nothing():
    pool = [Tensor((64, 64), "float16", 0), Tensor((4096,), "float16", 0)]
    op = make_op("aten.view.default", pool, (0,), (1,))
    storages = (Storage(8192, "input"),)
    graph = Graph("view", "inference", "amp", (op,), tuple(pool), storages, 0, 0, {"images": 1}, (0,), (1,))
    text = explain(graph, CARD, 0)
    assert "costs the device nothing: no kernel runs and no bytes move" in text
    assert "bound" not in text
    assert "one run" not in text


def test_explain_cuts_no_name():
    graph = make([("mm", 1024, 512, 256, "float16", False)])
    graph = replace(graph, name="py:a_file_of_a_rather_long_name.py:the_factory")
    graph = replace(graph, ops=(replace(graph.ops[0], module=".".join(f"block{n}" for n in range(20)) + ".last"),))
    text = explain(graph, CARD, 0)
    assert "aten.mm.default (matmul, forward)" in text
    assert "the_factory\n" in text
    assert ".last\n" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_explain_under_a_clock_agrees_with_the_estimate():
    graph = make([("mm", 8192, 8192, 8192, "float16", False)])
    card = device("a100-sxm4-80gb")
    seconds = {hz: estimate(graph, card, clock_hz=hz).time_s for hz in (None, 7e8)}
    assert seconds[7e8] > 1.5 * seconds[None]
    for hz, time_s in seconds.items():
        text = explain(graph, card, 0, clock_hz=hz)
        assert f"of a step of {format_time(time_s)} (" in text
        assert ("at the clock that the limit leaves" in text) == (hz is not None)


def test_explain_refuses_an_op_that_is_not_there():
    with pytest.raises(InputError, match=r"op 7 does not exist.*ops 0 to 0"):
        explain(make([("mm", 8, 8, 8, "float16", False)]), CARD, 7)


def test_explain_names_the_chain():
    pool = [Tensor((64, 64), "float16", i) for i in range(3)]
    ops = tuple(make_op("aten.relu.default", pool, (i,), (i + 1,)) for i in range(2))
    storages = (Storage(8192, "input"), Storage(8192, "temporary", 0, 1), Storage(8192, "output", 1, None))
    graph = Graph("chain", "inference", "amp", ops, tuple(pool), storages, 0, 0, {"images": 1}, (0,), (2,))
    assert "fused with ops 0, 1" in explain(graph, CARD, 0, runtime="compiled")


# --- speed -----------------------------------------------------------------------------------------------------------


def test_a_hundred_thousand_ops_take_half_a_second(within):
    graph = make([(w, 200, 30, 100, "float16", False) for w in ("mm", "conv", "sdpa", "relu", "view")] * 20)
    table = OpTable.concatenate([graph.table()] * 1000)
    assert len(table) == 100_000
    model, setting = models()["roofline"], Settings.of(graph)

    def step():
        program = Program.of(table)
        return model.step(program, model.op_times(program, CARD, setting), setting)

    assert within(0.5, step).time_s > 0
