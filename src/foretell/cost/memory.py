"""Peak device memory of a step, as ``nvidia-smi`` would show it.

Three layers, each with its own source:

* *allocated*: the graph's storages, alive from the op that allocates them to the last that uses them, plus what the
  libraries ask for while an op runs (`op_workspaces`, `persistent_workspace_bytes`);
* *reserved*: a replay of the caching allocator over three steps (`foretell.cost.allocator`). The second finds the
  holes the first one left; in the first, the optimiser's state is created only when it first steps, in memory that the
  activations have freed, and a search of cuDNN empties the cache again and again, so that only the third step starts
  from a full cache, as all that follow do;
* *framework*: what the driver and the libraries hold for their code, outside the allocator (`framework_bytes`).

A step is one turn of a loop: what the turn before returned is bound to the caller's variable (``y = model(x)``) until
the new result takes its place, so a forward pass runs beside the output of the one before. In the breakdown that output
counts as activations, and in inference it is there twice while the last op runs.

What is reserved need not grow with the batch: tensors of 1 to 10 MiB are cut from segments of 20 MiB, whose rest may
stay idle, and from 10 MiB on each gets a segment of its own size, so a slightly larger batch can reserve a little less.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from foretell.cost.allocator import EMPTY_CACHE, MIB, Replay, replay
from foretell.cost.estimate import MEMORY_PARTS, Memory, frozen
from foretell.errors import InfeasibleError, unknown
from foretell.graph import Graph, Op, Storage, Tensor
from foretell.hardware.device import Device
from foretell.units import format_bytes

__all__ = [
    "FRAMEWORKS",
    "framework_bytes",
    "largest_batch",
    "op_workspaces",
    "peak_memory",
    "persistent_workspace_bytes",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

KIB = 1024

#: ``torch`` loads each kernel when it is first called (CUDA 11.7 and later); ``torch-eager-loading`` loads whole
#: libraries, as older drivers (before R515) or ``CUDA_MODULE_LOADING=EAGER`` make it do; ``none`` counts no framework.
FRAMEWORKS: tuple[str, ...] = ("torch", "torch-eager-loading", "none")

_PART_OF_ROLE = {
    "parameter": "parameters",
    "buffer": "buffers",
    "input": "inputs",
    "kv_cache": "kv_cache",
    "gradient": "gradients",
    "optimizer": "optimizer",
    "activation": "activations",
    "temporary": "temporaries",
    "output": "activations",
}


# --- what the libraries and the driver take ------------------------------------------------------------------------

# The driver sets aside local memory for as many threads as the device can hold at once, at the default stack limit of
# 1 KiB a thread (CUDA C++ Programming Guide, cudaLimitStackSize).
_STACK_BYTES_PER_THREAD = 1 * KIB
# The rest of a context: page tables, the driver's own heaps and code, and the first kernels. From the 0.47 GiB that
# PyTorch 1.13.1 holds on an A100 80GB after making one tensor, with lazy loading (Bekman, "Machine Learning Engineering
# Open Book", training/performance: "Preloaded CUDA kernels memory usage"), less the tensor's segment of 2 MiB and the
# local memory of 108 × 2048 threads. The same sum gives 476 MiB on an RTX 6000 Ada; 426 were seen there before the
# first kernel (unslothai/unsloth-zoo, pull request 1053).
_CONTEXT_BYTES = int(0.47 * KIB * MIB) - 2 * MIB - 108 * 2048 * _STACK_BYTES_PER_THREAD
# Code that eager loading puts on the device besides, in MiB: the loadable sections (ELF flag SHF_ALLOC) of the cubins
# that a device of this compute capability picks, counted in the published wheels: libtorch_cuda (the mean of PyTorch
# 2.0.1 and 2.3.1; for 8.0 that is of 350 and 501), cuBLAS and cuBLASLt 11.11.3.6, and cuDNN 8.7.0.84 (convolution and
# operation libraries). Counted so, PyTorch 1.13.1 alone has 455 MiB for the A100; its context there is 0.90 GiB
# instead of 0.47 (same source), 440 MiB more.
_EAGER_CODE_MIB = {"6.0": 671, "6.1": 665, "7.0": 874, "7.5": 950, "8.0": 1224, "8.6": 1237, "8.9": 1237, "9.0": 1898}

# PyTorch gives each cuBLAS handle a workspace ("CUDA semantics", "cuBLAS workspaces", CUBLAS_WORKSPACE_CONFIG):
# 2 × 4096 KiB + 8 × 16 KiB, and 32 MiB from Hopper on, as NVIDIA recommends. A handle belongs to a thread, and
# autograd's backward runs in one of its own.
_CUBLAS_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) * KIB
_CUBLAS_WORKSPACE_BYTES_HOPPER = 32 * MIB
_CUBLAS_KINDS = frozenset({"matmul", "batched_matmul", "grouped_matmul"})


def framework_bytes(device: Device, framework: str = "torch") -> int:
    """Device memory the process holds outside the allocator: the driver's context and the code it has loaded.

    0 for anything but an NVIDIA GPU, of which nothing is known here. With lazy loading the kernels of a workload add
    to it as they are first called: a few to a hundred MiB, not counted.
    """
    if framework not in FRAMEWORKS:
        raise unknown("framework", framework, FRAMEWORKS)
    if framework == "none" or device.kind != "gpu" or device.vendor != "NVIDIA":
        return 0
    threads = (device.multiprocessors or 0) * (device.max_threads_per_sm or 0)
    held = _CONTEXT_BYTES + threads * _STACK_BYTES_PER_THREAD
    if framework == "torch-eager-loading":
        held += _EAGER_CODE_MIB.get(device.compute_capability or "", 0) * MIB
    return held


def persistent_workspace_bytes(graph: Graph, device: Device) -> tuple[int, ...]:
    """Scratch that the libraries ask of the allocator once and keep: one cuBLAS workspace a thread that multiplies."""
    kind = _library_kind(device)
    if kind == 0:
        return ()
    phases = {op.phase == "backward" for op in graph.ops if op.kind in _CUBLAS_KINDS}
    return (_CUBLAS_WORKSPACE_BYTES_HOPPER if kind == _HOPPER else _CUBLAS_WORKSPACE_BYTES,) * len(phases)


def op_workspaces(op: Op, tensors: tuple[Tensor, ...], device: Device, *, fastest: bool = False) -> tuple[int, ...]:
    """Scratch an op asks of the allocator while it runs, beyond its outputs: that of cuDNN's convolutions, in bytes.

    One entry for the forward pass, or one for each gradient wanted of input and weight; none for other ops.

    Tensor-core kernels read channels-last operands, so with NCHW ones cuDNN first copies them into its workspace. What
    cuDNN 9.24 says its first-ranked plan takes, asked without a GPU (``benchmarks/cudnn_workspaces.py``) for A100,
    H100, RTX 4090 and T4, with input x, weight w, output y:

    =================  ===========  ====================  =====================
    operands           forward      gradient of the input gradient of the weight
    =================  ===========  ====================  =====================
    half, NCHW         x + w + y    x + w + y             x + w + y
    half, NHWC         0            0                     0
    TF32, NCHW         x + w        x + w + y             x + w + y
    TF32, NHWC         x + w        w + y                 x + w + y
    fp32 without TF32  0            0                     0
    =================  ===========  ====================  =====================

    Partial sums of weight gradients add up to some MiB, inputs of fewer channels than a kernel loads at once are
    padded, and a few shapes get another kind of kernel: none of this is counted. Depthwise convolutions have kernels
    of PyTorch's own, without workspace.

    With `fastest` (``torch.backends.cudnn.benchmark``) the plan is the one that takes the least time, not cuDNN's first
    guess: where a kernel without tensor cores, which reads NCHW as it is, ends before the copies and the tensor-core
    kernel would, there is no workspace (`_direct_is_faster`).
    """
    kind = _library_kind(device)
    if op.kind != "convolution" or kind == 0:
        return ()
    backward = op.name.startswith("aten.convolution_backward")
    operands = (*op.inputs[1:3], op.inputs[0]) if backward else (*op.inputs[:2], op.outputs[0])
    x, w, y = (tensors[t] for t in operands)
    groups = int(op.attrs.get("groups", 1))
    if groups > 1 and groups == x.shape[1]:
        return ()
    everything = x.nbytes + w.nbytes + y.nbytes
    last = x.layout == "channels_last"
    if x.dtype in ("float16", "bfloat16") and kind >= _VOLTA:
        forward, of_input, of_weight = (0, 0, 0) if last else (everything,) * 3
    elif x.dtype == "float32" and kind >= _AMPERE:
        forward, of_input, of_weight = x.nbytes + w.nbytes, everything - x.nbytes * last, everything
    else:
        forward, of_input, of_weight = 0, 0, 0
    wanted = op.attrs.get("grad_mask", (True, True)) if backward else (True,)
    passes = ("input", "weight") if backward else ("forward",)
    sizes: tuple[int, ...] = (of_input, of_weight) if backward else (forward,)
    if fastest:
        sizes = tuple(
            0 if _direct_is_faster(of, nbytes, (x, w, y), groups, bool(op.attrs.get("transposed")), device) else nbytes
            for of, nbytes in zip(passes, sizes, strict=True)
        )
    return tuple(nbytes for nbytes, asked in zip(sizes, wanted, strict=False) if asked)


# Columns of the smallest tile of implicit-GEMM convolutions (cuDNN's kernels are named by their tiles, such as
# ``scudnn_128x32`` and ``tilesize64x32x…``); narrower operands leave the rest of the tile idle.
_SMALLEST_TILE = 32


def _direct_is_faster(
    of: str, workspace: int, operands: tuple[Tensor, Tensor, Tensor], groups: int, transposed: bool, device: Device
) -> bool:
    """Whether a pass of a convolution is over sooner on the ordinary units, by the numbers of the data sheet alone.

    Both kernels take the longer of arithmetic and memory traffic, and both pad the channels of a group to the columns
    of their tile. Tensor cores also pay for the copies in the workspace, written once and read once. An inference from
    how implicit GEMM works, not a measurement: cuDNN's own search runs the kernels.
    """
    x, w, y = operands
    bandwidth = device.memory_bandwidth_bytes_per_s
    vector = device.peaks.get("fp32.vector")
    tensor = device.peaks.get("tf32.tensor" if x.dtype == "float32" else "fp16.tensor")
    if not workspace or not bandwidth or not vector or not tensor:
        return False
    dense = x if transposed else y  # the side whose every pixel meets the whole window
    flops = 2 * math.prod(w.shape) * dense.shape[0] * math.prod(dense.shape[2:])
    channels_in, channels_out = x.shape[1] // groups, y.shape[1] // groups
    columns = {"forward": (channels_out,), "input": (channels_in,), "weight": (channels_in, channels_out)}[of]
    padding = math.prod(max(c, _SMALLEST_TILE) / c for c in columns)
    traffic = (x.nbytes + w.nbytes + y.nbytes) / bandwidth
    direct = max(padding * flops / vector, traffic)
    return direct < max(padding * flops / tensor, traffic) + 2 * workspace / bandwidth


# Kinds of NVIDIA GPU that get the same workspaces, by compute capability: below 7.0 (1), and from 7.0, 8.0 and 9.0 on.
_VOLTA, _AMPERE, _HOPPER = 2, 3, 4


def _library_kind(device: Device) -> int:
    """One of the kinds above; 0 for any other device, of whose libraries nothing is known here."""
    if device.kind != "gpu" or device.vendor != "NVIDIA":
        return 0
    capability = float(device.compute_capability or 0)
    return 1 + (capability >= 7.0) + (capability >= 8.0) + (capability >= 9.0)


# --- the step as allocator events ----------------------------------------------------------------------------------


# Steps that are replayed; what is reported is the last.
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps as allocator events: `op` is the op each event belongs to, -1 before the first, in any step.

    Keys are indices into `storages` for the first step, then for each that follows, then workspaces. `last` is the
    index of the last step's first event. Ops in `skipped` repeat those that start at `like` (`_equal_rounds`).
    """

    storages: tuple[Storage, ...]
    events: list[tuple[int, int]]
    op: list[int]
    last: int
    skipped: range
    like: range


def _accumulated_in_place(graph: Graph) -> Graph:
    """The graph with gradients that meet summed in place, as on a device.

    Where a tensor's gradient comes from several ops, autograd adds into the one that is there if nothing else holds it
    (PyTorch ≥ 1.12, ``torch/csrc/autograd/input_buffer.cpp``, `can_accumulate_inplace`), but never for the tensors of
    a capture, which are a subclass: there each sum is a new tensor.
    """
    storages = list(graph.storages)
    held_by: dict[int, int] = {}  # storage of a sum: the storage it is really in
    for i, op in enumerate(graph.ops):
        if op.phase != "backward" or op.name != "aten.add.Tensor" or len(op.inputs) != 2 or op.repeat > 1:
            continue
        there, new, total = (graph.tensors[t] for t in (*op.inputs, op.outputs[0]))
        old = held_by.get(there.storage, there.storage)
        before, after = storages[old], storages[total.storage]
        fits = there.shape == new.shape == total.shape and before.nbytes == after.nbytes
        if fits and before.born >= 0 and before.dies == i and after.born == i and new.storage != there.storage:
            storages[old] = replace(before, dies=after.dies)
            storages[total.storage] = replace(after, nbytes=0, dies=i)
            held_by[total.storage] = old
    return replace(graph, storages=tuple(storages)) if held_by else graph


def _equal_rounds(graph: Graph) -> tuple[range, range]:
    """Ops of micro-batches that only repeat the second, and the ops of that one; two empty ranges if there are none.

    With gradient accumulation a step is many rounds of forward and backward passes. The first creates the gradients,
    the second finds them, and so does each until the last, which the optimiser follows.
    """
    phases = [op.phase for op in graph.ops]
    forward = [i for i, phase in enumerate(phases) if phase == "forward" and (i == 0 or phases[i - 1] != "forward")]
    if len(forward) < 4 or phases[0] != "forward":
        return range(0), range(0)
    names = [[op.name for op in graph.ops[a:b]] for a, b in pairwise(forward[1:])]
    if any(name != names[0] for name in names):
        return range(0), range(0)
    return range(forward[2], forward[-1]), range(forward[1], forward[2])


def _in_pieces(graph: Graph) -> tuple[Storage, ...]:
    """The storages as they are allocated: those that stand for equal layers (`Op.repeat`) one by one.

    A storage that lives through one layer only (a temporary) holds the bytes of one, the others those of all. What is
    there before the step and stays is left whole: it takes the same room.
    """
    pieces = [1] * len(graph.storages)
    for op in graph.ops:
        if op.repeat > 1:
            for t in (*op.inputs, *op.outputs):
                index = graph.tensors[t].storage
                pieces[index] = max(pieces[index], op.repeat)
    if max(pieces, default=1) == 1:
        return graph.storages
    result: list[Storage] = []
    for storage, count in zip(graph.storages, pieces, strict=True):
        resident = storage.born < 0 and storage.dies is None and storage.role != "optimizer"
        if count == 1 or resident or storage.role == "temporary" or storage.nbytes < count:
            result.append(storage)
        else:
            result.append(replace(storage, nbytes=storage.nbytes // count + storage.nbytes % count))
            result.extend([replace(storage, nbytes=storage.nbytes // count)] * (count - 1))
    return tuple(result)


def _steps(graph: Graph, device: Device, cudnn_benchmark: bool) -> _Steps:
    graph = _accumulated_in_place(graph)
    storages = _in_pieces(graph)
    count, ops = len(storages), len(graph.ops)
    skipped, like = _equal_rounds(graph)
    events: list[tuple[int, int]] = []
    at: list[int] = []

    def emit(key: int, nbytes: int, op: int) -> None:
        events.append((key, nbytes))
        at.append(op)

    born: dict[int, list[int]] = defaultdict(list)
    freed: dict[int, list[int]] = defaultdict(list)
    replaced: list[int] = []  # alive after the step: the next one makes them anew
    for index, storage in enumerate(storages):
        if storage.dies is not None and storage.born in skipped and max(storage.dies, storage.born) in skipped:
            continue
        if storage.born >= 0:
            born[storage.born].append(index)
            if storage.dies is None:
                replaced.append(index)
        if storage.dies is not None:
            freed[max(storage.dies, storage.born)].append(index)
    # What the step frees without having made it is put back between steps, as a data loader does.
    passing = [i for i, s in enumerate(storages) if s.born < 0 and s.dies is not None]
    first_update = next((i for i, op in enumerate(graph.ops) if op.phase == "optimizer"), -1)
    late = {i for i, s in enumerate(storages) if s.born < 0 and s.role == "optimizer"} if first_update >= 0 else set()
    last_forward = max((i for i, op in enumerate(graph.ops) if op.phase == "forward"), default=ops - 1)
    scratch = [
        () if i in skipped else op_workspaces(op, graph.tensors, device, fastest=cudnn_benchmark)
        for i, op in enumerate(graph.ops)
    ]
    searched: set[tuple[object, ...]] = set()  # convolutions that cudnn.benchmark has tried out

    workspace = _REPEATS * count
    for index, storage in enumerate(storages):
        if storage.born < 0 and index not in late:
            emit(index, storage.nbytes, -1)
    for nbytes in persistent_workspace_bytes(graph, device):
        emit(workspace, nbytes, -1)
        workspace += 1

    last = 0
    for step in range(_REPEATS):
        offset, before = step * count, (step - 1) * count
        if step:
            last = len(events)
            for index in replaced:  # the cache that a step leaves is the one that the next step finds
                if storages[index].role == "kv_cache":
                    emit(before + index, -1, -1)
            for index in passing:
                emit(offset + index, storages[index].nbytes, -1)
            for index in replaced:  # gradients of the last step go before the forward pass (``zero_grad``)
                if storages[index].role == "gradient":
                    emit(before + index, -1, -1)
        for i in range(ops):
            if i == first_update and not step:
                for index in sorted(late):
                    emit(index, storages[index].nbytes, i)
            made = born[i]
            search = cudnn_benchmark and bool(scratch[i]) and _convolution_key(graph, i) not in searched
            if search:
                searched.add(_convolution_key(graph, i))
            # Each pass allocates its output, and then its workspace while it runs.
            for number, nbytes in enumerate(scratch[i]):
                for index in made[number : number + 1]:
                    emit(offset + index, storages[index].nbytes, i)
                if search:
                    emit(EMPTY_CACHE, 0, i)
                if nbytes:
                    emit(workspace, nbytes, i)
                    emit(workspace, -1, i)
            for index in made[len(scratch[i]) :]:
                emit(offset + index, storages[index].nbytes, i)
            for index in freed[i]:
                emit(offset + index, -1, i)
            if step and i == last_forward:  # the caller's variable is bound to the new output: the old one goes
                for index in replaced:
                    if storages[index].role not in ("gradient", "kv_cache"):
                        emit(before + index, -1, i)
    return _Steps(storages, events, at, last, skipped, like)


def _convolution_key(graph: Graph, index: int) -> tuple[object, ...]:
    """What cuDNN's search depends on: ops of one key share the plan it finds."""
    op = graph.ops[index]
    operands = tuple((graph.tensors[t].shape, graph.tensors[t].dtype, graph.tensors[t].strides) for t in op.inputs)
    return op.name, operands, tuple(op.attrs.items())


def peak_memory(
    graph: Graph,
    device: Device,
    *,
    framework: str = "torch",
    expandable_segments: bool = False,
    cudnn_benchmark: bool = False,
) -> Memory:
    """Peak memory of the step once it repeats, on a device.

    `framework` is one of `FRAMEWORKS`; `expandable_segments` and `cudnn_benchmark` are PyTorch's settings. The search
    of ``torch.backends.cudnn.benchmark`` keeps the fastest plan of each convolution (`op_workspaces`) and empties the
    allocator's cache after each new one of the first step, which changes what is reserved for good; the gigabytes it
    may try for some milliseconds are not counted.

    Where the capacity would be exceeded only by what the allocator holds on to, the figure is that after it has given
    its cache back, as it would; where the step does not fit at all, the figure is what it would take. A paged
    optimizer's state counts in full; whether the step fits is decided without it (`Memory.pageable_bytes`).
    Raises UnknownNameError for an unknown framework.
    """
    context = framework_bytes(device, framework)
    steps, result = _replayed(graph, device, expandable_segments, cudnn_benchmark)
    pageable = _pageable_bytes(graph)
    room = None if device.memory_bytes is None else device.memory_bytes + pageable
    tight_fit = room is not None and result.peak_allocated_bytes + context <= room
    if room is not None and tight_fit and result.peak_reserved_bytes + context > room:
        tight = replay(steps.events, capacity_bytes=room - context, expandable_segments=expandable_segments)
        if tight.out_of_memory is None:
            result = tight
    allocated = result.allocated_bytes
    start = max(steps.last - 1, 0)  # what is there when the last step begins
    at = start + int(np.argmax(allocated[start:])) if len(allocated) else -1
    parts = dict.fromkeys(MEMORY_PARTS, 0)
    for part, nbytes in _live_parts(steps.storages, steps.events[: at + 1]).items():
        parts[part] += nbytes
    parts["fragmentation"] = result.peak_reserved_bytes - sum(parts.values())
    parts["framework"] = context
    return Memory(
        peak_bytes=result.peak_reserved_bytes + context,
        reserved_bytes=result.peak_reserved_bytes,
        allocated_bytes=int(allocated[at]) if at >= 0 else 0,
        breakdown=frozen(parts),
        peak_op=steps.op[at] if at >= steps.last else -1,
        capacity_bytes=device.memory_bytes,
        timeline_bytes=_timeline(steps, allocated, len(graph.ops)),
        pageable_bytes=pageable,
    )


def _pageable_bytes(graph: Graph) -> int:
    """Optimizer state in unified memory: no more than there is, whatever a file says."""
    text = graph.provenance.get("pageable_bytes", "")
    state = sum(storage.nbytes for storage in graph.storages if storage.role == "optimizer")
    return min(int(text), state) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def _live_parts(storages: tuple[Storage, ...], events: list[tuple[int, int]]) -> dict[str, int]:
    """Bytes in use after `events`, as they were asked for, by the part of the breakdown they belong to."""
    live: dict[int, int] = {}
    for key, nbytes in events:
        if nbytes < 0:
            del live[key]
        elif key != EMPTY_CACHE:
            live[key] = nbytes
    parts: dict[str, int] = defaultdict(int)
    for key, nbytes in live.items():
        if key >= _REPEATS * len(storages):
            parts["workspaces"] += nbytes
        else:
            parts[_PART_OF_ROLE[storages[key % len(storages)].role]] += nbytes
    return parts


def _timeline(steps: _Steps, allocated: Ints, ops: int) -> Floats:
    """Allocated bytes while each op of the last step runs: the most it comes to."""
    timeline = np.zeros(ops)
    op = np.array(steps.op[steps.last :], dtype=np.int64)
    level = allocated[steps.last :].astype(np.float64)
    start = float(allocated[steps.last - 1]) if steps.last else 0.0
    # An op begins with what the one before it left.
    before = np.searchsorted(op, np.arange(ops)) - 1
    timeline[:] = np.where(before >= 0, level[before] if len(level) else start, start)
    inside = op >= 0
    np.maximum.at(timeline, op[inside], level[inside])
    if steps.skipped:
        timeline[steps.skipped] = np.resize(timeline[steps.like], len(steps.skipped))
    return timeline


# The last graph replayed, with its replays: asking about many devices replays once for each kind of library.
_recent: list[tuple[Graph, dict[tuple[object, ...], tuple[_Steps, Replay]]]] = []


def _replayed(graph: Graph, device: Device, expandable_segments: bool, cudnn_benchmark: bool) -> tuple[_Steps, Replay]:
    # A search picks by the device's speed; otherwise all devices of a kind get the same workspaces.
    speed = (device.memory_bandwidth_bytes_per_s, *sorted(device.peaks.items())) if cudnn_benchmark else ()
    kind = (_library_kind(device), expandable_segments, cudnn_benchmark, *speed)
    if not _recent or _recent[0][0] is not graph:
        _recent[:] = [(graph, {})]
    results = _recent[0][1]
    if kind not in results:
        steps = _steps(graph, device, cudnn_benchmark)
        results[kind] = steps, replay(steps.events, expandable_segments=expandable_segments)
    return results[kind]


# --- the largest batch ---------------------------------------------------------------------------------------------


def largest_batch(
    graph_at: Callable[[int], Graph],
    device: Device,
    *,
    framework: str = "torch",
    expandable_segments: bool = False,
    limit: int = 1 << 20,
) -> int:
    """The largest batch whose step fits the device, at most `limit`.

    `graph_at` gives the graph at a batch; an `AffineFamily` of two captures does so in no time. Memory is taken to
    grow with the batch. Raises InfeasibleError when even one sample does not fit, saying by how much, and where the
    device's capacity is unknown.
    """
    if device.memory_bytes is None:
        raise InfeasibleError(
            f"the memory of {device.name} is unknown, so no batch can be said to fit", "add memory to its device file"
        )

    def memory(batch: int) -> Memory:
        return peak_memory(graph_at(batch), device, framework=framework, expandable_segments=expandable_segments)

    smallest = memory(1)
    if not smallest.fits:
        raise InfeasibleError(
            f"even a batch of 1 does not fit {device.name}: it takes {format_bytes(smallest.peak_bytes)} of "
            f"{format_bytes(device.memory_bytes)}, {format_bytes(smallest.peak_bytes - device.memory_bytes)} too many",
            "take a device with more memory, less precision, checkpointing, or split the model",
        )
    fits, fails = 1, limit + 1
    while fits < limit:  # double until it fails …
        if not memory(min(2 * fits, limit)).fits:
            fails = min(2 * fits, limit)
            break
        fits = min(2 * fits, limit)
    while fails - fits > 1:  # … then halve the gap
        middle = (fits + fails) // 2
        if memory(middle).fits:
            fits = middle
        else:
            fails = middle
    return fits
