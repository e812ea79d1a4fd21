"""`Iterations`: what iterations of an engine take, from tables of a model, a plan and a machine made once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from foretell.cost.energy import Power, power_of
from foretell.cost.kv_budget import Budget, kv_budget
from foretell.cost.rates import matrix_rate
from foretell.errors import InfeasibleError, InputError
from foretell.hardware import Device
from foretell.hardware.cluster import Cluster, cluster
from foretell.simulate.collectives import Fabric
from foretell.simulate.serving.batch import Batch
from foretell.simulate.serving.formats import refusal
from foretell.simulate.serving.iteration import sizes
from foretell.simulate.serving.iteration.constants import Constants, constants, host_of, launches_graphs
from foretell.simulate.serving.iteration.kernels import COLUMNS, FORMAT_BYTES, KERNELS, PARTS, Costs, attended
from foretell.simulate.serving.iteration.tables import Curve, Surface, counts, powers
from foretell.simulate.serving.plan import ServingPlan
from foretell.simulate.training.constants import generation
from foretell.simulate.training.stages import layers_of
from foretell.workload.llm import LLMConfig, model_weights
from foretell.workload.llm.weights import layer_weights

Floats = npt.NDArray[np.float64]

__all__ = ["BOUNDS", "Iterations"]

#: Bytes of one value without the scales beside it.
_VALUE_BYTES = FORMAT_BYTES | {"nvfp4": 0.5, "mxfp4": 0.5, "int4": 0.5}
#: What can limit an iteration.
BOUNDS = ("bandwidth", "compute", "network", "host")
#: Largest counts that tables are made for: beyond them times go on as they did last.
_MOST_ROWS, _MOST_SEQUENCES, _MOST_KEYS = 16384, 2048, 1 << 20
#: Decoding sequences up to which engines capture CUDA graphs (vLLM's, SGLang's and TensorRT-LLM's defaults are 256 to
#: 512 on cards of this size).
_GRAPHED = 512.0
#: L2's sizes that all heads walk in one layer, beside prompts, when half of what they share is no longer in L2.
_KEPT = 40.0
#: Query rows of the smallest tile for prompts, and the share of reads that tells kernels which pack heads all the same.
_TILE, _PACKED = 64.0, 0.1
#: Heads that share a tile of latent attention's kernels (FlashMLA).
_LATENT_HEADS = 64.0


@dataclass(frozen=True)
class Iterations:
    """Iterations of one rank of `plan` that serves `config` on devices of a machine.

    With pipeline parallelism an iteration is a batch's whole way through the stages; `plan.pp` batches are on their
    way at a time. Made by `Iterations.of`.
    """

    config: LLMConfig
    plan: ServingPlan
    costs: Costs
    weights_bytes: float
    kv_bytes_per_token: float
    rows: Curve = field(repr=False)
    #: What the experts do for the tokens of all ranks, by their mean; None without experts.
    together: Curve | None = field(repr=False)
    decode: Curve = field(repr=False)
    keys: Curve = field(repr=False)
    sampled: Curve = field(repr=False)
    #: By window, with how many layers have it.
    decode_attention: tuple[tuple[int | None, Surface], ...] = field(repr=False)
    prefill_attention: tuple[tuple[int | None, Surface], ...] = field(repr=False)

    @staticmethod
    def of(
        config: LLMConfig, plan: ServingPlan, machine: Cluster | Device, using: Constants | None = None
    ) -> Iterations:
        """Tables of everything that iterations depend on: about half a second.

        Raises InfeasibleError where heads, experts or layers cannot be divided as the plan says, or the machine has too
        few devices; InputError where a number of the device is unknown, or engines have no kernels for the format of
        weights on it.
        """
        if isinstance(machine, Device):
            machine = cluster(f"{plan.devices_per_replica}x {machine.name}")
        _check(config, plan, machine)
        device = machine.nodes[0].device
        if (refused := refusal(plan.weight_dtype, device)) is not None:
            raise refused
        many = plan.devices_per_replica > 1
        costs = Costs(device, Fabric.of(machine) if many else None, using or constants(), config, host_of(plan))
        weights = _weights_bytes(config, plan)
        return _made(config, plan, costs, weights)

    @property
    def request_s(self) -> float:
        """Seconds of a request before and after its iterations: the server's, its tokeniser's, the first answer's."""
        return self.costs.constants[f"host.{self.costs.host}.request_s"]

    @property
    def device(self) -> Device:
        """What each rank runs on."""
        return self.costs.device

    def columns(self, batch: Batch) -> Floats:
        """(`COLUMNS`, iterations): seconds by part of the device, and what else a table keeps."""
        return self._columns(slice(None), batch)

    def _columns(self, which: slice, batch: Batch) -> Floats:
        result = self.rows.rows(which, batch.tokens) + self.sampled.rows(which, batch.sampled)
        if self.together is not None:
            result += self.together.rows(which, batch.rank_tokens)
        if self.config.mla is not None:
            result += self.decode.rows(which, batch.decode_seqs)
            result += self.keys.rows(which, batch.prefill_tokens + batch.prefill_cached)
        context = batch.decode_tokens / np.maximum(batch.decode_seqs, 1.0) + 1.0
        for window, surface in self.decode_attention:
            seen = context if window is None else np.minimum(context, float(window))
            found = surface.rows(which, batch.decode_seqs, seen)
            result += found * self._beside_prompts(batch, window, seen, found[PARTS.index("attention")])
        if np.any(batch.prefill_tokens > 0.0):
            each = np.maximum(batch.prefill_seqs, 1.0)
            for window, surface in self.prefill_attention:
                seen = batch.prefill_pairs / np.maximum(batch.prefill_tokens, 1.0)
                if window is not None:
                    mean = attended(batch.prefill_tokens / each, batch.prefill_cached / each, window)
                    seen = np.minimum(seen, mean)
                result += surface.rows(which, batch.prefill_tokens, seen)
        return np.asarray(np.where(batch.tokens > 0.0, result, 0.0))

    def _beside_prompts(self, batch: Batch, window: int | None, seen: Floats, alone: Floats) -> Floats | float:
        """By how much attention of decoding sequences takes longer than `alone` with prompts in the same kernel.

        vLLM's attention of variable lengths then has tiles for prompts. Heads of a decoding sequence that share a key
        head are not in one tile: each fills one of its own with what it has not, and reads keys and values for itself,
        from L2 while they are still there. Kernels for Hopper put them in one tile all the same.
        """
        again = self.costs.constants[f"attention.unpacked.{generation(self.device)}"]
        if self.plan.engine != "vllm" or self.config.mla is not None or not again:
            return 1.0
        heads, kv_heads = sizes.heads_of(self.config, self.plan)
        both = self.config.query_dim + self.config.value_dim
        walked = batch.decode_seqs * seen * heads * both * FORMAT_BYTES[self.plan.kv_dtype]
        lost = walked / (walked + _KEPT * float(self.device.l2_bytes or 6 << 20))
        layers = sum(group.layers for group in self.config.groups if group.window == window)
        work = 2.0 * _TILE * batch.decode_seqs * heads * seen * both * layers
        rate = matrix_rate(self.device, "bf16").flops_per_s * self.costs.constants["attention.filled"]
        filled = work / rate / np.maximum(alone, 1e-12) * (again > _PACKED)
        longer = np.maximum(filled, 1.0 + (heads / kv_heads - 1.0) * again * lost)
        return np.where((batch.prefill_tokens > 0.0) & (alone > 0.0), longer, 1.0)

    def parts(self, batch: Batch) -> dict[str, Floats]:
        """Seconds by part, (iterations,) each; they sum to `time_s`. ``host`` is what the device waits for the host."""
        columns = self.columns(batch)
        named = {name: columns[COLUMNS.index(name)] for name in PARTS}
        return {**named, "host": self._host(batch, columns[: len(PARTS)].sum(axis=0), columns[KERNELS])}

    def time_s(self, batch: Batch) -> Floats:
        """Seconds of each iteration, (iterations,)."""
        columns = self.columns(batch)
        device_s = columns[: len(PARTS)].sum(axis=0)
        return np.asarray(device_s + self._host(batch, device_s, columns[KERNELS]))

    def _host(self, batch: Batch, device_s: Floats, kernels: Floats) -> Floats:
        """What an iteration waits for its host: launches that the device outruns, and what nothing hides."""
        name, constant = self.costs.host, self.costs.constants
        experts = sum(group.layers for group in self.config.groups if group.moe)
        # Without graphs every operation goes through Python, as in the first versions of vLLM.
        each = constant[f"host.{name if self.plan.cuda_graph else 'vllm-eager'}.kernel_s"]
        launched = kernels * each + experts * constant[f"host.{name}.experts_s"]
        if launches_graphs(self.plan):
            graphed = (batch.prefill_tokens == 0.0) & (batch.decode_seqs <= _GRAPHED)
            launched = np.where(graphed, 0.0, launched)
        own = constant.exposed_s(name, batch.decode_seqs + batch.prefill_seqs)
        waits = np.maximum(launched - device_s, 0.0) + own
        return np.asarray(np.where(batch.tokens > 0.0, waits, 0.0))

    def bound(self, batch: Batch) -> list[str]:
        """What limits each iteration, of `BOUNDS`: where most of its time goes."""
        return [BOUNDS[i] for i in np.argmax(self.bound_shares(batch), axis=0)]

    def bound_shares(self, batch: Batch) -> Floats:
        """(`BOUNDS`, iterations): shares of each iteration's time by what limits them; they sum to 1."""
        columns = self.columns(batch)
        parts = columns[: len(PARTS)]
        device_s = parts.sum(axis=0)
        seconds = np.stack([
            columns[COLUMNS.index("memory")], columns[COLUMNS.index("compute")], parts[PARTS.index("communication")],
            self._host(batch, device_s, columns[KERNELS]),
        ])  # fmt: skip
        return np.asarray(seconds / np.maximum(seconds.sum(axis=0), 1e-12))

    def power_w(self, batch: Batch) -> Floats:
        """Mean watts of one device in each iteration; raises InputError where its TDP is unknown."""
        power = power_of(self.device)
        if power is None:
            raise InputError("its TDP is unknown", f"device {self.device.name!r}", "add `tdp` to its TOML file")
        columns = self.columns(batch)
        time = np.maximum(self.time_s(batch), 1e-12)
        # Kernels that stream from memory keep caches and schedulers busy, which neither FLOP nor bytes count. What a
        # sequence takes in an iteration is mostly choosing its token, on the device too.
        each = self.costs.constants[f"host.{self.costs.host}.sequence_s"]
        kernels = columns[: len(PARTS)].sum(axis=0) - columns[PARTS.index("communication")]
        kernels += each * (batch.decode_seqs + batch.prefill_seqs)
        core = columns[COLUMNS.index("core_j")] / time
        core += _active_w(self.device, power, self.costs.constants) * kernels / time
        memory = columns[COLUMNS.index("memory_j")] / time
        # The voltage at which work at this pace draws no more than the limit, as `Power.settled` solves it.
        free = np.maximum(power.limit_w - power.idle_w - memory, 0.0)
        root = np.sqrt(power.leakage_w**2 + 4.0 * core * free)
        limited = np.where(core > 0.0, (root - power.leakage_w) / np.maximum(2.0 * core, 1e-12), 1.0)
        least = float(power.voltage(0.0))
        volts = np.where(power.leakage_w + core <= free, 1.0, np.clip(limited, least, 1.0))
        drawn = power.idle_w + power.leakage_w * volts + core * volts**2 + memory
        return np.asarray(np.minimum(drawn, power.limit_w))

    @cached_property
    def budget(self) -> Budget:
        """The memory of one device. Raises InfeasibleError where nothing is left for the cache."""
        plan = self.plan
        engine = "vllm" if plan.engine == "static" else plan.engine
        quantized = element_type(sizes.dense_format(self.config, plan.weight_dtype)), element_type(plan.weight_dtype)
        return kv_budget(
            _rank(self.config, plan), self.device, tokens=plan.block_size, engine=engine, version=plan.version or None,
            dtype=plan.kv_dtype if plan.kv_dtype not in ("bf16", "fp16") else "auto", tensor_parallel=plan.tp,
            share=plan.gpu_memory_percent / 100.0, step=plan.max_num_batched_tokens, seqs=plan.max_num_seqs,
            weight_dtype=quantized[0], expert_dtype=quantized[1] if self.config.moe else None,
            scale_bytes=round(self.weights_bytes - _weights_bytes(self.config, plan, _VALUE_BYTES)),
        )  # fmt: skip

    @property
    def kv_capacity_tokens(self) -> int:
        """Cached tokens that one rank holds. Raises InfeasibleError where the model leaves no room."""
        return self.budget.tokens


def _active_w(device: Device, power: Power, constant: Constants) -> float:
    """Watts that running kernels draw beyond their FLOP and bytes.

    Schedulers and caches come with multiprocessors, not with TDP, which grows faster from one generation to the next.
    A clock 1.4 times as high from A100 to H100 is about made up for by the process: TSMC states 30 % less power for N5
    than for N7. On Blackwell, joules per byte were fitted on kernels that stream, and include it. Only NVIDIA's
    multiprocessors were measured: of other chips it is a share of TDP. It is no more than that share on cards whose
    TDP is low for their multiprocessors (L4, L40S): they are binned and clocked for it.
    """
    share = constant["power.active"] * power.limit_w
    if device.vendor == "NVIDIA" and device.multiprocessors:
        return min(share, constant[f"power.active_w.{generation(device)}"] * device.multiprocessors)
    return share


def _check(config: LLMConfig, plan: ServingPlan, machine: Cluster) -> None:
    where = f"{config.name}, tp {plan.tp}, pp {plan.pp}, dp {plan.dp}, ep {plan.ep}"
    if machine.device_count < plan.devices_per_replica:
        raise InfeasibleError(
            f"a replica takes {plan.devices_per_replica} devices and {machine.name} has {machine.device_count}", where
        )
    if config.heads % plan.tp:
        raise InfeasibleError(f"{config.heads} heads cannot be split {plan.tp} ways", f"{where}: give a divisor as tp")
    if plan.pp > config.layers:
        raise InfeasibleError(f"{config.layers} layers cannot be {plan.pp} stages", where)
    ranks = plan.tp * plan.dp
    if ranks % plan.ep:
        raise InfeasibleError(f"ep {plan.ep} does not divide tp · dp = {ranks}", where)
    if plan.ep > 1 and (config.moe is None or plan.ep > config.moe.experts):
        raise InfeasibleError(f"no {plan.ep} ranks can share its experts", where)


def _rank(config: LLMConfig, plan: ServingPlan) -> LLMConfig:
    """The part of the transformer that tensor-parallel ranks of the first stage share, for the budget's own division
    of heads and widths by `tp`."""
    moe = config.moe
    if moe is not None:
        experts = -(-moe.experts // plan.ep)
        width = max(plan.tp, moe.intermediate * plan.ep // plan.dp)
        moe = type(moe)(**{
            **{name: getattr(moe, name) for name in moe.__slots__}, "experts": experts,
            "top_k": min(moe.top_k, experts), "intermediate": width,
            "first_dense": min(moe.first_dense, -(-config.layers // plan.pp)),
        })  # fmt: skip
    return config.replace(layers=-(-config.layers // plan.pp), moe=moe)


def element_type(number_format: str) -> str | None:
    """The element type in which `llm.graph` stores weights of this format; None: as they are."""
    if number_format in ("bf16", "fp16"):
        return None
    return "fp4" if number_format in ("nvfp4", "mxfp4") else number_format


def _weights_bytes(config: LLMConfig, plan: ServingPlan, each: Mapping[str, float] = FORMAT_BYTES) -> float:
    """Bytes of weights on the fullest device of the first or last stage, at `each` byte a value of a format."""
    dense, experts = each[sizes.dense_format(config, plan.weight_dtype)], each[plan.weight_dtype]
    ranks = plan.tp * plan.dp
    outside = sum(2.0 * w.elements for w in model_weights(config)) / plan.tp
    if plan.pp > 1:
        outside /= 2.0
    stage = layers_of(config, plan.pp)[:, 0].max(axis=0)
    total = outside
    for count, group in zip(stage, config.groups, strict=True):
        for w in layer_weights(config, group):
            if w.kind == "experts":
                total += count * w.elements * experts / ranks
            elif w.kind == "matrix" and w.name != "mlp.gate.weight":
                total += count * w.elements * dense / plan.tp
            else:
                total += count * w.elements * 2.0
    return float(total)


def _kv_bytes_per_token(config: LLMConfig, plan: ServingPlan) -> float:
    """Bytes a cached token takes on one device over the layers of its stage."""
    size = FORMAT_BYTES[plan.kv_dtype]
    if config.mla is not None:
        each = float(config.mla.kv_lora_rank + config.mla.rope_head_dim)
    else:
        each = sizes.heads_of(config, plan)[1] * (config.query_dim + config.value_dim)
    return -(-config.layers // plan.pp) * each * size


def _made(config: LLMConfig, plan: ServingPlan, costs: Costs, weights: float) -> Iterations:
    m, n, t, s = counts(_MOST_ROWS), counts(_MOST_SEQUENCES), counts(_MOST_ROWS), counts(_MOST_SEQUENCES)
    kv_bytes, uneven = FORMAT_BYTES[plan.kv_dtype], costs.constants["experts.uneven"]
    rows = costs.of(sizes.embedding(config, plan, m), len(m))
    together = None
    for group in config.groups:
        rows += group.layers * costs.of(sizes.rows(config, group, plan, m, kv_bytes), len(m))
        if group.moe:
            found = group.layers * costs.of(sizes.together(config, plan, m, uneven), len(m))
            together = found if together is None else together + found
    layers = float(config.layers)
    absorbed = layers * costs.of(sizes.decode(config, plan, n), len(n))
    expanded = layers * costs.of(sizes.keys(config, plan, t), len(t))
    heads = costs.of(sizes.head(config, plan, s), len(s))
    return Iterations(
        config, plan, costs, weights, _kv_bytes_per_token(config, plan), Curve(m, rows),
        None if together is None else Curve(m, together), Curve(n, absorbed),
        Curve(t, expanded), Curve(s, heads), *_attention(config, plan, costs, kv_bytes, weights),
    )  # fmt: skip


def _attention(
    config: LLMConfig, plan: ServingPlan, costs: Costs, kv_bytes: float, weights: float
) -> tuple[tuple[tuple[int | None, Surface], ...], tuple[tuple[int | None, Surface], ...]]:
    """Attention of decoding sequences (sequences, keys) and of prompts (tokens, keys), all layers of each window."""
    heads, kv_heads = sizes.heads_of(config, plan)
    windows: dict[int | None, int] = {}
    for group in config.groups:
        windows[group.window] = windows.get(group.window, 0) + group.layers
    decode, prefill = [], []
    for window, layers in windows.items():
        most = float(min(_MOST_KEYS, window or _MOST_KEYS))
        n, k = powers(_MOST_SEQUENCES, 2), powers(most, 2)
        grid_n, grid_k = (side.reshape(-1) for side in np.meshgrid(n, k, indexing="ij"))
        if config.mla is not None:
            latent = float(config.mla.kv_lora_rank + config.mla.rope_head_dim)
            depth = (latent + config.mla.kv_lora_rank) / 2.0
            # Keys and values are one latent, read once by tiles of up to 64 heads.
            tiles = float(np.ceil(heads / _LATENT_HEADS))
            size = kv_bytes * latent / (2.0 * depth * tiles)
            found = costs.attention(grid_n * tiles, np.full(len(grid_n), heads / tiles), grid_k, depth, size,
                                    "latent", weights)  # fmt: skip
        else:
            depth = (config.query_dim + config.value_dim) / 2.0
            found = costs.attention(grid_n * kv_heads, np.full(len(grid_n), heads / kv_heads), grid_k, depth,
                                    min(kv_bytes, 2.0), "decode", weights)  # fmt: skip
        decode.append((window, Surface(n, k, layers * found.reshape(len(COLUMNS), len(n), len(k)))))
        t = powers(_MOST_ROWS, 2)
        grid_t, grid_k = (side.reshape(-1) for side in np.meshgrid(t, k, indexing="ij"))
        shared = 1.0 if config.mla is not None else heads / kv_heads
        depth = (config.query_dim + config.value_dim) / 2.0
        found = costs.attention(np.full(len(grid_t), heads / shared), grid_t * shared, grid_k, depth,
                                2.0 if config.mla is not None else min(kv_bytes, 2.0), "prefill",
                                weights)  # fmt: skip
        prefill.append((window, Surface(t, k, layers * found.reshape(len(COLUMNS), len(t), len(k)))))
    return tuple(decode), tuple(prefill)
