"""`Program`: what a runtime makes of a graph: which kernels it launches and what traffic is left.

*Eager* launches each op by itself. *Compiled* stands for ``torch.compile`` with its default backend, without CUDA
graphs: chains of pointwise, normalisation, softmax, reduction, copy and similar ops run as one kernel each, which
reads what comes from outside once and writes what is used outside; matrix products, convolutions and attention stay
library calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from foretell.errors import unknown
from foretell.graph import KINDS, Graph, Op, OpTable
from foretell.graph.kinds import base_name

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Ops that launch other than one kernel, by base name. Counted in profiles of PyTorch 2.x on CUDA.
_KERNELS: dict[str, float] = {
    "convolution_backward": 2,
    "sdpa_backward": 3,  # row sums, gradients, conversion of the query gradient
    "native_group_norm": 3,  # moments, per-channel scale and shift, application
    "native_group_norm_backward": 5,
    "native_layer_norm_backward": 3,
    "native_batch_norm_backward": 2,
    "embedding_dense_backward": 4,  # sort by index, then segmented sums
    "index_put": 3,
    "_unsafe_index_put": 3,
    "nonzero": 4,
    "sort": 5,
    "argsort": 5,
    "topk": 4,
    "unique": 8,
    "_unique2": 8,
    "randperm": 5,
    "multinomial": 6,
    "ctc_loss": 2,
    "_amp_foreach_non_finite_check_and_unscale": 1,
    "linear_backward": 2,
}

# Tensors one launch of a multi-tensor kernel can take, by how many lists it walks: its arguments must fit the 4 KB of
# kernel arguments (ATen/native/cuda/MultiTensorApply.cuh).
_FOREACH_DEPTH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_FOREACH_LISTS: dict[str, int] = {
    "_foreach_add": 3,
    "_foreach_mul": 2,
    "_foreach_sqrt": 2,
    "_foreach_div": 3,
    "_foreach_addcmul": 4,
    "_foreach_addcdiv": 4,
    "_foreach_lerp": 3,
    "_foreach_norm": 1,
    "_foreach_zero": 1,
    "_foreach_copy": 2,
    "_fused_adam": 4,
    "_fused_adamw": 4,
    "_fused_sgd": 3,
    "_fused_adagrad": 3,
    "_amp_foreach_non_finite_check_and_unscale": 1,
}

# Kinds that the compiler writes itself, and so can join.
_OWN_KERNELS = """
    pointwise normalization softmax reduction copy random fill loss resample embedding indexing pooling"""
_FUSIBLE = frozenset(_OWN_KERNELS.split())
# …but not these, which it hands to a library or which need the whole input first.
_LIBRARY_CALLS = """
    sort topk nonzero index_put _unsafe_index_put scatter scatter_add scatter_reduce masked_select masked_scatter unique
    _unique2 unique_consecutive bincount histc searchsorted multinomial randperm embedding_dense_backward median mode
    max_pool2d_with_indices_backward _ctc_loss im2col col2im grid_sampler_2d_backward roi_align
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa"""
_NOT_FUSIBLE = frozenset(_LIBRARY_CALLS.split())
# Kinds whose result depends on a whole row: what follows them in a kernel must be of the row's size or smaller.
_REDUCING = frozenset({"reduction", "loss"})


@dataclass(frozen=True, slots=True)
class Program:
    """What a runtime launches. Columns are parallel to `table`; a row that launches nothing has been joined to another.

    `table.bytes_read` and `bytes_written` are what is left after fusion. `kernels` counts launches in one run of an op,
    `issues` how many ops of the host's program it takes (0: none, as in a fused chain). `group` numbers the chains; an
    op of no chain has a number of its own. `strided` marks ops whose first operand is a permuted view. `names` are the
    distinct op names with their kinds, and `name_code` the row's index into them.
    """

    table: OpTable
    runtime: str
    kernels: Floats
    issues: Floats
    group: Ints
    strided: npt.NDArray[np.bool_]
    names: tuple[tuple[str, str], ...]
    name_code: Ints

    def __len__(self) -> int:
        return len(self.table)

    @staticmethod
    def of(table: OpTable) -> Program:
        """An eager program of a bare table, whose dependencies are unknown."""
        names, name_code = _names(table)
        kernels = _launches(table, names, name_code)
        return Program(
            table=table,
            runtime="eager",
            kernels=kernels,
            issues=np.ones(len(table)),
            group=np.arange(len(table)),
            strided=np.zeros(len(table), dtype=np.bool_),
            names=names,
            name_code=name_code,
        )


def lower(graph: Graph, runtime: str = "eager") -> Program:
    """What `runtime` makes of `graph`. Raises UnknownNameError for a runtime we do not know."""
    program = replace(Program.of(graph.table()), strided=_strided(graph))
    if runtime == "eager":
        return program
    if runtime == "compiled":
        return _compiled(graph, program)
    raise unknown("runtime", runtime, ("eager", "compiled"))


def _names(table: OpTable) -> tuple[tuple[tuple[str, str], ...], Ints]:
    code: dict[str, int] = {}
    index = np.fromiter((code.setdefault(name, len(code)) for name in table.name), dtype=np.int64, count=len(table))
    _, first = np.unique(index, return_index=True)
    kinds = [KINDS[k] for k in table.kind[first]]
    return tuple(zip(code, kinds, strict=True)), index


def _launches(table: OpTable, names: Sequence[tuple[str, str]], name_code: Ints) -> Floats:
    """Kernels one eager run of each op launches."""
    if not names:
        return np.zeros(0)
    bases = [base_name(name) for name, _ in names]
    per_name = np.array([_KERNELS.get(base, 1.0) for base in bases])
    per_name[[kind in ("view", "scalar_read") for _, kind in names]] = 0.0
    depth = np.array([_FOREACH_LISTS.get(base, 3 if base.startswith("_foreach") else 0) for base in bases])
    kernels: Floats = per_name[name_code]
    lists = depth[name_code]
    for count in np.unique(depth[depth > 0]):
        rows = lists == count
        tensors = table.operands[rows] / count
        kernels[rows] = np.maximum(1.0, np.ceil(tensors / _FOREACH_DEPTH[int(count)]))
    return kernels


def _strided(graph: Graph) -> npt.NDArray[np.bool_]:
    tensors = graph.tensors
    return np.array([bool(op.inputs) and tensors[op.inputs[0]].layout == "strided" for op in graph.ops], dtype=np.bool_)


# --- torch.compile -------------------------------------------------------------------------------------------------


def _compiled(graph: Graph, eager: Program) -> Program:
    ops, tensors, storages = graph.ops, graph.tensors, graph.storages
    table = eager.table
    writers, readers = _dependencies(graph)
    group = _chains(graph, writers)
    read, written = table.bytes_read.copy(), table.bytes_written.copy()
    kept = {tensors[t].storage for t in graph.outputs}
    kept.update(i for i, s in enumerate(storages) if s.dies is None or s.born < 0)
    seen: set[tuple[int, int]] = set()
    fusible = np.array([_fusible(op) for op in ops], dtype=np.bool_)
    for i, op in enumerate(ops):
        if not fusible[i]:
            continue
        mine = group[i]
        for t, writer in zip(op.inputs, writers[i], strict=True):
            inside = writer >= 0 and group[writer] == mine
            again = (mine, tensors[t].storage) in seen
            if inside or again:
                read[i] -= min(read[i], tensors[t].nbytes)
            seen.add((mine, tensors[t].storage))
        for t in op.outputs:
            storage = tensors[t].storage
            if storage not in kept and all(group[j] == mine for j in readers[i].get(storage, ())):
                written[i] -= min(written[i], tensors[t].nbytes)
    first = np.zeros(len(ops), dtype=np.bool_)
    first[np.unique(group, return_index=True)[1]] = True
    fused = fusible & (eager.kernels > 0)
    # A chain is one launch, and one line of the generated wrapper; views are resolved at compile time.
    kernels = np.where(fused, first.astype(np.float64), eager.kernels)
    return replace(
        eager,
        runtime="compiled",
        table=replace(
            table,
            bytes_read=read,
            bytes_written=written,
            channels_last=table.channels_last | _moved_to_channels_last(graph),
        ),
        kernels=kernels,
        issues=(kernels > 0).astype(np.float64),
        group=np.array(group, dtype=np.int64),
        strided=eager.strided & ~fused,
    )


def _dependencies(graph: Graph) -> tuple[list[tuple[int, ...]], list[dict[int, list[int]]]]:
    """For each op: who wrote each of its inputs last (-1: nobody in this step), and who reads what it wrote."""
    last: dict[int, int] = {}
    writers: list[tuple[int, ...]] = []
    readers: list[dict[int, list[int]]] = [{} for _ in graph.ops]
    for i, op in enumerate(graph.ops):
        sources = [graph.tensors[t].storage for t in op.inputs]
        writers.append(tuple(last.get(s, -1) for s in sources))
        if op.kind == "view":
            continue
        for storage, writer in zip(sources, writers[-1], strict=True):
            if writer >= 0:
                readers[writer].setdefault(storage, []).append(i)
        for t in op.outputs:
            last[graph.tensors[t].storage] = i
    return writers, readers


def _chains(graph: Graph, writers: Sequence[tuple[int, ...]]) -> list[int]:
    """Which chain each op belongs to: greedily, an op joins the chains of those producers it can share a loop with.

    Two ops share a loop when they walk the same number of elements. A reduction may end a chain; what follows it
    (scaling by a mean, say) joins where it walks what the reduction read. A chain runs after all it needs from outside
    and before all that need it outside, so joining must leave such a moment.
    """
    ops, tensors = graph.ops, graph.tensors
    group = list(range(len(ops)))
    members = [[i] for i in range(len(ops))]
    extent = [0] * len(ops)  # elements the chain's loop walks
    after = [-1] * len(ops)  # latest op outside that the chain needs
    before = [len(ops)] * len(ops)  # earliest op outside that needs the chain
    for i, op in enumerate(ops):
        sources = sorted({w for w in writers[i] if w >= 0}, reverse=True)
        if _fusible(op):
            extent[i] = max((tensors[t].elements for t in (*op.outputs, *op.inputs)), default=0)
            for writer in sources:
                chain, mine = group[writer], group[i]
                if chain == mine or not _fusible(ops[writer]):
                    continue
                outside = [w for w in sources if group[w] not in (chain, mine)]
                latest = max([after[chain], after[mine], *outside])
                same_loop = extent[chain] == extent[i] or (
                    ops[writer].kind in _REDUCING and extent[chain] == max(tensors[t].elements for t in op.outputs)
                )
                if same_loop and latest < min(before[chain], before[mine]):
                    for member in members[mine]:
                        group[member] = chain
                    members[chain] += members[mine]
                    after[chain] = max(after[chain], after[mine])
                    before[chain] = min(before[chain], before[mine])
        for writer in sources:
            if group[writer] != group[i]:
                after[group[i]] = max(after[group[i]], writer)
                before[group[writer]] = min(before[group[writer]], i)
    return group


def _fusible(op: Op) -> bool:
    """Whether the compiler writes a kernel for it; the optimiser's step stays outside the compiled module."""
    return op.kind in _FUSIBLE and op.phase != "optimizer" and base_name(op.name) not in _NOT_FUSIBLE


# torch.compile moves a model's convolutions to channels-last where that pays on average; the speed ratios are
# those its own heuristic holds (torch/_inductor/graph.py, `decide_layout_opt`): below 1 is faster.
_LAYOUT_RATIO = {"grouped": 1.358, "in_out": 0.725, "small": 0.783, "default": 0.823}


def _moved_to_channels_last(graph: Graph) -> npt.NDArray[np.bool_]:
    """Convolutions the compiler runs in channels-last although the model is written contiguous: all or none."""
    convolution = np.array([op.kind == "convolution" for op in graph.ops], dtype=np.bool_)
    none = np.zeros(len(graph.ops), dtype=np.bool_)
    forward = [op for op in graph.ops if op.name == "aten.convolution.default"]
    if not forward or len(graph.ops) >= 300 * len(forward):
        return none
    work = dict.fromkeys(_LAYOUT_RATIO, 0)
    for op in forward:
        weight = graph.tensors[op.inputs[1]].shape
        out_channels, in_channels = weight[:2]
        if int(op.attrs.get("groups", 1)) > 1 and in_channels > 1:
            which = "grouped"
        elif out_channels <= 64 and in_channels <= 64:
            which = "small"
        elif out_channels * 2 <= in_channels and weight[-1] > 1:
            which = "in_out"
        else:
            which = "default"
        work[which] += op.macs
    if graph.mode == "train":
        total = sum(work.values())
        move = not work["grouped"] and not work["in_out"] and work["small"] < total
    else:
        move = sum(work[k] * ratio for k, ratio in _LAYOUT_RATIO.items()) <= sum(work.values())
    return convolution if move else none
