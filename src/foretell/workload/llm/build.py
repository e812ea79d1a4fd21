"""`graph`: one step of a transformer as a `Graph`, from its configuration and sizes alone."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

from foretell.errors import InputError, unknown
from foretell.graph import DTYPES, Graph
from foretell.workload.llm.config import LayerGroup, LLMConfig
from foretell.workload.llm.layers import Run, layer, norm, rotary_tables, within
from foretell.workload.llm.optimizers import BLOCKWISE, OPTIMIZERS, BlockwiseAdamW, Optimizer
from foretell.workload.llm.recorder import Node, Recorder
from foretell.workload.llm.weights import (
    GATES,
    Weight,
    adapter_weights,
    count_adapters,
    layer_weights,
    model_weights,
)
from foretell.workload.lora import QUANTIZED, LoRA

PHASES: tuple[str, ...] = ("inference", "prefill", "decode", "train")
MOST_PARAMETERS = 10**16  # bytes of all their states still count in 64 bits

# Precision → (dtype of matrix products, dtype of stored weights).
PRECISIONS: dict[str, tuple[str, str]] = {
    "fp32": ("float32", "float32"),
    "tf32": ("float32", "float32"),
    "bf16": ("bfloat16", "bfloat16"),
    "fp16": ("float16", "float16"),
    "amp": ("float16", "float32"),
    "amp_bf16": ("bfloat16", "float32"),
}

_SHORT_DTYPES = {
    "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn", "fp4": "float4_e2m1fn",
    "int8": "int8", "w8a16": "uint8",
}


def _dtype(name: str | None, default: str) -> str:
    if name is None:
        return default
    name = _SHORT_DTYPES.get(name, name)
    if name not in DTYPES:
        raise unknown("dtype", name, (*_SHORT_DTYPES, *DTYPES))
    return name


def graph(
    config: LLMConfig,
    *,
    phase: str = "prefill",
    batch: int = 1,
    seq_len: int | None = None,
    context: int = 0,
    precision: str = "bf16",
    optimizer: str = "adamw",
    optimizer_dtype: str | None = None,
    checkpointing: bool = False,
    accumulate: int = 1,
    weight_dtype: str | None = None,
    expert_dtype: str | None = None,
    kv_dtype: str | None = None,
    mla: str | None = None,
    logits: str | None = None,
    fused: bool = False,
    lora: LoRA | None = None,
    quantize: str | None = None,
) -> Graph:
    """One step of the transformer `config`.

    Phases: ``prefill`` (`seq_len` new tokens of each of `batch` sequences, behind `context` cached ones, causal; keys
    and values are written), ``decode`` (one new token a sequence, or `seq_len` of them, attending to `context` cached
    ones and itself), ``inference`` (a forward without a cache), ``train`` (forward, backward, optimizer step; `batch`
    sequences in each of `accumulate` rounds).

    `precision`: ``bf16`` and ``fp16`` store weights in half, as ``model.to(…)`` does; ``amp_bf16`` and ``amp`` keep
    fp32 weights and convert them under autocast. Optimizer state has the weights' dtype, as PyTorch makes it, unless
    `optimizer_dtype` says otherwise. `weight_dtype` quantizes the matrices of the layers (fp8 and int8 multiply as
    such; w8a16, which is uint8, int4 and fp4 are weight-only; scales are not counted), `expert_dtype` those of routed
    experts alone. `kv_dtype` is the cache's.

    `mla`: ``absorbed`` (attend to latents; the default for decode, as serving engines run it) or ``expanded`` (rebuild
    keys and values of all tokens, as `transformers` does). `logits`: ``all`` positions or the ``last``; the default is
    ``last`` for prefill. ``fused=True`` writes norms, rotations, gates and joint projections as the single kernels
    serving engines run, instead of the eager ops of `transformers`.

    `lora` freezes the model and trains adapters: kept in fp32, as peft makes them, and multiplied in the dtype of
    matrix products, as under the autocast of a trainer. Gradients flow through all layers, down to the embeddings
    (``enable_input_require_grads``). `quantize` (``nf4``, ``fp4``) packs the matrices of the layers, but not the head,
    into 4 bits with doubly quantised scales: each product unpacks its matrix first, one row alone is multiplied packed.
    Optimizers of bitsandbytes (`BLOCKWISE`) update one parameter a kernel.

    Attention is one op whatever its mask; a sliding layer counts `sliding_window` keys a query. Of routed experts, the
    weights read are those of the expected number of distinct experts hit (`experts_touched`). Dropout is off; the
    attention mask, ALiBi biases and softcaps inside attention add no op.

    Raises UnknownNameError and InputError.
    """
    _check(config, phase, batch, context, precision, optimizer, accumulate)
    training = phase == "train"
    _check_adapters(config, training, lora, quantize, weight_dtype or expert_dtype)
    if seq_len is None and phase != "decode":
        raise InputError(f"seq_len is missing for phase {phase!r}", "llm graph", "say how many tokens a sequence has")
    tokens = 1 if seq_len is None else seq_len
    if tokens < 1:
        raise InputError(f"seq_len is {tokens}, want at least 1", "llm graph")
    if config.positions == "learned" and context + tokens > config.position_rows:
        raise InputError(f"{context + tokens} tokens exceed the {config.position_rows} learned positions",
                         f"llm config {config.name!r}", "shorten the sequence")
    if mla not in (None, "absorbed", "expanded"):
        raise unknown("way to run latent attention", str(mla), ("absorbed", "expanded"))
    if logits not in (None, "all", "last"):
        raise unknown("choice of logits", str(logits), ("all", "last"))
    if training and (weight_dtype or expert_dtype or mla == "absorbed" or logits == "last" or context):
        raise InputError("weight_dtype, expert_dtype, context, mla='absorbed' and logits='last' are for inference",
                         "llm graph", "leave them out, or ask for phase 'prefill'")
    compute, stored = PRECISIONS[precision]
    matrices = _dtype(weight_dtype, stored)
    rec = Recorder(compute, stored, training, accumulate if training else 1)
    run = Run(
        rec, config.replace(fused_qkv=True, fused_gate_up=True) if fused else config, batch, tokens, context,
        cached=phase in ("prefill", "decode"), kv_dtype=_dtype(kv_dtype, compute),
        absorbed=(mla or ("absorbed" if phase == "decode" else "expanded")) == "absorbed", fused=fused,
    )
    builder = _Builder(run, checkpointing and training, matrices, _dtype(expert_dtype, matrices), lora, quantize)
    builder.forward(logits or ("last" if phase == "prefill" else "all"))
    if training:
        builder.backward()
        if optimizer in BLOCKWISE:
            builder.blockwise_optimizer(BLOCKWISE[optimizer])
        else:
            builder.optimizer(OPTIMIZERS[optimizer], optimizer_dtype and _dtype(optimizer_dtype, stored))
    adapters = count_adapters(run.config, lora) if lora is not None else 0
    sequences = batch * rec.rounds
    items = {"sequences": sequences, "tokens": sequences * tokens}
    if phase == "decode":
        items = {"tokens": batch * tokens, "sequences": batch}
    return Graph(
        name=config.name,
        mode=phase,
        precision=precision,
        ops=tuple(rec.ops),
        tensors=tuple(rec.tensors),
        storages=rec.storages(),
        parameters=config.parameters + adapters,
        trainable_parameters=0 if not training else config.parameters if lora is None else adapters,
        items=MappingProxyType(items),
        inputs=builder.inputs,
        outputs=() if training else (builder.logits,),
        provenance=MappingProxyType({
            "workload": f"llm:{config.name}", "source": config.source, "batch": str(batch), "seq_len": str(tokens),
            "context": str(context),
            **({"pageable_bytes": str(builder.pageable_bytes)} if builder.pageable_bytes else {}),
        }),
    )


def _check(
    config: LLMConfig, phase: str, batch: int, context: int, precision: str, optimizer: str, accumulate: int
) -> None:
    if config.parameters > MOST_PARAMETERS:
        raise InputError(f"has {config.parameters:.3g} parameters", f"llm config {config.name!r}",
                         f"check its sizes: at most {MOST_PARAMETERS:.0e} are taken")
    for kind, name, known in (("phase", phase, PHASES), ("precision", precision, PRECISIONS),
                              ("optimizer", optimizer, (*OPTIMIZERS, *BLOCKWISE))):
        if name not in known:
            raise unknown(kind, name, known)
    for field, value, least in (("batch", batch, 1), ("context", context, 0), ("accumulate", accumulate, 1)):
        if value < least:
            raise InputError(f"{field} is {value}, want at least {least}", "llm graph")


def _check_adapters(
    config: LLMConfig, training: bool, lora: LoRA | None, quantize: str | None, weight_dtype: str | None
) -> None:
    where = f"llm config {config.name!r}"
    if lora is not None and not training:
        raise InputError("adapters apply to training only", where, "ask for phase 'train', or leave lora out")
    if quantize is None:
        return
    if quantize not in QUANTIZED:
        raise unknown("quantization", quantize, QUANTIZED)
    if config.moe is not None:
        raise InputError(f"{quantize} of routed experts is not known here", where,
                         "leave quantize out: libraries differ in whether experts are quantised")
    if weight_dtype is not None:
        raise InputError("quantize and weight_dtype both say how weights are kept", where, "give one of the two")
    if training and lora is None:
        raise InputError(f"{quantize} weights cannot be trained", where, "train adapters beside them: lora='rank=16'")


class _Segment:
    """A stretch of the model that is differentiated as one: a group of layers, or what is outside them."""

    def __init__(self, name: str, layers: int, nodes: list[Node], entering: int, leaving: int,
                 group: LayerGroup | None = None, weights: dict[str, int] | None = None) -> None:
        self.name = name
        self.layers = layers
        self.nodes = nodes
        self.entering = entering
        self.leaving = leaving
        self.group = group
        self.weights = weights


class _Builder:
    """Writes the step: forward, then backward over the segments in reverse, then the optimizer."""

    def __init__(self, run: Run, checkpointing: bool, matrices: str, experts: str, lora: LoRA | None,
                 quantize: str | None) -> None:
        self.run = run
        self.rec = run.rec
        self.checkpointing = checkpointing
        self.matrices = matrices
        self.experts = experts
        self.lora = lora
        self.quantize = quantize
        self.pageable_bytes = 0  # of the optimizer's state: in unified memory
        self.segments: list[_Segment] = []
        self.inputs: tuple[int, ...] = ()
        self.logits = -1

    def _parameters(self, weights: tuple[Weight, ...], quantize: bool) -> dict[str, int]:
        rec, result = self.rec, {}
        for weight in weights:
            dtype = None
            if weight.kind == "adapter":
                dtype = "float32"  # peft: autocast_adapter_dtype
            elif quantize and self.quantize and weight.kind == "matrix" and weight.name not in GATES:
                result[weight.name] = rec.packed_parameter(weight.shape)
                continue
            elif quantize and weight.kind == "experts" and len(weight.shape) == 3:
                dtype = self.experts
            elif quantize and weight.kind == "matrix" and weight.name not in ("mlp.gate.weight",):
                dtype = self.matrices
            trained = self.lora is None or weight.kind == "adapter"
            result[weight.name] = rec.parameter(weight.shape, dtype, trained)
        return result

    def forward(self, logits: str) -> None:
        run, rec, c = self.run, self.rec, self.run.config
        outer = self._parameters(model_weights(c), quantize=False)
        ids = rec.new((run.batch, run.tokens), "int64", "input")
        self.inputs = (ids,)
        x = self._embed(ids, outer)
        adapters = {} if self.lora is None else adapter_weights(c, self.lora)
        if adapters:
            rec.require_gradient(x)
        if c.positions == "rope":
            rotary = c.mla.rope_head_dim if c.mla is not None else c.rotary_dim or c.head_dim
            rotary_tables(run, rotary, rec.dtype(x))
        self.segments.append(_Segment("", 1, rec.take_tape(), ids, x))
        for group in c.groups:
            with rec.group(group.name, group.layers):
                weights = self._parameters((*layer_weights(c, group), *adapters.get(group.name, ())), quantize=True)
                entering = x
                if self.checkpointing:
                    with rec.untaped():
                        x = layer(run, x, weights, group)
                    rec.require_gradient(x)
                else:
                    x = layer(run, x, weights, group)
                rec.carry(entering, x)
            self.segments.append(
                _Segment(group.name, group.layers, rec.take_tape(), entering, x, group, weights))
        entering = x
        with rec.at("norm"):
            x = norm(run, x, within({f"norm.{n}": v for n, v in outer.items()}, "norm"), "norm")
        if logits == "last" and run.tokens > 1:
            x = rec.narrowed(x, (run.batch, 1, c.hidden))
        self.logits = self._head(x, outer)
        loss = self._loss(self.logits) if rec.training else self.logits
        self.segments.append(_Segment("", 1, rec.take_tape(), entering, loss))

    def _embed(self, ids: int, weights: dict[str, int]) -> int:
        run, rec, c = self.run, self.rec, self.run.config
        x = self._look_up("embed_tokens", ids, weights, (run.batch, run.tokens, c.hidden))
        if c.positions == "learned":
            with rec.at("embed_positions"):
                positions = rec.op("aten.arange.start", (), ((1, run.tokens), "int64"))
            x = rec.add(x, self._look_up("embed_positions", positions, weights, (1, run.tokens, c.hidden)))
        if c.embedding_scale:
            x = rec.scale(x)
        if c.embedding_norm:
            with rec.at("embed_layernorm"):
                x = norm(run, x, weights, "embed_layernorm")
        return x

    def _look_up(self, name: str, ids: int, weights: dict[str, int], shape: tuple[int, ...]) -> int:
        rec, table = self.rec, weights[f"{name}.weight"]
        with rec.at(name):
            result = rec.op("aten.embedding.default", (table, ids), (shape, rec.dtype(table)))

        def backward(g: Any) -> Any:
            grad = g[0]
            if rec.shape(ids)[0] != rec.shape(grad)[0]:
                grad = rec.op("aten.sum.dim_IntList", (grad,), (shape, rec.dtype(grad)))
            with rec.at(name):
                return (rec.op("aten.embedding_dense_backward.default", (grad, ids),
                               (rec.shape(table), rec.dtype(table))),)

        rec.node((table,), (result,), backward)
        return result

    def _head(self, x: int, weights: dict[str, int]) -> int:
        rec, c = self.rec, self.run.config
        table = weights["embed_tokens.weight" if c.tied_embeddings else "lm_head.weight"]
        with rec.at("lm_head"):
            result = rec.linear(x, table, weights.get("lm_head.bias"))
        if c.final_softcap:
            scaled = rec.scale(result, "aten.div.Tensor")
            tanh = rec.like("aten.tanh.default", scaled)
            rec.node((scaled,), (tanh,), lambda g: (
                None if g[0] is None else rec.like("aten.tanh_backward.default", g[0], tanh),))
            result = rec.scale(tanh)
        if not rec.training:  # a training loop keeps the loss alone
            rec.keep(result, "output")
        return result

    def _loss(self, logits: int) -> int:
        """Cross entropy over fp32 logits, as the library computes it."""
        rec = self.rec
        *lead, vocab = rec.shape(logits)
        rows = lead[0] * lead[1]
        with rec.at("loss"):
            labels = rec.new((rows,), "int64", "input")
            self.inputs = (*self.inputs, labels)
            wide = rec.cast(rec.alias(logits, (rows, vocab)), "float32")
            spec = ((rows, vocab), "float32")
            logp = rec.like("aten._log_softmax.default", wide)
            rec.node((wide,), (logp,), lambda g: (rec.op(
                "aten._log_softmax_backward_data.default", (g[0], logp), spec) if g[0] is not None else None,))
            loss, total = rec.emit("aten.nll_loss_forward.default", (logp, labels), (((), "float32"), ((), "float32")))
            rec.hold(wide)  # the loss function's own name for it
            rec.node((logp,), (loss,), lambda g: (rec.op(
                "aten.nll_loss_backward.default", (g[0], labels, total), spec) if g[0] is not None else None,))
        return loss

    def backward(self) -> None:
        rec = self.rec
        rec.phase = "backward"
        loss = self.segments[-1].leaving
        grads = {loss: rec.op("aten.ones_like.default", (loss,), ((), "float32"))}
        for segment in reversed(self.segments):
            with rec.group(segment.name, segment.layers) if segment.name else rec.at(""):
                if segment.group is not None and self.checkpointing:
                    assert segment.weights is not None
                    rec.take_tape()
                    start = len(rec.ops)
                    again = layer(self.run, segment.entering, segment.weights, segment.group)
                    end = len(rec.ops)
                    grads[again] = grads.pop(segment.leaving)
                    rec.backward(rec.take_tape(), grads)
                    rec.drop_unread(start, end)
                else:
                    rec.backward(segment.nodes, grads)

    def optimizer(self, optimizer: Optimizer, dtype: str | None) -> None:
        """The optimizer's step, each op over the parameters of all layers; state in their dtype unless `dtype`."""
        rec = self.rec
        rec.phase = "optimizer"
        parameters = list(rec.gradients)
        groups = {
            "P": [rec.whole(p) for p in parameters],
            "G": [rec.whole(rec.gradients[p], rec.parameter_layers[p]) for p in parameters],
        }
        for letter in optimizer.state:
            groups[letter] = [rec.new(rec.shape(p), dtype or rec.dtype(p), "optimizer") for p in groups["P"]]
        with rec.at("optimizer"):
            for name, read, written in optimizer.steps:
                inputs = [value for letter in read for value in groups[letter]]
                outputs: list[Any] = []
                for letter in written:
                    if letter in groups:
                        outputs += [rec.written(value) for value in groups[letter]]
                    else:
                        like = groups[read[0]]
                        outputs += [(rec.shape(value), rec.dtype(value)) for value in like]
                results = rec.emit(name, inputs, outputs, times=1)
                if written not in groups and len(written) == 1:
                    groups[written] = list(results)

    def blockwise_optimizer(self, optimizer: BlockwiseAdamW) -> None:
        """The step of an optimizer with a kernel for each parameter of each layer."""
        rec = self.rec
        rec.phase = "optimizer"
        with rec.at("optimizer"):
            for parameter, grad in rec.gradients.items():
                layers, elements = rec.parameter_layers[parameter], math.prod(rec.shape(parameter))
                specs = optimizer.state(elements)
                states = [rec.new((count,), dtype, "optimizer", layers) for count, dtype in specs]
                if optimizer.pages(elements):
                    self.pageable_bytes += layers * sum(rec.tensors[state].nbytes for state in states[:2])
                name = f"foretell.adamw_step.{optimizer.bits}bit"
                rec.emit(name, (parameter, grad, *states),
                         [rec.written(value) for value in (parameter, *states)], times=layers)
