"""What Megatron-LM asserts of its arguments, as a table: `ASSERTIONS`.

Read in Megatron-LM core 0.19.2 (the wheel ``megatron-core``): ``validate_args`` of ``megatron/training/arguments.py``,
the ``__post_init__`` of its configurations, and the checks it makes when it builds process groups and schedules. Those
on inference, data, checkpoints and reinforcement learning are left out, as are those on installed versions of other
packages.

A rule looks at the parsed `Arguments` and says whether it holds. ``--world-size`` is the number of processes, which the
launcher tells; where nobody does, it is 0 and rules about it hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foretell.plan.training.emit.options import Arguments

__all__ = ["ASSERTIONS", "VERSION", "Assertion", "data_parallel", "violated", "virtual_stages"]

#: The version of Megatron-LM core the table was read in.
VERSION = "0.19.2"

_ARGUMENTS = "megatron/training/arguments.py"
_TRANSFORMER = "megatron/core/transformer/transformer_config.py"
_PARALLEL = "megatron/core/model_parallel_config.py"
_STATE = "megatron/core/parallel_state.py"
_SCHEDULES = "megatron/core/pipeline_parallel/schedules.py"
_OPTIMIZER = "megatron/core/optimizer/optimizer_config.py"
_BLOCK = "megatron/core/transformer/transformer_block.py"
_BATCHES = "megatron/core/num_microbatches_calculator.py"
_MOE = "megatron/core/transformer/moe/moe_layer.py"

TP, PP, CP, EP = (
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size"),
    *("--context-parallel-size", "--expert-model-parallel-size"),
)
ETP, WORLD, LAYERS = "--expert-tensor-parallel-size", "--world-size", "--num-layers"
STAGES, PER_STAGE = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"
LAYOUT = "--pipeline-model-parallel-layout"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
RECOMPUTE, METHOD, RECOMPUTED = "--recompute-granularity", "--recompute-method", "--recompute-num-layers"
EXPERTS, DISPATCHER = "--num-experts", "--moe-token-dispatcher-type"
SHARDED, FSDP, TORCH_FSDP = "--use-distributed-optimizer", "--use-megatron-fsdp", "--use-torch-fsdp2"
GRAPH = "--cuda-graph-impl"
OVERLAP_EP = "--overlap-moe-expert-parallel-comm"

Holds = Callable[[Arguments], bool]


@dataclass(frozen=True, slots=True)
class Assertion:
    """One assertion: the options it is about, whether it `holds`, why it must, and where Megatron-LM says so.

    Where it does not hold Megatron-LM stops; with `mended` it goes on with a warning, having changed the option.
    `presence` marks those that want an option given at all, which a part of a command line need not meet.
    """

    name: str
    options: tuple[str, ...]
    holds: Holds
    reason: str
    source: str
    mended: bool = False
    presence: bool = False


def violated(arguments: Arguments) -> list[Assertion]:
    """The assertions that these arguments do not meet, in the order of the table."""
    return [rule for rule in ASSERTIONS if not rule.holds(arguments)]


def data_parallel(a: Arguments) -> int:
    """Data-parallel ranks, 0 where the number of processes is not known or does not divide."""
    group = a.number(TP) * a.number(PP) * a.number(CP)
    return a.number(WORLD) // group if group and a.number(WORLD) % group == 0 else 0


def virtual_stages(a: Arguments) -> int:
    """Model chunks on a pipeline rank, 1 without interleaving."""
    if a.number(STAGES):
        return a.number(STAGES)
    each = a.number(PER_STAGE)
    if not each or not a.number(PP):
        return 1
    return max(1, _counted(a) // a.number(PP) // each)


def _counted(a: Arguments) -> int:
    """Layers and what else is counted as one when they are split over the pipeline."""
    extra = a.on("--account-for-embedding-in-pipeline-split") + a.on("--account-for-loss-in-pipeline-split")
    return a.number(LAYERS) + extra


def _uneven(a: Arguments) -> bool:
    return FIRST in a or LAST in a


def _middle(a: Arguments) -> tuple[int, int]:
    """Layers and ranks between the first and last rank, where those have counts of their own."""
    return (
        a.number(LAYERS) - a.number(FIRST) - a.number(LAST),
        a.number(PP) - (FIRST in a) - (LAST in a),
    )


def _middle_divides(a: Arguments) -> bool:
    layers, ranks = _middle(a)
    if layers < 0 or ranks < 0 or (layers > 0) != (ranks > 0):
        return False
    return not ranks or layers % ranks == 0


def _chunks_divide(a: Arguments) -> bool:
    chunks = virtual_stages(a)
    layers, ranks = _middle(a)
    ends = a.number(FIRST) % chunks == 0 and a.number(LAST) % chunks == 0
    return ends and (ranks <= 0 or (layers // ranks) % chunks == 0)


def _micro_batches(a: Arguments) -> int:
    each = data_parallel(a) * a.number("--micro-batch-size")
    return a.number("--global-batch-size") // each if each else 0


def _whole_rounds(a: Arguments) -> bool:
    count = _micro_batches(a)
    if virtual_stages(a) == 1 or not count or "--microbatch-group-size-per-virtual-pipeline-stage" in a:
        return True
    return count % a.number(PP) == 0


def _batch_divides(a: Arguments) -> bool:
    each = data_parallel(a) * a.number("--micro-batch-size")
    return not each or not a.number("--global-batch-size") or a.number("--global-batch-size") % each == 0


def _experts_divide(a: Arguments) -> bool:
    group = (a.number(ETP) or a.number(TP)) * a.number(EP) * a.number(PP)
    return not a.number(WORLD) or not group or a.number(WORLD) % group == 0


def _groups(a: Arguments) -> bool:
    if not a.on("--group-query-attention"):
        return True
    groups, tp = a.number("--num-query-groups"), a.number(TP)
    return bool(groups and tp) and (groups % tp == 0 or tp % groups == 0)


def _instances(a: Arguments) -> bool:
    count = a.number("--num-distributed-optimizer-instances")
    ranks = data_parallel(a) * a.number(CP)
    return not ranks or count < 1 or ranks % count == 0


def _once(a: Arguments) -> bool:
    return sum(name in a for name in (PER_STAGE, STAGES, LAYOUT)) <= 1


def _interleaved(a: Arguments) -> bool:
    if virtual_stages(a) == 1:
        return True
    return a.number(PP) > (2 if a.on("--no-overlap-p2p-communication") else 1)


def _states(a: Arguments) -> bool:
    names = ("--main-grads-dtype", "--main-params-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype")
    return a.on("--use-precision-aware-optimizer") or all(a.text(name) == "fp32" for name in names)


def _sequence_parallel(a: Arguments) -> bool:
    return a.on("--sequence-parallel") and a.number(TP) > 1


def _layers_divide(a: Arguments) -> bool:
    if _uneven(a) or LAYOUT in a or not a.number(LAYERS) or not a.number(PP):
        return True
    return _counted(a) % a.number(PP) == 0


def _stage_divides(a: Arguments) -> bool:
    each = a.number(PER_STAGE)
    if not each or not a.number(PP) or not a.number(LAYERS):
        return True
    return (_counted(a) // a.number(PP)) % each == 0


def _virtual_divides(a: Arguments) -> bool:
    if not a.number(STAGES) or _uneven(a) or not a.number(PP) or not a.number(LAYERS):
        return True
    return (_counted(a) // a.number(PP)) % a.number(STAGES) == 0


def _needs(name: str, *others: Holds) -> Holds:
    """Where the flag is on, all of the others hold."""
    return lambda a: not a.on(name) or all(other(a) for other in others)


def _is(name: str) -> Holds:
    return lambda a: a.on(name)


def _positive(*names: str) -> Holds:
    return lambda a: all(a.number(name) > 0 for name in names)


_MODULES = frozenset(
    {"core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out"}
)

#: Every assertion once, in the order in which Megatron-LM comes to them.
ASSERTIONS: tuple[Assertion, ...] = (
    Assertion(
        "world-size", (TP, PP, CP, WORLD),
        lambda a: not a.number(WORLD) or data_parallel(a) > 0,
        "the number of processes is a multiple of tensor · pipeline · context parallelism", _ARGUMENTS,
    ),
    Assertion(
        "context-levels", ("--cp-comm-type", "--hierarchical-context-parallel-sizes"),
        lambda a: "a2a+p2p" not in a.words("--cp-comm-type") or "--hierarchical-context-parallel-sizes" in a,
        "a2a+p2p wants the sizes of its levels", _ARGUMENTS,
    ),
    Assertion(
        "micro-batch", ("--micro-batch-size",), _positive("--micro-batch-size"),
        "the micro-batch is given and at least 1", _ARGUMENTS, presence=True,
    ),
    Assertion(
        "global-batch", ("--global-batch-size",),
        lambda a: "--global-batch-size" not in a or a.number("--global-batch-size") > 0,
        "the global batch is at least 1", _ARGUMENTS,
    ),
    Assertion(
        "batch-divides", ("--global-batch-size", "--micro-batch-size", TP, PP, CP), _batch_divides,
        "the global batch is a multiple of micro-batch · data-parallel ranks", _BATCHES,
    ),
    Assertion(
        "virtual-once", (PER_STAGE, STAGES, LAYOUT), _once,
        "virtual stages are told one way: layers of each, their number, or a layout", _ARGUMENTS,
    ),
    Assertion(
        "uneven-virtual", (PER_STAGE, FIRST, LAST), lambda a: PER_STAGE not in a or not _uneven(a),
        "with own counts for the first or last rank, virtual stages are told by their number", _ARGUMENTS,
    ),
    Assertion(
        "layers-divide", (LAYERS, PP), _layers_divide,
        "layers are a multiple of pipeline ranks, unless the first or last has its own count", _ARGUMENTS,
    ),
    Assertion(
        "stage-divides", (PER_STAGE, LAYERS, PP), _stage_divides,
        "layers of a rank are a multiple of those of a virtual stage", _ARGUMENTS,
    ),
    Assertion(
        "virtual-divides", (STAGES, LAYERS, PP), _virtual_divides,
        "layers of a rank are a multiple of its virtual stages", _BLOCK,
    ),
    Assertion(
        "middle-divides", (FIRST, LAST, LAYERS, PP), lambda a: not _uneven(a) or _middle_divides(a),
        "layers between the first and last rank are a multiple of the ranks between", _TRANSFORMER,
    ),
    Assertion(
        "uneven-chunks", (FIRST, LAST, STAGES), lambda a: not _uneven(a) or _chunks_divide(a),
        "layers of the first, last and middle ranks are multiples of virtual stages", _TRANSFORMER,
    ),
    Assertion(
        "uneven-or-counted",
        (FIRST, LAST, "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
        lambda a: not _uneven(a) or _counted(a) == a.number(LAYERS),
        "a rank's own count and counting embedding or loss as a layer exclude each other", _TRANSFORMER,
    ),
    Assertion(
        "interleaved-ranks", (STAGES, PER_STAGE, PP, "--no-overlap-p2p-communication"), _interleaved,
        "interleaving wants at least 2 pipeline ranks, 3 where sends and receives are not overlapped", _ARGUMENTS,
    ),
    Assertion(
        "interleaved-batches", ("--global-batch-size", "--micro-batch-size", PP, STAGES, PER_STAGE), _whole_rounds,
        "interleaving wants micro-batches in multiples of pipeline ranks", _SCHEDULES,
    ),
    Assertion(
        "param-gather-sharded", ("--overlap-param-gather", SHARDED),
        _needs("--overlap-param-gather", lambda a: a.on(SHARDED) or a.on(FSDP)),
        "overlapped gathering of parameters wants the distributed optimiser or Megatron-FSDP", _ARGUMENTS,
    ),
    Assertion(
        "param-gather-reduce", ("--overlap-param-gather", "--overlap-grad-reduce"),
        _needs("--overlap-param-gather", _is("--overlap-grad-reduce")),
        "overlapped gathering of parameters wants overlapped reduction of gradients", _ARGUMENTS,
    ),
    Assertion(
        "torch-fsdp-pipeline", (TORCH_FSDP, PP, EP),
        _needs(TORCH_FSDP, lambda a: a.number(PP) == 1 and a.number(EP) == 1),
        "PyTorch's FSDP2 goes with neither pipeline nor expert parallelism", _ARGUMENTS,
    ),
    Assertion(
        "torch-fsdp-optimizer", (TORCH_FSDP, SHARDED), _needs(TORCH_FSDP, lambda a: not a.on(SHARDED)),
        "PyTorch's FSDP2 does not go with the distributed optimiser", _ARGUMENTS,
    ),
    Assertion(
        "torch-fsdp-fusion", (TORCH_FSDP, "--no-gradient-accumulation-fusion"),
        _needs(TORCH_FSDP, _is("--no-gradient-accumulation-fusion")),
        "PyTorch's FSDP2 does not go with fused gradient accumulation", _ARGUMENTS,
    ),
    Assertion(
        "torch-fsdp-untied", (TORCH_FSDP, "--untie-embeddings-and-output-weights"),
        _needs(TORCH_FSDP, _is("--untie-embeddings-and-output-weights")),
        "PyTorch's FSDP2 wants untied embeddings", _ARGUMENTS,
    ),
    Assertion(
        "torch-fsdp-fp16", (TORCH_FSDP, "--fp16"), _needs(TORCH_FSDP, lambda a: not a.on("--fp16")),
        "PyTorch's FSDP2 does not go with fp16", _ARGUMENTS,
    ),
    Assertion(
        "fp8-gather-sharded", ("--fp8-param-gather", SHARDED),
        _needs("--fp8-param-gather", lambda a: a.on(SHARDED) or a.on(FSDP) or a.on(TORCH_FSDP)),
        "gathering parameters in fp8 wants them or the optimiser sharded", _ARGUMENTS,
    ),
    Assertion(
        "fp8-gather-format", ("--fp8-param-gather", "--fp8-format"),
        _needs("--fp8-param-gather", lambda a: "--fp8-format" in a),
        "parameters in fp8 want fp8 training", _TRANSFORMER,
    ),
    Assertion(
        "fp4-or-fp8", ("--fp4-format", "--fp8-format"), lambda a: "--fp4-format" not in a or "--fp8-format" not in a,
        "fp4 and fp8 exclude each other", _ARGUMENTS,
    ),
    Assertion(
        "fsdp-checkpoint", (FSDP, "--ckpt-format"), _needs(FSDP, lambda a: a.text("--ckpt-format") == "fsdp_dtensor"),
        "Megatron-FSDP writes checkpoints as fsdp_dtensor", _ARGUMENTS,
    ),
    Assertion(
        "checkpoint-fsdp", (FSDP, "--ckpt-format"), lambda a: a.text("--ckpt-format") != "fsdp_dtensor" or a.on(FSDP),
        "checkpoints as fsdp_dtensor want Megatron-FSDP", _ARGUMENTS,
    ),
    Assertion(
        "fp16-or-bf16", ("--fp16", "--bf16"), lambda a: not (a.on("--fp16") and a.on("--bf16")),
        "fp16 and bf16 exclude each other", _ARGUMENTS,
    ),
    Assertion(
        "gradients-fp32", ("--accumulate-allreduce-grads-in-fp32", "--main-grads-dtype", "--bf16"),
        lambda a: not (a.on("--bf16") and a.on("--accumulate-allreduce-grads-in-fp32"))
        or a.text("--main-grads-dtype") == "fp32",
        "gradients accumulated in fp32 are kept in fp32", _ARGUMENTS,
    ),
    Assertion(
        "graph-nan", (GRAPH, "--no-check-for-nan-in-loss-and-grad"),
        lambda a: a.text(GRAPH) != "full_iteration"
        or a.on("--no-check-for-nan-in-loss-and-grad") or a.on("--fp16"),
        "a graph of the whole iteration does not check for NaN", _ARGUMENTS,
    ),
    Assertion(
        "shape-given", (LAYERS, "--hidden-size", "--num-attention-heads", "--max-position-embeddings"),
        _positive(LAYERS, "--hidden-size", "--num-attention-heads", "--max-position-embeddings"),
        "layers, hidden size, heads and positions are given", _ARGUMENTS, presence=True,
    ),
    Assertion(
        "heads-divide-hidden", ("--hidden-size", "--num-attention-heads", "--kv-channels"),
        lambda a: "--kv-channels" in a or not a.number("--num-attention-heads")
        or a.number("--hidden-size") % a.number("--num-attention-heads") == 0,
        "the hidden size is a multiple of heads, unless the size of a head is given", _ARGUMENTS,
    ),
    Assertion(
        "sequence-divides", ("--seq-length", CP),
        lambda a: a.number(CP) <= 1 or a.number("--seq-length") % (2 * a.number(CP)) == 0,
        "the sequence is a multiple of 2 · context-parallel ranks", _ARGUMENTS,
    ),
    Assertion(
        "positions", ("--seq-length", "--max-position-embeddings"),
        lambda a: "--max-position-embeddings" not in a
        or a.number("--max-position-embeddings") >= a.number("--seq-length"),
        "there are at least as many positions as tokens in a sequence", _ARGUMENTS,
    ),
    Assertion(
        "distributed-activations", ("--distribute-saved-activations", TP, RECOMPUTE, METHOD, "--sequence-parallel"),
        _needs(
            "--distribute-saved-activations", lambda a: a.number(TP) > 1, lambda a: a.text(RECOMPUTE) == "full",
            lambda a: METHOD in a, lambda a: not a.on("--sequence-parallel"),
        ),
        "activations are distributed with full recomputation by a method, over tensor-parallel ranks that do not "
        "split the sequence", _ARGUMENTS,
    ),
    Assertion(
        "selective-method", (RECOMPUTE, METHOD), lambda a: a.text(RECOMPUTE) != "selective" or METHOD not in a,
        "selective recomputation takes no method", _ARGUMENTS,
    ),
    Assertion(
        "selective-layers", (RECOMPUTE, RECOMPUTED), lambda a: a.text(RECOMPUTE) != "selective" or RECOMPUTED not in a,
        "selective recomputation takes no number of layers", _TRANSFORMER,
    ),
    Assertion(
        "full-method", (RECOMPUTE, METHOD), lambda a: a.text(RECOMPUTE) != "full" or METHOD in a,
        "full recomputation wants a method, uniform or block", _TRANSFORMER,
    ),
    Assertion(
        "full-layers", (RECOMPUTE, RECOMPUTED), lambda a: a.text(RECOMPUTE) != "full" or RECOMPUTED in a,
        "full recomputation wants a number of layers", _TRANSFORMER,
    ),
    Assertion(
        "recompute-modules", ("--recompute-modules", RECOMPUTE),
        lambda a: a.text(RECOMPUTE) != "selective" or _MODULES.issuperset(a.words("--recompute-modules")),
        "modules to recompute are " + ", ".join(sorted(_MODULES)), _TRANSFORMER,
    ),
    Assertion(
        "recompute-experts", ("--recompute-modules", "--moe-grouped-gemm", RECOMPUTE),
        lambda a: a.text(RECOMPUTE) != "selective" or "moe_act" not in a.words("--recompute-modules")
        or a.on("--moe-grouped-gemm"),
        "recomputing moe_act wants grouped products", _TRANSFORMER,
    ),
    Assertion(
        "recompute-latent", ("--recompute-modules", "--multi-latent-attention", RECOMPUTE),
        lambda a: a.text(RECOMPUTE) != "selective" or "mla_up_proj" not in a.words("--recompute-modules")
        or a.on("--multi-latent-attention"),
        "recomputing mla_up_proj wants multi-head latent attention", _TRANSFORMER,
    ),
    Assertion(
        "sequence-parallel", ("--sequence-parallel", TP), _needs("--sequence-parallel", lambda a: a.number(TP) > 1),
        "sequence parallelism wants tensor parallelism", _PARALLEL, mended=True,
    ),
    Assertion(
        "tensor-overlap", ("--tp-comm-overlap", "--sequence-parallel", TP),
        _needs("--tp-comm-overlap", _sequence_parallel),
        "overlapping tensor-parallel communication wants sequence parallelism", _ARGUMENTS,
    ),
    Assertion(
        "experts-given", (EP, EXPERTS), lambda a: a.number(EP) <= 1 or a.number(EXPERTS) > 0,
        "expert parallelism wants experts", _ARGUMENTS,
    ),
    Assertion(
        "experts-divide", (EP, EXPERTS), lambda a: not a.number(EP) or a.number(EXPERTS) % a.number(EP) == 0,
        "experts are a multiple of expert-parallel ranks", _ARGUMENTS,
    ),
    Assertion(
        "expert-ranks", (EP, ETP, PP, TP), _experts_divide,
        "the number of processes is a multiple of expert tensor · expert · pipeline parallelism", _STATE,
    ),
    Assertion(
        "expert-width", ("--moe-ffn-hidden-size", EXPERTS),
        lambda a: "--moe-ffn-hidden-size" not in a or a.number(EXPERTS) > 0,
        "a width of experts wants experts", _TRANSFORMER,
    ),
    Assertion(
        "expert-sequences", (EXPERTS, TP, "--sequence-parallel"),
        lambda a: not a.number(EXPERTS) or a.number(TP) <= 1 or a.on("--sequence-parallel"),
        "experts beside tensor parallelism want sequence parallelism", _MOE,
    ),
    Assertion(
        "expert-bias", (EXPERTS, ETP, TP, "--disable-bias-linear"),
        lambda a: not a.number(EXPERTS) or a.on("--disable-bias-linear") or (a.number(ETP) or a.number(TP)) == 1,
        "experts with biases are not split by tensor parallelism", _TRANSFORMER,
    ),
    Assertion(
        "deepep-flex", ("--moe-enable-deepep", DISPATCHER),
        _needs("--moe-enable-deepep", lambda a: a.text(DISPATCHER) == "flex"),
        "DeepEP wants the flex dispatcher", _TRANSFORMER,
    ),
    Assertion(
        "shared-overlap", ("--moe-shared-expert-overlap", "--moe-shared-expert-intermediate-size", DISPATCHER),
        lambda a: not a.on("--moe-shared-expert-overlap") or "--moe-shared-expert-intermediate-size" not in a
        or a.text(DISPATCHER) in ("alltoall", "flex"),
        "overlap with shared experts wants the alltoall or flex dispatcher", _TRANSFORMER,
    ),
    Assertion(
        "expert-overlap-ranks", (OVERLAP_EP, EP), _needs(OVERLAP_EP, lambda a: a.number(EP) > 1),
        "overlap of expert communication wants expert parallelism", _TRANSFORMER,
    ),
    Assertion(
        "expert-overlap-virtual", (OVERLAP_EP, PP, STAGES, PER_STAGE),
        _needs(OVERLAP_EP, lambda a: a.number(PP) == 1 or virtual_stages(a) > 1),
        "overlap of expert communication in a pipeline wants virtual stages", _TRANSFORMER,
    ),
    Assertion(
        "expert-overlap-dispatcher", (OVERLAP_EP, DISPATCHER),
        _needs(OVERLAP_EP, lambda a: a.text(DISPATCHER) in ("alltoall", "flex")),
        "overlap of expert communication wants the alltoall or flex dispatcher", _TRANSFORMER,
    ),
    Assertion(
        "expert-overlap-recompute", (OVERLAP_EP, RECOMPUTE, METHOD, RECOMPUTED),
        _needs(
            OVERLAP_EP, lambda a: a.text(RECOMPUTE) != "full", lambda a: METHOD not in a, lambda a: RECOMPUTED not in a
        ),
        "overlap of expert communication excludes full recomputation", _TRANSFORMER,
    ),
    Assertion(
        "expert-overlap-format", (OVERLAP_EP, "--bf16", "--fp16"),
        _needs(OVERLAP_EP, lambda a: a.on("--bf16") or a.on("--fp16")),
        "overlap of expert communication wants bf16 or fp16", _TRANSFORMER,
    ),
    Assertion(
        "graph-recompute", (GRAPH, RECOMPUTE),
        lambda a: a.text(GRAPH) in ("none", "full_iteration") or a.text(RECOMPUTE) != "full",
        "CUDA graphs of layers exclude full recomputation", _TRANSFORMER,
    ),
    Assertion(
        "graph-modules", (GRAPH, "--cuda-graph-modules"),
        lambda a: a.text(GRAPH) != "full_iteration" or not a.words("--cuda-graph-modules"),
        "a graph of the whole iteration takes no modules", _ARGUMENTS,
    ),
    Assertion(
        "latent-groups", ("--multi-latent-attention", "--group-query-attention"),
        _needs("--multi-latent-attention", lambda a: not a.on("--group-query-attention")),
        "multi-head latent and grouped-query attention exclude each other", _ARGUMENTS,
    ),
    Assertion(
        "heads-divide", ("--num-attention-heads", TP),
        lambda a: not a.number(TP) or a.number("--num-attention-heads") % a.number(TP) == 0,
        "heads are a multiple of tensor-parallel ranks", _TRANSFORMER,
    ),
    Assertion(
        "groups-divide", ("--num-query-groups", TP, "--group-query-attention"), _groups,
        "query groups are a multiple or divisor of tensor-parallel ranks", _TRANSFORMER,
    ),
    Assertion(
        "aware-sharded", ("--use-precision-aware-optimizer", SHARDED),
        _needs("--use-precision-aware-optimizer", lambda a: a.on(SHARDED) or a.on(FSDP)),
        "the precision-aware optimiser wants the distributed optimiser", _OPTIMIZER,
    ),
    Assertion(
        "aware-states",
        ("--use-precision-aware-optimizer", "--main-grads-dtype", "--main-params-dtype", "--exp-avg-dtype",
         "--exp-avg-sq-dtype"), _states,
        "states in another format than fp32 want the precision-aware optimiser", _OPTIMIZER,
    ),
    Assertion(
        "instances-divide", ("--num-distributed-optimizer-instances", TP, PP, CP), _instances,
        "data · context-parallel ranks are a multiple of copies of the distributed optimiser", _STATE,
    ),
)  # fmt: skip
