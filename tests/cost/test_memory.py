"""Peak memory: graphs whose peak can be worked out by hand, invariants over random lifetimes, captured models."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.cost.allocator import MIB, round_size
from foretell.cost.estimate import MEMORY_PARTS, Memory
from foretell.cost.memory import (
    FRAMEWORKS,
    framework_bytes,
    largest_batch,
    op_workspaces,
    peak_memory,
    persistent_workspace_bytes,
)
from foretell.errors import InfeasibleError, UnknownNameError
from foretell.graph import Graph, Op, Storage, Tensor, make_op
from foretell.hardware import device

A100 = device("a100-sxm4-40gb")


def graph(phases: str, storages: list[Storage], mode: str = "train") -> Graph:
    """Ops that do nothing but take their turn (f, b, o: forward, backward, optimizer) over given storages."""
    names = {"f": "forward", "b": "backward", "o": "optimizer"}
    ops = tuple(make_op("aten.relu.default", (), (), (), phase=names[letter]) for letter in phases)
    return Graph("by hand", mode, "fp32", ops, (), tuple(storages), 0, 0, MappingProxyType({"samples": 1}))


def of(storages: list[Storage], phases: str, **options: Any) -> Memory:
    return peak_memory(graph(phases, storages), options.pop("on", A100), framework="none", **options)


def mib(memory: Memory) -> dict[str, float]:
    return {part: nbytes / MIB for part, nbytes in memory.breakdown.items() if nbytes}


# --- worked out by hand --------------------------------------------------------------------------------------------


def test_a_step_of_inference() -> None:
    # weight 20; op 0 makes 30 (dies at 1); op 1 makes 40 (dies at 2); op 2 returns 10, held until it is bound anew.
    storages = [
        Storage(20 * MIB, "parameter"),
        Storage(30 * MIB, "temporary", 0, 1),
        Storage(40 * MIB, "temporary", 1, 2),
        Storage(10 * MIB, "output", 2),
    ]
    memory = of(storages, "fff")
    assert memory.peak_op == 1
    # In the second step the first one's output is still there while op 1 runs: 20 + 30 + 40 + 10.
    assert memory.allocated_bytes == 100 * MIB
    # That output was cut from the segment of the 30, so the second 30 are cut from that of the 40, and the second 40
    # need a segment of their own: 20 and 10 lie idle.
    assert memory.reserved_bytes == memory.peak_bytes == 130 * MIB
    assert mib(memory) == {"parameters": 20, "activations": 10, "temporaries": 70, "fragmentation": 30}
    assert memory.timeline_bytes is not None
    assert (memory.timeline_bytes / MIB).tolist() == [60, 100, 80]


def test_a_training_step_creates_its_optimizer_state_in_memory_the_activations_freed() -> None:
    storages = [
        Storage(30 * MIB, "parameter"),
        Storage(30 * MIB, "optimizer"),
        Storage(50 * MIB, "activation", 0, 1),
        Storage(30 * MIB, "gradient", 1, 2),
    ]
    memory = of(storages, "fbo")
    # First step: 30 + 50 + 30, then the state takes 30 of the freed 50. So in the second step the 50 need a segment of
    # their own, while 20 of the old one lie idle: reserved 30 + 50 + 30 + 50, in use 140.
    assert memory.allocated_bytes == 140 * MIB
    assert memory.reserved_bytes == 160 * MIB
    assert memory.peak_op == 1
    assert mib(memory) == {"parameters": 30, "optimizer": 30, "activations": 50, "gradients": 30, "fragmentation": 20}


def test_gradients_that_stay_go_before_the_next_forward_pass() -> None:
    storages = [Storage(64 * MIB, "activation", 0, 1), Storage(64 * MIB, "gradient", 1)]
    assert of(storages, "fb").allocated_bytes == 128 * MIB
    kept = [Storage(64 * MIB, "activation", 0, 1), Storage(64 * MIB, "output", 1)]
    assert of(kept, "fb").allocated_bytes == 128 * MIB  # an output is bound anew once the forward pass is over
    assert of(kept, "ff").allocated_bytes == 192 * MIB


def test_expandable_segments_leave_less_idle() -> None:
    storages = [Storage(n * MIB, "temporary", i, i) for i, n in enumerate((12, 24, 36, 48))]
    assert of(storages, "ffff").reserved_bytes == (12 + 24 + 36 + 48) * MIB
    assert of(storages, "ffff", expandable_segments=True).reserved_bytes == 60 * MIB


def test_what_only_the_cache_makes_too_large_fits() -> None:
    storages = [Storage(n * MIB, "temporary", i, i) for i, n in enumerate((12, 24, 36, 48))]
    memory = of(storages, "ffff", on=replace(A100, memory_bytes=50 * MIB))
    assert memory.fits
    assert memory.peak_bytes == 48 * MIB
    too_small = of(storages, "ffff", on=replace(A100, memory_bytes=40 * MIB))
    assert not too_small.fits
    assert too_small.peak_bytes == 120 * MIB
    assert of(storages, "ffff", on=replace(A100, memory_bytes=None)).fits is None


def test_layers_that_are_one_op_are_allocated_one_by_one() -> None:
    # Four layers as one op: 160 MiB of activations are four blocks of 40 beside one temporary's 40. The next op's 50
    # fit none of them and need a segment of their own; its five times 40 fit.
    tensors = (Tensor((40 * MIB,), "float32", 0), Tensor((10 * MIB,), "float32", 1))
    many = make_op("aten.relu.default", tensors, (), (0, 1), repeat=4)
    storages = (
        Storage(160 * MIB, "activation", 0, 0),
        Storage(40 * MIB, "temporary", 0, 0),  # of one layer
        *[Storage(n * MIB, "temporary", 1, 1) for n in (50, 40, 40, 40, 40, 40)],
    )
    step = replace(graph("ff", []), tensors=tensors, ops=(many, graph("f", []).ops[0]), storages=storages)
    memory = peak_memory(step, A100, framework="none")
    assert memory.reserved_bytes == memory.allocated_bytes == 250 * MIB
    whole = replace(step, ops=(replace(many, repeat=1), step.ops[1]))
    assert peak_memory(whole, A100, framework="none").reserved_bytes == 280 * MIB  # 30 of the 160 lie idle


def test_gradients_that_meet_are_summed_in_place() -> None:
    # Two gradients of 50 are summed while 100 of activations live: no third 50, as a new tensor would be.
    tensors = tuple(Tensor((50 * MIB // 4,), "float32", i) for i in range(3))
    relu = graph("b", []).ops[0]
    total = make_op("aten.add.Tensor", tensors, (0, 1), (2,), phase="backward")
    storages = (
        Storage(50 * MIB, "temporary", 0, 2),
        Storage(50 * MIB, "temporary", 1, 2),
        Storage(50 * MIB, "temporary", 2, 3),
        Storage(100 * MIB, "activation", 0, 3),
    )
    step = replace(graph("bbbb", []), tensors=tensors, ops=(relu, relu, total, relu), storages=storages)
    memory = peak_memory(step, A100, framework="none")
    assert memory.timeline_bytes is not None
    assert (memory.timeline_bytes / MIB).tolist() == [150, 200, 200, 150]
    forward = replace(step, ops=(relu, relu, replace(total, phase="forward"), relu))
    assert peak_memory(forward, A100, framework="none").allocated_bytes == 250 * MIB


def test_equal_micro_batches_are_replayed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = 6
    storages = [Storage(30 * MIB, "parameter"), Storage(30 * MIB, "gradient", 1), Storage(30 * MIB, "optimizer")]
    for i in range(rounds):
        storages += [
            Storage(70 * MIB, "activation", 2 * i, 2 * i + 1),
            Storage(30 * MIB, "temporary", 2 * i + 1, 2 * i + 1),
        ]
    short = of(storages, "fb" * rounds + "o")
    monkeypatch.setattr("foretell.cost.memory._equal_rounds", lambda graph: (range(0), range(0)))
    whole = of(storages, "fb" * rounds + "o")
    assert short.breakdown == whole.breakdown
    assert np.array_equal(short.timeline_bytes, whole.timeline_bytes)


def test_a_graph_without_ops_or_storages() -> None:
    assert of([Storage(3 * MIB, "parameter")], "").peak_bytes == 20 * MIB
    empty = of([], "")
    assert (empty.peak_bytes, empty.peak_op, sum(empty.breakdown.values())) == (0, -1, 0)


# --- any lifetimes -------------------------------------------------------------------------------------------------

_ROLES = st.sampled_from(["activation", "temporary", "gradient", "parameter", "buffer", "input"])


@st.composite
def _storages(draw: st.DrawFn) -> tuple[str, list[Storage]]:
    phases = "f" * draw(st.integers(1, 6)) + "b" * draw(st.integers(0, 6)) + "o" * draw(st.integers(0, 2))
    storages = []
    for _ in range(draw(st.integers(1, 25))):
        nbytes, role = draw(st.one_of(st.integers(0, 5000), st.integers(0, 40 * MIB))), draw(_ROLES)
        if role in ("parameter", "buffer", "input"):
            storages.append(Storage(nbytes, role))
        else:
            born = draw(st.integers(0, len(phases) - 1))
            storages.append(Storage(nbytes, role, born, draw(st.integers(born, len(phases) - 1))))
    return phases, storages


@given(_storages(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_breakdown_sums_and_bounds_hold(made: tuple[str, list[Storage]], expandable: bool) -> None:
    phases, storages = made
    memory = peak_memory(graph(phases, storages), A100, expandable_segments=expandable)
    assert tuple(memory.breakdown) == MEMORY_PARTS
    assert sum(memory.breakdown.values()) == memory.peak_bytes
    assert min(memory.breakdown.values()) >= 0
    assert memory.allocated_bytes <= memory.reserved_bytes <= memory.peak_bytes
    assert memory.peak_bytes - memory.reserved_bytes == framework_bytes(A100)
    # Brute force: what is alive while each op runs, exactly and with every request rounded.
    alive = [[s for s in storages if s.born <= i and (s.dies is None or s.dies >= i)] for i in range(len(phases))]
    exact = [sum(s.nbytes for s in live) for live in alive]
    rounded = [sum(round_size(s.nbytes) for s in live if s.nbytes) for live in alive]
    timeline = memory.timeline_bytes
    assert timeline is not None
    assert np.all(timeline >= exact)
    assert memory.allocated_bytes == timeline.max()
    if expandable:  # there every left-over is split off, so that nothing but rounding is added
        assert timeline.tolist() == rounded
    parts = sum(n for part, n in memory.breakdown.items() if part not in ("fragmentation", "framework"))
    assert parts == exact[memory.peak_op]


# --- libraries and driver ------------------------------------------------------------------------------------------


def test_the_context_of_an_a100_is_the_published_one() -> None:
    # 0.47 GiB held by PyTorch 1.13.1 with one tensor, whose segment takes 2 MiB of it (source in the module).
    assert framework_bytes(A100) / MIB == pytest.approx(0.47 * 1024 - 2, abs=0.01)
    assert framework_bytes(A100, "torch-eager-loading") > framework_bytes(A100) + 1000 * MIB
    assert framework_bytes(A100, "none") == 0
    assert framework_bytes(device("h100-sxm5-80gb")) > framework_bytes(A100)  # more threads, more local memory
    assert framework_bytes(device("mi300x")) == 0


def test_an_unknown_framework_is_named_with_the_known() -> None:
    with pytest.raises(UnknownNameError, match="torch-eager-loading") as raised:
        peak_memory(graph("f", []), A100, framework="torch-eager")
    assert set(raised.value.known) == set(FRAMEWORKS)


def product(phase: str) -> Op:
    tensors = (Tensor((4, 4), "float32", 0),) * 3
    return make_op("aten.mm.default", tensors, (0, 1), (2,), phase=phase)


def test_each_thread_that_multiplies_holds_a_cublas_workspace() -> None:
    step = replace(graph("f", []), ops=(product("forward"), product("forward")))
    assert persistent_workspace_bytes(step, A100) == (8_519_680,)  # 2 × 4 MiB + 8 × 16 KiB
    step = replace(step, ops=(*step.ops, product("backward")))
    assert persistent_workspace_bytes(step, A100) == (8_519_680, 8_519_680)
    assert persistent_workspace_bytes(step, device("h100-sxm5-80gb")) == (32 * MIB, 32 * MIB)
    assert persistent_workspace_bytes(step, device("mi300x")) == ()
    assert peak_memory(step, A100).breakdown["workspaces"] == 2 * 8_519_680


Made = tuple[Op, tuple[Tensor, ...]]


def convolution(dtype: str, layout: str = "nchw", groups: int = 1, backward: bool = False) -> Made:
    """x (2, 64, 8, 8), w (32, 64/groups, 3, 3), y (2, 32, 8, 8) of `dtype`."""
    last = layout == "nhwc"
    x = Tensor((2, 64, 8, 8), dtype, 0, (4096, 1, 512, 64) if last else None)
    w = Tensor((32, 64 // groups, 3, 3), dtype, 1)
    y = Tensor((2, 32, 8, 8), dtype, 2, (2048, 1, 256, 32) if last else None)
    tensors = (x, w, y)
    attrs = {"stride": (1, 1), "padding": (1, 1), "groups": groups, "transposed": False}
    if not backward:
        return make_op("aten.convolution.default", tensors, (0, 1), (2,), attrs=MappingProxyType(attrs)), tensors
    tensors = (y, x, w, replace(x, storage=3), replace(w, storage=4))
    attrs = MappingProxyType({**attrs, "grad_mask": (True, True, False)})
    op = make_op("aten.convolution_backward.default", tensors, (0, 1, 2), (3, 4), attrs=attrs, phase="backward")
    return op, tensors


X, W, Y = 2 * 64 * 64, 32 * 64 * 9, 2 * 32 * 64  # elements


@pytest.mark.parametrize(
    ("made", "name", "expected"),
    [
        (convolution("float32"), "a100-sxm4-40gb", (4 * (X + W),)),
        (convolution("float32", backward=True), "a100-sxm4-40gb", (4 * (X + W + Y),) * 2),
        (convolution("float32", "nhwc"), "a100-sxm4-40gb", (4 * (X + W),)),
        (convolution("float32", "nhwc", backward=True), "h100-sxm5-80gb", (4 * (W + Y), 4 * (X + W + Y))),
        (convolution("float16"), "a100-sxm4-40gb", (2 * (X + W + Y),)),
        (convolution("bfloat16", "nhwc"), "a100-sxm4-40gb", (0,)),
        (convolution("float16", backward=True), "t4", (2 * (X + W + Y),) * 2),
        (convolution("float16", groups=8), "t4", (2 * (X + W // 8 + Y),)),
        (convolution("float32"), "t4", (0,)),  # no TF32
        (convolution("float64"), "a100-sxm4-40gb", (0,)),
        (convolution("float16", groups=64), "t4", ()),  # depthwise
        (convolution("float32"), "mi300x", ()),
    ],
)
def test_convolution_workspaces(made: Made, name: str, expected: tuple[int, ...]) -> None:
    assert op_workspaces(*made, device(name)) == expected


def pointwise(channels_in: int, channels_out: int) -> Made:
    """A 1 × 1 convolution of 32 images of 56 × 56 pixels in fp32."""
    x, y = (Tensor((32, c, 56, 56), "float32", i) for i, c in enumerate((channels_in, channels_out)))
    tensors = (x, Tensor((channels_out, channels_in, 1, 1), "float32", 2), y)
    return make_op("aten.convolution.default", tensors, (0, 1), (2,)), tensors


def test_the_fastest_plan_copies_only_what_repays_the_copy() -> None:
    # A100: 19.5 TFLOP/s without and 156 with tensor cores (TF32), 1.555 TB/s. 32 → 64 channels, by hand: 0.41 GFLOP
    # are 21 µs, less than the 39 MB of traffic take (25 µs), so that any copy would only add to it. 512 → 512: 52.6
    # GFLOP are 2.7 ms against 0.34 ms, and 0.26 ms of traffic; copying the input (2 × 206 MB) costs another 0.26 ms.
    for (channels_in, channels_out), copied in (((32, 64), False), ((512, 512), True)):
        op, tensors = pointwise(channels_in, channels_out)
        workspace = tensors[0].nbytes + tensors[1].nbytes
        assert op_workspaces(op, tensors, A100) == (workspace,)
        assert op_workspaces(op, tensors, A100, fastest=True) == (workspace * copied,)
    unknown = replace(A100, memory_bandwidth_bytes_per_s=None)
    op, tensors = pointwise(32, 64)
    assert op_workspaces(op, tensors, unknown, fastest=True) == op_workspaces(op, tensors, A100)


def test_only_gradients_that_are_wanted_take_a_workspace() -> None:
    op, tensors = convolution("float32", backward=True)
    only_weight = replace(op, attrs=MappingProxyType({**op.attrs, "grad_mask": (False, True, True)}))
    assert len(op_workspaces(only_weight, tensors, A100)) == 1


def test_workspaces_take_part_in_the_peak() -> None:
    op, tensors = convolution("float32")
    big = replace(tensors[0], shape=(2048, 64, 8, 8)), tensors[1], replace(tensors[2], shape=(2048, 32, 8, 8))
    op = make_op(op.name, big, op.inputs, op.outputs, attrs=op.attrs)
    storages = (
        Storage(big[0].nbytes, "input"),
        Storage(big[1].nbytes, "parameter"),
        Storage(big[2].nbytes, "output", 0),
    )
    step = replace(graph("f", []), ops=(op,), tensors=big, storages=storages)
    memory = peak_memory(step, A100, framework="none")
    assert memory.breakdown["workspaces"] == big[0].nbytes + big[1].nbytes
    assert peak_memory(step, device("t4"), framework="none").breakdown["workspaces"] == 0


def test_the_search_of_cudnn_benchmark_empties_the_cache() -> None:
    # Op 0 makes 80 MiB, op 1 is a convolution, op 2 makes 90; each is gone when the next begins.
    op, tensors = convolution("float32")
    relu = graph("f", []).ops[0]
    storages = (
        Storage(4 * X, "input"),
        Storage(4 * W, "parameter"),
        Storage(4 * Y, "temporary", 1, 1),
        Storage(80 * MIB, "temporary", 0, 0),
        Storage(90 * MIB, "temporary", 2, 2),
    )
    step = replace(graph("f", []), ops=(relu, op, relu), tensors=tensors, storages=storages)
    plain = peak_memory(step, A100, framework="none")
    searched = peak_memory(step, A100, framework="none", cudnn_benchmark=True)
    assert plain.reserved_bytes == (80 + 90 + 2) * MIB
    # The search gives the 80 back before the 90 are asked for; from then on the 90 serve both.
    assert searched.reserved_bytes == (90 + 2) * MIB
    assert searched.allocated_bytes == plain.allocated_bytes


# --- the largest batch ---------------------------------------------------------------------------------------------


def at(batch: int) -> Graph:
    return graph("fb", [Storage(100 * MIB, "parameter"), Storage(30 * MIB * batch, "activation", 0, 1)])


@given(st.integers(130, 3000))
@settings(max_examples=40, deadline=None)
def test_the_largest_batch_is_the_last_that_fits(capacity: int) -> None:
    small = replace(A100, memory_bytes=capacity * MIB)
    batch = largest_batch(at, small, framework="none")
    assert batch == (capacity - 100) // 30
    assert peak_memory(at(batch), small, framework="none").fits
    assert not peak_memory(at(batch + 1), small, framework="none").fits


def test_no_batch_above_the_limit_is_tried() -> None:
    asked: list[int] = []

    def counting(batch: int) -> Graph:
        asked.append(batch)
        return at(batch)

    assert largest_batch(counting, A100, framework="none", limit=37) == 37
    assert max(asked) == 37


def test_infeasible_says_by_how_much() -> None:
    with pytest.raises(InfeasibleError, match=r"batch of 1 does not fit .* 30(\.0)? MiB too many"):
        largest_batch(at, replace(A100, memory_bytes=100 * MIB), framework="none")
    with pytest.raises(InfeasibleError, match=r"memory of .* is unknown"):
        largest_batch(at, replace(A100, memory_bytes=None))


# --- captured and parametric ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def captured() -> dict[str, Graph]:
    pytest.importorskip("timm")
    import foretell

    return {
        "train": foretell.capture("timm:resnet18", batch=8, train=True, optimizer="sgd"),
        "infer": foretell.capture("timm:resnet18", batch=8),
    }


def test_training_takes_what_it_must(captured: dict[str, Graph]) -> None:
    memory = peak_memory(captured["train"], A100)
    parameters = captured["train"].parameter_bytes
    assert memory.breakdown["parameters"] == parameters == memory.breakdown["optimizer"]
    assert captured["train"].ops[memory.peak_op].phase == "backward"
    assert memory.breakdown["activations"] > 10 * peak_memory(captured["infer"], A100).breakdown["activations"]
    assert peak_memory(captured["infer"], A100).peak_bytes < memory.peak_bytes


def test_a_search_is_replayed_for_each_device() -> None:
    op, tensors = pointwise(32, 64)
    storages = (Storage(1, "input"), Storage(tensors[2].nbytes, "output", 0), Storage(1, "parameter"))
    step = replace(graph("f", []), ops=(op,), tensors=tensors, storages=storages)
    slow = replace(A100, peaks={**A100.peaks, "fp32.vector": 1e12})  # of the same kind, but its copies repay
    peaks = [peak_memory(step, on, framework="none", cudnn_benchmark=True).allocated_bytes for on in (A100, slow)]
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize("search", [False, True])
def test_more_steps_change_nothing(captured: dict[str, Graph], search: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in captured.values():
        memory = peak_memory(step, A100, cudnn_benchmark=search)
        with monkeypatch.context() as patch:
            patch.setattr("foretell.cost.memory._REPEATS", 6)
            assert peak_memory(replace(step), A100, cudnn_benchmark=search).breakdown == memory.breakdown


def test_the_same_graph_on_every_device_is_replayed_once_for_each_kind(captured: dict[str, Graph]) -> None:
    names = ("a100-sxm4-40gb", "a100-pcie-80gb", "h100-sxm5-80gb", "v100-sxm2-16gb", "t4", "rtx-4090", "mi300x")
    for name in names:
        on = device(name)
        assert peak_memory(captured["train"], on).capacity_bytes == on.memory_bytes
    again = peak_memory(captured["train"], A100)
    assert again.breakdown == peak_memory(replace(captured["train"]), A100).breakdown


def test_a_parametric_transformer_goes_the_same_way() -> None:
    import foretell

    graph = foretell.capture("llm:llama-3.1-8b", batch=4, context=2048, phase="decode", precision="bf16")
    memory = peak_memory(graph, device("h100-sxm5-80gb"))
    assert memory.breakdown["parameters"] == graph.parameter_bytes
    assert memory.breakdown["kv_cache"] >= 4 * 2048 * 32 * 2 * 8 * 128 * 2  # layers × (k, v) × heads × depth × bytes
    assert sum(memory.breakdown.values()) == memory.peak_bytes
    assert memory.fits
