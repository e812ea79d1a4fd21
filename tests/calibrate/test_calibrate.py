"""Calibrating: the fit finds constants it was not told, scales follow measurements, and bad tables are refused."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from foretell.calibrate import microbench as mb
from foretell.calibrate.here import fit, here, toml_of
from foretell.calibrate.tables import factor_of, from_table, write
from foretell.cost import Settings, estimate, lower, models
from foretell.cost.kernels import cpu
from foretell.cost.program import Program
from foretell.cost.scales import calibrated, parse
from foretell.errors import ForetellError, InputError
from foretell.graph import OpTable
from foretell.graph.op import Tensor, make_op
from foretell.hardware import device
from foretell.hardware.device import Device, FrozenMap
from foretell.hardware.loader import load_device

CPU = Device(
    name="box",
    title="A box",
    vendor="none",
    kind="cpu",
    architecture="test",
    multiprocessors=2,
    l1_bytes_per_sm=2**15,
    l2_bytes=2**22,
    l3_bytes=2**25,
    memory_bytes=2**34,
    peaks=FrozenMap({"fp32.vector": 3e11}),
    memory_bandwidth_bytes_per_s=4e10,
    sources=FrozenMap({"peaks.fp32.vector": 'A "quoted" source'}),
)
CACHES = cpu.Caches(2**22, 2**25)


def one(name, shapes, out, **attrs):
    """A program of one operation."""
    tensors = [Tensor(shape, "float32", i) for i, shape in enumerate((*shapes, out))]
    op = make_op(name, tensors, tuple(range(len(shapes))), (len(shapes),), attrs=attrs)
    return Program.of(OpTable.from_ops([op], tensors))


def seconds(program, constants=cpu.DEFAULTS):
    table = program.table
    context = cpu.Context.of(table)
    return float(
        cpu.times(table, program.strided, program.names, program.name_code, context, CACHES, constants).total_s[0]
    )


def conv(batch, channels, out, size, kernel=3, groups=1):
    return one(
        "aten.convolution.default",
        ((batch, channels, size, size), (out, channels // groups, kernel, kernel)),
        (batch, out, size, size),
        stride=(1, 1), dilation=(1, 1), groups=groups, transposed=False,
    )


# --- the processor model -------------------------------------------------------------------------------------------


def test_pointwise_traffic_by_hand():
    """relu_ over 2^26 bytes: read and written once at the speed of memory and L3, no new page, one dispatch."""
    elements = 2**24
    program = one("aten.relu_.default", ((elements,),), (elements,))
    c = cpu.DEFAULTS
    l2, l3 = ((4 * elements / size) ** 2 for size in (2**22, 2**25))
    cached = c["byte.l2"] / (1 + l2) + c["byte.l3"] * l2 / (1 + l2)
    byte = cached / (1 + l3) + c["byte.memory"] * l3 / (1 + l3)
    assert seconds(program) == pytest.approx(8 * elements * byte + c["dispatch.pointwise"], rel=1e-12)


def test_results_beyond_the_allocators_limit_fault():
    """32 MiB are kept by the C library, one element more is mapped anew: 0.28 ns a byte appear at once."""
    kept, mapped = (seconds(one("aten.relu.default", ((n,),), (n,))) for n in (2**23, 2**23 + 1))
    assert mapped - kept == pytest.approx(2**25 * cpu.DEFAULTS["byte.page"], rel=1e-4)


def test_small_convolutions_of_one_image_are_not_onednns():
    """ATen's rule: one image, at most 20480 elements, window up to 3×3, ungrouped; what else pays oneDNN's dispatch."""
    dear = cpu.DEFAULTS["dispatch.convolution"]
    assert seconds(conv(1, 20, 8, 32)) < dear  # 20480 elements
    assert seconds(conv(1, 21, 8, 32)) > dear
    assert seconds(conv(2, 20, 8, 16)) > dear
    assert seconds(conv(1, 20, 8, 16, kernel=5)) > dear
    assert seconds(conv(1, 20, 20, 16, groups=20)) > dear


def test_channels_pad_to_blocks():
    """17 channels run as 32."""
    arithmetic = []
    for channels in (17, 32):
        p = conv(8, channels, 32, 64)
        t = cpu.times(p.table, p.strided, p.names, p.name_code, cpu.Context.of(p.table), CACHES, cpu.DEFAULTS)
        arithmetic.append(float(t.arithmetic_s[0]))
    depth = cpu.DEFAULTS["convolution.depth"]
    assert arithmetic[0] / arithmetic[1] == pytest.approx((1 + depth / 153) / (1 + depth / 288))


def test_many_operations_cost_little(within):

    table = OpTable.concatenate([conv(8, 64, 64, 28).table, one("aten.mm.default", ((9, 8), (8, 7)), (9, 7)).table])
    large = Program.of(OpTable.concatenate([table] * 50_000))
    context = cpu.Context.of(large.table)
    arguments = (large.table, large.strided, large.names, large.name_code, context, CACHES, cpu.DEFAULTS)
    within(0.5, lambda: cpu.times(*arguments))


def test_the_fit_finds_constants_it_was_not_told():
    """Times made with a matrix rate 1.6 times and a dispatch 2.5 times the starting ones; one case in ten spoilt."""
    truth = {**cpu.DEFAULTS, "rate.matmul": 1.6 * cpu.DEFAULTS["rate.matmul"], "dispatch.pointwise": 1.25e-5}
    programs = {f"mm {n}": one("aten.mm.default", ((n, 512), (512, n)), (n, n)) for n in range(256, 2304, 128)}
    programs |= {f"relu {n}": one("aten.relu_.default", ((n,),), (n,)) for n in (2, 64, 256, 1024, 4096, 2**14)}
    found = {name: (seconds(program, truth), 1.02) for name, program in programs.items()}
    found["mm 512"] = (10 * found["mm 512"][0], 1.02)
    found["relu 64"] = (10 * found["relu 64"][0], 1.02)
    constants = fit(programs, found, CPU).constants
    # `alone`, common to all, may take a little of both.
    ratio = constants["rate.matmul"] / cpu.DEFAULTS["rate.matmul"]
    assert ratio == pytest.approx(1.6, rel=0.12)
    assert constants["dispatch.pointwise"] == pytest.approx(1.25e-5, rel=0.12)


# --- measuring -----------------------------------------------------------------------------------------------------

FEW = (mb.Case("relus", (4, 8), (("relu_",),) * 3), mb.Case("linear", (4, 8), (("linear", 8, 8),)))


class Counting(mb.HostClock):
    def __init__(self, stop_after=math.inf):
        self.calls, self.stop_after = 0, stop_after

    def seconds(self, call, runs):
        self.calls += 1
        if self.calls > self.stop_after:
            raise KeyboardInterrupt
        return super().seconds(call, runs)


def test_an_interrupted_run_goes_on(tmp_path):
    path = tmp_path / "samples.jsonl"
    clock = Counting(stop_after=40)
    with pytest.raises(KeyboardInterrupt):
        mb.run(path, 10.0, cases=FEW, clock=clock)
    kept = path.read_text().splitlines()
    assert len(kept) == 2  # its head, and the first case
    path.write_text("\n".join(kept) + '\n["relus", 2, 1.')  # cut short while writing
    again = mb.run(path, 0.5, cases=FEW, clock=Counting())
    assert len(again) == 6
    assert again[0].mean_s == json.loads(kept[1])[2]
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 7


def test_samples_of_another_machine_do_not_count(tmp_path):
    path = tmp_path / "samples.jsonl"
    mb.run(path, 0.1, cases=FEW)
    lines = path.read_text().splitlines()
    head = json.loads(lines[0])
    head["machine"]["threads"] += 1
    path.write_text("\n".join([json.dumps(head), *lines[1:]]))
    clock = Counting()
    mb.run(path, 0.1, cases=FEW, clock=clock)
    assert clock.calls > 0


def test_cuda_times_come_from_events():
    """A stand-in for torch.cuda: events 3 ms apart, and every call between them."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, other):
            return 3.0

    cuda = SimpleNamespace(Event=Event, synchronize=lambda: log.append("sync"))
    assert mb.CudaClock(cuda).seconds(lambda: log.append("call"), 2) == pytest.approx(3e-3)
    assert log == ["sync", "record", "call", "call", "record", "wait"]


def test_here_writes_what_predict_reads(tmp_path, monkeypatch):
    """Before: refused, with the way out. After: the processor model, by default."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    graph = mb.graph_of(FEW[1])
    bare = replace(device("local-cpu"), memory_bandwidth_bytes_per_s=None)
    with pytest.raises(InputError, match="foretell calibrate --here"):
        estimate(graph, bare, model="roofline")
    stream = mb.Case("stream", (2**16,), (("relu_",),))
    found = here(seconds=0.3, cases=(*FEW, stream))
    assert found.calibration == tmp_path / "foretell" / "local.calibration.json"
    local = device("local-cpu")
    assert local.memory_bandwidth_bytes_per_s > 0
    assert local.peak("fp32") > 0
    assert "calibrate --here" in local.sources["memory_bandwidth_bytes_per_s"]
    after = estimate(graph, local)
    assert after.model == "cpu"
    assert "this machine's" in after.interval_basis
    assert estimate(graph, local, calibration=found.calibration).time_s == pytest.approx(after.time_s)
    low, high = after.time_interval_s
    assert low < after.time_s < high


def test_a_gpu_outside_the_catalogue(tmp_path, monkeypatch):
    """Stand-ins for nvidia-smi and CUDA, whose events say 1 ms for any call: peak and bandwidth by hand."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA Quadro GV100, 32508 MiB, 1627 MHz, 250.00 W, 7.0\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    made = mb.modules
    monkeypatch.setattr(mb, "modules", lambda case, device="cpu": made(case))

    class Millisecond:
        def seconds(self, call, runs):
            return 1e-3 * runs

    cases = (mb.Case("product", (512, 512), (("linear", 512, 512),)), mb.Case("stream", (2**22,), (("relu_",),)))
    found = here(kind="gpu", seconds=0.2, cases=cases, clock=Millisecond())
    assert found.toml == tmp_path / "foretell" / "local-gpu.toml"
    gpu = device("local")
    assert gpu.kind == "gpu"
    assert gpu.peak("fp32") == pytest.approx(2 * 512**3 / 1e-3, rel=1e-3)
    assert gpu.memory_bandwidth_bytes_per_s == pytest.approx(8 * 2**22 / 1e-3, rel=1e-3)
    after = estimate(mb.graph_of(cases[0]), gpu, calibration=found.calibration)
    assert any("scaled by measurements" in note for note in after.notes)


def test_a_data_sheet_survives_its_file(tmp_path):
    path = tmp_path / "box.toml"
    path.write_text(toml_of(CPU), encoding="utf-8")
    read = load_device(path)
    for name in ("multiprocessors", "l1_bytes_per_sm", "l2_bytes", "l3_bytes", "memory_bytes"):
        assert getattr(read, name) == getattr(CPU, name)
    assert read.peak("fp32") == pytest.approx(3e11)
    assert read.memory_bandwidth_bytes_per_s == pytest.approx(4e10)
    assert read.sources["peaks.fp32.vector"] == 'A "quoted" source'


# --- tables --------------------------------------------------------------------------------------------------------


def test_a_factor_by_hand():
    """Nine rows of 2, one of 20: the median 2, shrunk by 10/14; 9 of 10 rows lie within what separates the two."""
    factor = factor_of([2.0] * 9 + [20.0])
    assert factor.mid == pytest.approx(2.0 ** (10 / 14))
    assert factor.high == pytest.approx(2.0 ** (4 / 14))
    assert factor.low == pytest.approx(1 / factor.high)
    assert factor_of([3.0]).mid == pytest.approx(3.0**0.2)
    assert factor_of([3.0]).high >= 2.0


@pytest.fixture
def t4():
    return device("t4")


@pytest.fixture
def table(tmp_path, t4):
    """A table of `rows` as a file; `measured` gives a product's honest time."""

    def write_rows(text):
        path = tmp_path / "table.csv"
        path.write_text(text)
        return path

    return write_rows


def predicted(t4, m, n, k):
    program = one("aten.mm.default", ((m, k), (k, n)), (m, n))
    times = models()["roofline"].op_times(program, t4, Settings())
    return float(np.maximum(times.busy_s, times.host_s)[0])


def test_scales_follow_the_table(table, tmp_path, t4):
    """Products that all take 1.5 times what is predicted: so does a network of them, by 1.5^(12/16)."""
    sizes = [(256 * i, 512, 1024) for i in range(1, 13)]
    rows = [f"matmul,{m},{n},{k},{1.5 * predicted(t4, m, n, k):.9g},T4" for m, n, k in sizes]
    scales = from_table(table("\n".join(["kind,m,n,k,time_s,device", *rows])), t4, "roofline")
    assert scales.factors["matmul"].mid == pytest.approx(1.5**0.75)
    path = tmp_path / "t4.json"
    write(scales, path)
    assert parse(path.read_text(), str(path)).factors["matmul"].mid == pytest.approx(1.5**0.75, rel=1e-3)
    graph = mb.graph_of(mb.Case("product", (4096, 4096), (("linear", 4096, 4096),)))
    plain, scaled = estimate(graph, t4, model="roofline"), estimate(graph, t4, model="roofline", calibration=path)
    assert scaled.time_s / plain.time_s == pytest.approx(1.5**0.75, rel=1e-2)
    assert any("scaled by measurements" in note for note in scaled.notes)
    with pytest.raises(InputError, match="is for t4, not l4"):
        calibrated(path, device("l4"), "roofline")


GOOD = "kind,m,n,k,time_s,device\nmatmul,1024,1024,1024,0.0005,t4\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no rows"),
        ("kind,m,n,k\nmatmul,1,1,1\n", "lacks the column 'time_s'"),
        ("m,n,k,time_s\n1,1,1,1\n", "lacks the column 'kind'"),
        ("kind,m,n,time_s\nmatmul,9,9,0.001\n", "row 2: lacks the column 'k'"),
        (GOOD + "matmul,1024,1024,1024,0,t4\nmatmul,8,8,8,-1,t4\nmatmul,8,8,8,nan,t4\n", "rows 3, 4, 5: time_s"),
        (GOOD + "matmul,1024,1024,1024,0.5,t4\n", "row 3: time_s is .* times .* milliseconds"),
        (GOOD + "matmul,8192,8192,8192,0.000001,t4\n", "row 3: time_s is"),
        (GOOD + "matmul,1024,1024,1024,0.0005,l4\n", r"mixes devices: 't4' \(row 2\), 'l4' \(row 3\)"),
        (GOOD.replace("t4", "l4"), "row 2: measures l4, not t4"),
        (GOOD.replace("matmul", "matmull"), "row 2: unknown kind of operator 'matmull'.*did you mean 'matmul'"),
        (GOOD.replace("1024,1024,1024", "1024,0,1024"), "row 2: n is '0'"),
        ("workload,batch,time_s\nzoo:nothing,1,1\n", "row 2: unknown zoo model"),
    ],
)
def test_bad_tables_are_refused(table, t4, text, said):
    with pytest.raises(ForetellError, match=said):
        from_table(table(text), t4, "roofline")


def test_bad_scales_are_refused():
    good = {"schema": "foretell.scales/1", "device": "t4", "model": "roofline", "provenance": {}}
    for factors in ({"matmul": [0.9, 1.0, 1.1]}, {"matmul": [1.2, 1.0, 1.1, 3]}, {"nothing": [0.9, 1, 1.1, 3]}, []):
        with pytest.raises(InputError):
            parse(json.dumps({**good, "factors": factors}), "here")


def test_half_a_data_sheet_widens_the_interval(t4):
    graph = mb.graph_of(FEW[1])
    whole = estimate(graph, t4, model="roofline")
    half = estimate(graph, replace(t4, multiprocessors=None, l2_bytes=None), model="roofline")
    ratio = [math.log(e.time_interval_s[1] / e.time_interval_s[0]) for e in (whole, half)]
    assert ratio[1] > ratio[0]
    clockless = estimate(graph, replace(t4, boost_clock_hz=None), model="roofline")
    log_high, wider = (math.log(e.time_interval_s[1] / e.time_s) for e in (whole, clockless))
    assert wider == pytest.approx(math.hypot(log_high, math.log(1.3)))
    assert any("multiprocessors, l2_bytes of t4 unknown: the interval is wider" in note for note in half.notes)


def test_a_processor_scales_with_its_data_sheet():
    """Twice the peak and bandwidth, half the time of what is neither dispatch nor page faults."""
    graph = mb.graph_of(mb.Case("product", (512, 512), (("linear", 512, 512),)))
    double = replace(CPU, peaks=FrozenMap({"fp32.vector": 6e11}), memory_bandwidth_bytes_per_s=8e10)
    one_, two = (models()["cpu"].op_times(lower(graph), d, Settings()) for d in (CPU, double))
    body = [float((t.busy_s - t.launch_s).sum()) for t in (one_, two)]
    assert body[0] / body[1] == pytest.approx(2.0)
    with pytest.raises(InputError, match="is a gpu"):
        models()["cpu"].op_times(lower(graph), device("t4"), Settings())


def test_a_table_runs_no_file(tmp_path):
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    path = tmp_path / "table.csv"
    path.write_text(f"workload,time_s\npy:{tmp_path / 'code.py'}:make,1.0\n")
    with pytest.raises(InputError, match="would run a file"):
        from_table(path, device("l4"), "roofline")
    assert not (tmp_path / "ran").exists()


CONVOLUTION = "kind,batch,in_channels,out_channels,height,width,kernel,stride,groups,dtype,time_s\n"
MM = "kind,m,n,k,time_s\n"


def test_a_byte_order_mark_and_blank_lines_are_no_part_of_a_table(table, t4):
    text = "\ufeff" + MM + "\nmatmul,1024,1024,1024,0.0006\n\n"
    assert from_table(table(text), t4, "roofline").factors["matmul"].rows == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MM + 'matmul,"' + "1" * 140_000 + '",2,2,1\n', "row 2: is no CSV: field larger"),
        ("kind,m,m,n,k,time_s\nmatmul,1,1,1,1,1\n", "has the column 'm' twice"),
        (MM + "matmul,1024,1024,1024,0.0006\nmatmul,1024,1024,1024,0.0006,9\n", "row 3: has 6 fields under 5 columns"),
        (CONVOLUTION + "convolution,1,8,8,16,16,3,1,1,bool,1e-4\n", "row 2: unknown dtype of an operator 'bool'"),
        (CONVOLUTION + "convolution,1,8,8,16,16,3,1,1,floaty,1e-4\n", "row 2: unknown dtype 'floaty'"),
        (CONVOLUTION + "convolution,1,8,8,16,16,3,1,3,float32,1e-4\n", "row 2: 3 groups do not divide 8"),
        (CONVOLUTION + "convolution,1,8,6,16,16,3,1,4,float32,1e-4\n", "8 in_channels and 6 out_channels"),
        (CONVOLUTION + "convolution,1,8,8,1,1,4,1,1,float32,1e-4\n", "row 2: a window of 4 does not fit"),
        (MM + f"matmul,{2**39},{2**39},1024,0.0006\n", "row 2: a tensor of more than"),
    ],
)
def test_what_no_device_could_run_is_refused_with_its_row(table, t4, text, said):
    with pytest.raises(InputError) as caught:
        from_table(table(text), t4, "roofline")
    assert said in str(caught.value)
    assert "table.csv" in str(caught.value)


@pytest.mark.parametrize(("power", "unit"), [(3, "milliseconds"), (6, "microseconds"), (9, "nanoseconds")])
def test_the_unit_that_times_are_in_is_named(table, t4, power, unit):
    right = predicted(t4, 1024, 1024, 1024)
    with pytest.raises(InputError, match=f"in {unit}\\?.*give seconds"):
        from_table(table(MM + f"matmul,1024,1024,1024,{right * 10**power!r}\n"), t4, "roofline")


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000, *(f'["linear", {rest}]' for rest in ("0, 1e999, 3", "0, -1.0, 3", "0, NaN, 3", "1e999, 1, 3"))],
)
def test_damaged_samples_are_measured_anew(tmp_path, line):
    path = tmp_path / "local.samples.jsonl"
    first = mb.run(path, 0.1, cases=FEW, passes=1)
    head, *rest = path.read_text().splitlines()
    path.write_text("\n".join([head, rest[0], line, rest[1]]))
    again = mb.run(path, 0.1, cases=FEW, passes=1)
    assert [s.case for s in again] == [s.case for s in first]
    assert again[0] == first[0]  # kept; what follows the damage is not
    assert all(0 < s.mean_s < 60 for s in again)


def test_absurd_ratios_make_factors_that_are_read_again():
    factor = factor_of([1e9, 1e-9] * 10)
    assert factor.low == 1e-3
    assert factor.high == 1e3


@pytest.mark.parametrize("field", ["compute_capability", "l2_bytes", "boost_clock_hz", "multiprocessors"])
def test_an_estimate_names_the_number_a_data_sheet_lacks_and_widens(t4, field):
    graph = mb.graph_of(mb.Case("product", (256, 256), (("linear", 256, 256),)))
    whole = estimate(graph, t4, model="roofline")
    partial = estimate(graph, replace(t4, **{field: None}), model="roofline")
    assert any(field in note and "interval is wider" in note for note in partial.notes)
    (low, high), (lower, higher) = whole.time_interval_s, partial.time_interval_s
    assert higher / lower > 1.05 * high / low


def test_an_estimate_says_that_memory_is_unknown(t4):
    graph = mb.graph_of(mb.Case("product", (256, 256), (("linear", 256, 256),)))
    notes = estimate(graph, replace(t4, memory_bytes=None), model="roofline").notes
    assert any("memory of t4 unknown" in note for note in notes)
    assert not any("memory of t4 unknown" in note for note in estimate(graph, t4, model="roofline").notes)


def test_a_peak_that_nothing_stands_in_for_is_asked_for_by_file(t4):
    graph = mb.graph_of(mb.Case("product", (256, 256), (("linear", 256, 256),)))
    bare = replace(t4, peaks=FrozenMap({"int8.tensor": 1e14}))
    with pytest.raises(InputError, match=r"device 't4'.*no peak for .*under \[peaks\] of t4\.toml"):
        estimate(graph, bare, model="roofline")
