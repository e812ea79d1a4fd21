"""`steps`: how long a training step takes under each of many plans, in closed form.

    step = micro-batches · slowest rank + bubble + what of communication nothing hides + optimiser

A rank's time for a micro-batch is that of its layers: kernels (`kernels`), or the host where issuing them takes longer,
plus the collectives of its tensor, context and expert group that are not hidden. Everything is a column over plans; the
kernels of the few hundred distinct shapes among them are costed once (`layers.Shapes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from foretell.cost.rates import bandwidth
from foretell.errors import InputError
from foretell.hardware.cluster import Cluster
from foretell.hardware.device import Device
from foretell.simulate.collectives import Fabric
from foretell.simulate.collectives.experts import exchange_s
from foretell.simulate.pipeline import closed
from foretell.simulate.pipeline.times import Times
from foretell.simulate.training.constants import Constants, constants
from foretell.simulate.training.kernels import FORMATS, arithmetic, sums
from foretell.simulate.training.layers import Shapes, embedding, head, layer, padded_vocabulary, shared_tokens, tokens
from foretell.simulate.training.plan import CHOICES, PlanTable, TrainingPlan
from foretell.simulate.training.stages import layers_of
from foretell.workload.llm.config import LayerGroup, LLMConfig
from foretell.workload.llm.weights import layer_weights, model_weights

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

__all__ = ["PARTS", "StepTable", "stage_times", "step", "steps"]

#: The parts that a step's time is the sum of.
PARTS = (
    *("compute_s", "recompute_s", "host_s", "tp_s", "cp_s", "ep_s", "pp_s", "dp_s"),
    *("bubble_s", "optimizer_s"),
)


# The parts of a layer's time.
_LAYER_PARTS = ("compute", "recompute", "host", "tp", "cp", "ep", "dp")


@dataclass(frozen=True, slots=True)
class StepTable:
    """Seconds of a step and what they are made of, columns (plans,).

    The parts are those of the slowest rank of the pipeline: `compute_s` kernels of forward and backward passes,
    `recompute_s` those run again, `host_s` what the device waits for the host, `tp_s`, `cp_s`, `ep_s`, `pp_s` and
    `dp_s` communication that nothing hides, `bubble_s` waiting for other ranks, `optimizer_s` updating the weights.
    `hidden_s` is communication that compute hides, in no part. `flops_per_device` counts what the model needs (causal
    attention by its half, nothing recomputed), `peak_flops_per_s` is the device's in the plan's precision.
    """

    compute_s: Floats
    recompute_s: Floats
    host_s: Floats
    tp_s: Floats
    cp_s: Floats
    ep_s: Floats
    pp_s: Floats
    dp_s: Floats
    bubble_s: Floats
    optimizer_s: Floats
    hidden_s: Floats
    flops_per_device: Floats
    peak_flops_per_s: Floats
    tokens: Floats

    @property
    def time_s(self) -> Floats:
        """Seconds of a step."""
        return np.asarray(sum(getattr(self, name) for name in PARTS), dtype=np.float64)

    @property
    def exposed_s(self) -> Floats:
        """Communication that nothing hides."""
        return self.tp_s + self.cp_s + self.ep_s + self.pp_s + self.dp_s

    @property
    def mfu(self) -> Floats:
        """Model FLOP utilisation: share of the peak that the model's own arithmetic takes."""
        return self.flops_per_device / (self.time_s * self.peak_flops_per_s)

    @property
    def tokens_per_s(self) -> Floats:
        """Tokens a second, all devices together."""
        return self.tokens / self.time_s

    def parts(self, row: int = 0) -> Mapping[str, float]:
        """The parts of one row by name."""
        return MappingProxyType({name: float(getattr(self, name)[row]) for name in PARTS})

    def take(self, rows: npt.ArrayLike) -> StepTable:
        """Some of the rows."""
        index = np.asarray(rows)
        return StepTable(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


def step(config: LLMConfig, plan: TrainingPlan, cluster: Cluster, using: Constants | None = None) -> StepTable:
    """The step of one plan, as a table of one row."""
    return steps(config, PlanTable.of([plan]), cluster, using)


def steps(config: LLMConfig, table: PlanTable, cluster: Cluster, using: Constants | None = None) -> StepTable:
    """The steps of these plans on a cluster of equal devices. Legality is not looked at.

    Raises InputError where devices differ, or one lacks a number that nothing stands in for.
    """
    if not cluster.homogeneous:
        raise InputError("devices of several kinds", f"cluster {cluster.name!r}", "plan each kind by itself")
    return _Steps(config, table, cluster, constants() if using is None else using).table()


def stage_times(config: LLMConfig, plan: TrainingPlan, cluster: Cluster, using: Constants | None = None) -> Times:
    """Seconds of one micro-batch on each chunk of each rank of the pipeline, as `foretell.simulate.pipeline` takes
    them."""
    return _Steps(config, PlanTable.of([plan]), cluster, constants() if using is None else using).stage_times()


@lru_cache(maxsize=1024)
def elements(config: LLMConfig, group: LayerGroup | None) -> Mapping[str, float]:
    """Elements of the weights of a layer (None: outside the layers) by kind."""
    found: dict[str, float] = {"matrix": 0.0, "vector": 0.0, "experts": 0.0, "embedding": 0.0}
    for weight in model_weights(config) if group is None else layer_weights(config, group):
        found[weight.kind] += weight.elements
    return MappingProxyType(found)


class _Steps:
    def __init__(self, config: LLMConfig, table: PlanTable, cluster: Cluster, using: Constants) -> None:
        self.config, self.t, self.c = config, table, using
        self.device: Device = cluster.groups[0][1].device
        self.fabric = Fabric.of(cluster)
        self.shapes = Shapes.among(table)
        self.u = self.shapes.table  # one row a shape
        self.framework = CHOICES["framework"]

    def _host(self, name: str, t: PlanTable) -> Floats:
        """A constant of the host, by framework; none where a CUDA graph replays the layers."""
        values = np.array([self.c[f"host.{framework}.{name}"] for framework in self.framework])[t["framework"]]
        return np.where(t.flag("cuda_graph"), 0.0, values)

    # --- one layer -----------------------------------------------------------------------------------------------

    def _comm(self, group: LayerGroup) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """Seconds of collectives of a layer by kind, and their ``count``, for each shape: forward, backward."""
        u, c = self.u, self.config
        rows = len(u)
        s, h = tokens(u), float(c.hidden)
        time = self.fabric.time_s
        zero = np.zeros(rows)
        tp, cp, ep = u["tp"], u["cp"], u["ep"]
        activations = 2.0 * s * h
        sequence = u.flag("sequence_parallel")
        reduce = time("all_reduce", activations, tp, np.ones_like(tp))
        gather = time("all_gather", activations, tp, np.ones_like(tp))
        scatter = time("reduce_scatter", activations, tp, np.ones_like(tp))
        # A pair of products each: the MLP of routed experts is not split by tensor parallelism, what is beside it is.
        pairs = 1.0 + (0.0 if group.moe and not (c.moe and c.moe.shared_intermediate) else 1.0)
        forward_tp = pairs * np.where(sequence, gather + scatter, reduce)
        backward_tp = pairs * np.where(sequence, gather + scatter + gather, reduce)
        many_tp = np.where(tp > 1, pairs * np.where(sequence, 2.0, 1.0), 0.0)
        exposed = 1.0 - np.where(u.flag("overlap_tp"), self.c["tp.hidden"], 0.0)

        if c.mla is None:
            kv = np.maximum(1.0, c.kv_heads / tp) * 2.0 * c.head_dim
            q = c.heads / tp * c.head_dim
        else:
            kv = c.heads / tp * (c.query_dim + c.value_dim)
            q = c.heads / tp * c.query_dim
        stride = tp
        own = 2.0 * s * kv
        ring = (cp - 1.0) * time("send_recv", own, cp, stride)
        exchange = time("all_to_all", 2.0 * s * (2.0 * q + kv), cp, stride)
        collected = time("all_gather", own * cp, cp, stride)
        forward_cp = np.select([u.chosen("context_scheme", "ring"), u.chosen("context_scheme", "a2a")],
                               [ring, exchange], collected)  # fmt: skip
        backward_cp = np.select([u.chosen("context_scheme", "ring"), u.chosen("context_scheme", "a2a")],
                                [2.0 * ring, exchange], 2.0 * collected)  # fmt: skip
        forward = {"tp": forward_tp * exposed, "cp": forward_cp, "ep": zero}
        backward = {"tp": backward_tp * exposed, "cp": backward_cp, "ep": zero}
        many_ep = zero
        if group.moe and c.moe is not None:
            own, moe, near = np.where(sequence, shared_tokens(u), s / tp), c.moe, np.ones_like(ep)
            there = back = time("all_to_all", own * moe.top_k * h * 2.0, ep, near)
            gathered = time("all_gather", 2.0 * own * h * ep, ep, near)
            there = np.where(u.chosen("dispatcher", "allgather"), gathered, there)
            back = np.where(u.chosen("dispatcher", "allgather"), gathered, back)
            fused = np.flatnonzero(u.chosen("dispatcher", "deepep") & (ep > 1))
            if len(fused):
                routing = (own[fused], h, moe.top_k, moe.experts, ep[fused])
                there[fused], back[fused] = (
                    exchange_s(self.fabric, phase, *routing, value_bytes=2.0) for phase in ("dispatch", "combine")
                )
            forward["ep"] = there + back
            backward["ep"] = there + back
            many_ep = np.where(ep > 1, 2.0, 0.0)
        many_cp = np.where(cp > 1, cp, 0.0)
        forward["count"] = many_tp + many_cp + many_ep
        backward["count"] = 1.5 * many_tp + 2.0 * many_cp + many_ep
        return forward, backward

    def _per_layer(self) -> dict[str, Floats]:
        """Seconds of one layer of each group by part: (2, groups, rows), forward and backward.

        ``hidden`` is communication beside compute, in no time; ``weights`` the gradients of weights, a part of
        ``compute``.
        """
        t, c, of, groups = self.t, self.c, self.shapes.of, self.config.groups
        rows = len(t)
        made = {key: np.zeros((2, len(groups), rows)) for key in (*_LAYER_PARTS, "hidden", "weights")}
        kernel_host, collective_host = self._host("kernel_s", t), self._host("collective_s", t)
        full, selective = t.chosen("recompute", "full"), t.chosen("recompute", "selective")
        repeated = np.where(full, self._recomputed_share(), 0.0)
        # FSDP and ZeRO-3 gather each layer's weights before it runs, forward and backward. They and ZeRO-2 scatter its
        # gradients after each backward pass: there is no room to add them up in.
        sharded = t["zero"] == 3
        for index, group in enumerate(groups):
            one = sums(layer(self.config, group, self.u), self.u, self.device, c)
            core = one.core_s[of]
            gather, scatter, copied = self._weights_traffic(group)
            ways = zip(
                self._comm(group),
                (one.forward_s[of], one.backward_s[of] + copied),
                (one.forward_kernels, one.backward_kernels),
                (gather, gather + scatter),
                (core, 2.5 * core),
                strict=True,
            )
            for way, (exchange, compute, kernels, traffic, attention) in enumerate(ways):
                comm = {key: exchange[key][of] for key in ("tp", "cp", "ep")}
                # A ring passes keys and values on while attention runs on those at hand.
                ring = t.chosen("context_scheme", "ring")
                beside = np.where(ring, np.minimum(c["cp.hidden"] * comm["cp"], attention), 0.0)
                comm["cp"] = comm["cp"] - beside
                aside = np.where(t.flag("overlap_ep"), c["ep.hidden"] * comm["ep"], 0.0)
                comm["ep"] = comm["ep"] - aside
                covered = np.minimum(traffic, compute)
                issue = kernel_host * kernels[of] + collective_host * (exchange["count"][of] + sharded)
                made["compute"][way, index] = compute
                busy = np.maximum(compute, traffic) + comm["tp"] + comm["cp"] + comm["ep"]
                waits = np.maximum(0.0, issue - busy)
                if group.moe:
                    # How many tokens each expert gets, the host must know before it goes on: it cannot run ahead.
                    waits = waits + np.where(t.flag("cuda_graph"), c["moe.graph_s"], c["moe.sync_s"])
                made["host"][way, index] = waits
                made["dp"][way, index] = traffic - covered + c["overlap.slowdown"] * covered
                made["hidden"][way, index] = beside + aside + covered
                for key, seconds in comm.items():
                    made[key][way, index] = seconds
            made["weights"][1, index] = one.weight_s[of]
            # What is thrown away is made again before its backward pass: a whole layer, collectives and all, or the
            # core of attention.
            made["recompute"][1, index] = np.where(selective, core, repeated * made["compute"][0, index])
            for key in ("tp", "cp", "ep", "host"):
                made[key][1, index] += repeated * made[key][0, index]
        return made

    def _ends(self) -> tuple[Floats, Floats, Floats]:
        """Seconds of the embedding on the first rank and of head and loss on the last, (2, rows); and, in the
        backward pass of the head, of collectives (rows,)."""
        of = self.shapes.of
        made = [sums(what(self.config, self.u), self.u, self.device, self.c) for what in (embedding, head)]
        first, last = (np.stack([one.forward_s[of], one.backward_s[of]]) for one in made)
        return first, last, self._loss_collectives()

    # --- the step ------------------------------------------------------------------------------------------------

    def table(self) -> StepTable:
        t = self.t
        rows = len(t)
        m = t.micro_batches.astype(np.float64)
        layers = self._per_layer()
        first, last, loss = self._ends()
        everything = sum((layers[key] for key in _LAYER_PARTS), start=np.zeros_like(layers["compute"]))
        parts = {key: np.zeros(rows) for key in (*_LAYER_PARTS, "hidden")}
        total, slowest_rank = np.zeros(rows), np.zeros(rows, dtype=np.int64)
        ways = np.zeros((3, rows, int(t["pp"].max(initial=1))))  # forward, backward and its gradients of weights
        keys = np.stack([t["pp"], t["vp"], t["first_layers"], t["last_layers"]], axis=1)
        combinations, inverse = np.unique(keys, axis=0, return_inverse=True)
        inverse = inverse.reshape(-1)
        for index, (pp, vp, n_first, n_last) in enumerate(combinations):
            here = np.flatnonzero(inverse == index)
            counts = layers_of(self.config, int(pp), int(vp), int(n_first), int(n_last)).sum(axis=1).astype(np.float64)
            ranks = counts @ everything[:, :, here]  # (2, pp, rows)
            ranks[:, 0] += first[:, here]
            ranks[:, -1] += last[:, here]
            ranks[1, -1] += loss[here]
            slowest = np.argmax(ranks.sum(axis=0), axis=0)
            total[here] = ranks.sum(axis=0)[slowest, np.arange(len(here))]
            slowest_rank[here] = slowest
            ways[:2, here, : int(pp)] = ranks.transpose(0, 2, 1)
            ways[2, here, : int(pp)] = (counts @ layers["weights"][1][:, here]).T
            on_slowest = counts[slowest].T  # (groups, rows)
            for key, column in parts.items():
                column[here] = (on_slowest * layers[key][:, :, here].sum(axis=0)).sum(axis=0)
            parts["compute"][here] += first[:, here].sum(axis=0) * (slowest == 0)
            parts["compute"][here] += last[:, here].sum(axis=0) * (slowest == pp - 1)
            parts["tp"][here] += loss[here] * (slowest == pp - 1)
        per_micro = self._host("micro_batch_s", t)
        exposed_pp, hidden_pp, bubble = self._pipeline(m, total, slowest_rank, ways)
        exposed_dp, hidden_dp = self._data_parallel(total)
        flops, peak = self._flops()
        return StepTable(
            compute_s=m * parts["compute"],
            recompute_s=m * parts["recompute"],
            host_s=m * (parts["host"] + per_micro) + self._host_step(),
            tp_s=m * parts["tp"],
            cp_s=m * parts["cp"],
            ep_s=m * parts["ep"],
            pp_s=exposed_pp,
            dp_s=m * parts["dp"] + exposed_dp,
            bubble_s=bubble,
            optimizer_s=self._update(),
            hidden_s=m * parts["hidden"] + hidden_pp + hidden_dp,
            flops_per_device=flops,
            peak_flops_per_s=peak,
            tokens=(t["global_batch"] * t["seq_len"]).astype(np.float64),
        )

    def stage_times(self) -> Times:
        """What the pipeline of the first row is made of."""
        plan = self.t.plan(0)
        layers = self._per_layer()
        each = sum((layers[key] for key in _LAYER_PARTS), start=np.zeros_like(layers["compute"]))[:, :, 0]
        chunks = plan.vp if plan.schedule != "layered" else max(1, self.config.layers // plan.pp)
        counts = layers_of(self.config, plan.pp, chunks, plan.first_layers, plan.last_layers).astype(np.float64)
        first, last, loss = self._ends()
        forward, backward = counts @ each[0], counts @ each[1]
        forward[0, 0] += first[0, 0]
        backward[0, 0] += first[1, 0]
        forward[-1, -1] += last[0, 0]
        backward[-1, -1] += last[1, 0] + loss[0]
        return Times.of(forward, backward, weights_s=counts @ layers["weights"][1, :, 0],
                        p2p_s=float(self._message()[0]))  # fmt: skip

    def _host_step(self) -> Floats:
        t = self.t
        return np.array([self.c[f"host.{f}.step_s"] for f in self.framework])[t["framework"]]

    def _recomputed_share(self) -> Floats:
        """Share of a rank's layers that full recomputation repeats."""
        t = self.t
        mine = np.maximum(1.0, self.config.layers / t["pp"])
        return np.where(t["recompute_layers"] > 0, np.minimum(1.0, t["recompute_layers"] / mine), 1.0)

    def _message(self) -> Floats:
        """Seconds of sending a micro-batch's activations to the next rank of the pipeline."""
        t = self.t
        nbytes = 2.0 * tokens(t) * self.config.hidden / t["tp"]  # each tensor-parallel rank sends its part
        one = self.fabric.time_s("send_recv", nbytes, t["pp"], t["tp"] * t["cp"] * t["dp"])
        return np.where(t["pp"] > 1, one, 0.0)

    def _pipeline(self, m: Floats, slowest: Floats, rank: Ints, ways: Floats) -> tuple[Floats, Floats, Floats]:
        """Seconds that the slowest rank waits for its messages, that messages take beside its work, and that it waits
        for other ranks."""
        t, one = self.t, self._message()
        chunks = np.where(t.chosen("schedule", "layered"), np.maximum(1, self.config.layers // t["pp"]), t["vp"])
        beside = t.flag("overlap_p2p") & (t["vp"] > 1)  # without chunks there is nothing to do meanwhile
        forward, backward, weights = ways
        whole = closed.step_time(
            t["schedule"], t["pp"], chunks, t.micro_batches, forward, backward, weights_s=weights, p2p_s=one,
            overlap_p2p=beside,
        )  # fmt: skip
        waits = np.maximum(0.0, whole - m * slowest)
        sent = m * one * ((rank > 0) + (rank < t["pp"] - 1.0) + 2.0 * (chunks - 1.0)) * (t["pp"] > 1)
        exposed = np.minimum(waits, np.where(beside, 2.0 * (t["pp"] - 1.0) * one, sent))
        slower = np.where(beside, self.c["overlap.slowdown"] * sent, 0.0)
        return exposed + slower, np.where(beside, sent, 0.0), waits - exposed

    def _rank_elements(self, group: LayerGroup | None) -> tuple[Floats, Floats]:
        """Elements of dense and expert weights of a layer on each device before sharding (None: embedding, head)."""
        t = self.t
        found = elements(self.config, group)
        if group is None:
            tables = 1.0 if self.config.tied_embeddings and len(t) else 2.0
            table = padded_vocabulary(self.config, t["tp"]) * self.config.hidden / t["tp"]
            on_one = np.where(t["pp"] > 1, 1.0, tables)
            return table * on_one, np.zeros(len(t))
        return found["matrix"] / t["tp"] + found["vector"], found["experts"] / t["ep"]

    def _weights_traffic(self, group: LayerGroup) -> tuple[Floats, Floats, Floats]:
        """Seconds of gathering a layer's sharded weights, of scattering its gradients, and of copying these into one
        buffer in the format they are reduced in."""
        t = self.t
        gathers, scatters = t["zero"] == 3, (t["zero"] >= 2) & (t.shards > 1)
        if not scatters.any():
            return np.zeros(len(t)), np.zeros(len(t)), np.zeros(len(t))
        dense, expert = self._rank_elements(group)
        over, stride = t.shards, t["tp"]
        gradient = np.where(t.chosen("grad_dtype", "fp32"), 4.0, 2.0)
        # Experts are shared out among the ranks that hold the same ones.
        same = np.maximum(1, t["tp"] * over // t["ep"])

        def collective(kind: str, nbytes: float | Floats) -> Floats:
            found = self.fabric.time_s(kind, nbytes * dense, over, stride)
            return found + self.fabric.time_s(kind, nbytes * expert, same, t["ep"])

        gather, scatter = collective("all_gather", 2.0), collective("reduce_scatter", gradient)
        copied = (2.0 + gradient) * (dense + expert) / (bandwidth(self.device) * self.c["stream_share"])
        return np.where(gathers, gather, 0.0), np.where(scatters, scatter, 0.0), np.where(scatters, copied, 0.0)

    @cached_property
    def _held(self) -> tuple[Floats, Floats]:
        """Elements of dense and expert weights on the fullest rank of the pipeline."""
        t = self.t
        share = self.config.layers / t["pp"]
        dense, expert = self._rank_elements(None)
        for group in self.config.groups:
            d, e = self._rank_elements(group)
            part = share * group.layers / self.config.layers
            dense, expert = dense + part * d, expert + part * e
        return dense, expert

    def _trained(self) -> Floats:
        """Share of the weights that get gradients: all, or adapters of two small matrices beside each large one."""
        matrices = [w.shape for g in self.config.groups for w in layer_weights(self.config, g) if w.kind == "matrix"]
        beside = sum(rows + columns for rows, columns in matrices) / sum(rows * columns for rows, columns in matrices)
        rank = self.t["lora_rank"]
        return np.where(rank > 0, np.minimum(1.0, rank * beside), 1.0)

    def _data_parallel(self, slowest: Floats) -> tuple[Floats, Floats]:
        """Reducing gradients and gathering weights once a step, where weights are not sharded."""
        t, c = self.t, self.c
        dense, expert = self._held
        dense, expert = dense * self._trained(), expert * self._trained()
        gradient = np.where(t.chosen("grad_dtype", "fp32"), 4.0, 2.0)
        replicas = t["dp"] * t["cp"]
        stride = t["tp"]
        spread = np.maximum(1, t["tp"] * replicas // t["ep"])  # ranks that hold the same experts

        def collective(kind: str, nbytes: float | Floats) -> Floats:
            found = self.fabric.time_s(kind, nbytes * dense, replicas, stride)
            return found + self.fabric.time_s(kind, nbytes * expert, spread, t["ep"])

        reduce = np.where(t["zero"] == 0, collective("all_reduce", gradient), collective("reduce_scatter", gradient))
        gather = np.where(t["zero"] == 0, 0.0, collective("all_gather", 2.0))
        reduce, gather = np.where(t["zero"] < 2, reduce, 0.0), np.where(t["zero"] < 3, gather, 0.0)
        # Hidden behind the last backward pass and the first forward pass of this rank.
        under_b, under_f = slowest * 2.0 / 3.0, slowest / 3.0
        hidden_r = np.where(t.flag("overlap_grad_reduce"), np.minimum(c["dp.hidden"] * reduce, under_b), 0.0)
        hidden_g = np.where(t.flag("overlap_param_gather"), np.minimum(c["dp.hidden"] * gather, under_f), 0.0)
        hidden = hidden_r + hidden_g
        return reduce + gather - hidden + c["overlap.slowdown"] * hidden, hidden

    def _loss_collectives(self) -> Floats:
        """The vocabulary is split: largest logit, logit of the label and sum of exponentials are reduced; with sequence
        parallelism the final norm's output is gathered."""
        t = self.t
        one = np.ones_like(t["tp"])
        small = 3.0 * self.fabric.time_s("all_reduce", 4.0 * tokens(t), t["tp"], one)
        activations = 2.0 * tokens(t) * self.config.hidden
        back = self.fabric.time_s("all_reduce", activations, t["tp"], one)
        return small + back

    def _update(self) -> Floats:
        """Adam on this rank's share: gradient, two moments and master weights read, the last three and 16-bit weights
        written (30 bytes); gradients read once more for their norm and set to zero."""
        t = self.t
        dense, expert = self._held
        replicas = np.where(t["zero"] > 0, t.shards, 1)
        spread = np.where(t["zero"] > 0, np.maximum(1, t["tp"] * replicas // t["ep"]), 1)
        mine = dense / replicas + expert / spread
        everything = np.where(t["zero"] >= 2, mine, dense + expert)
        nbytes: Floats = self._trained() * (30.0 * mine + 8.0 * everything)
        return nbytes / (bandwidth(self.device) * self.c["stream_share"])

    def _flops(self) -> tuple[Floats, Floats]:
        """What the model needs of each device, and the device's peak."""
        t, config = self.t, self.config
        keys = ("seq_len", "document_len", "lora_rank")
        distinct, of = np.unique(np.stack([t[key] for key in keys], axis=1), axis=0, return_inverse=True)
        whole = PlanTable.build({"global_batch": 1, **dict(zip(keys, distinct.T, strict=True))}, len(distinct))
        each = np.zeros(len(distinct))
        for kernels, count in ((head(config, whole), 1), *((layer(config, g, whole), g.layers) for g in config.groups)):
            forward, trained = arithmetic(kernels, len(distinct))
            each += count * (2.0 * forward + trained)
        device = self.device
        half = device.peak("bf16") or device.peak("fp16") or np.nan
        peaks = [device.peak(FORMATS[name][0]) or half for name in CHOICES["precision"]]
        return each[of.reshape(-1)] * t["global_batch"] / t.devices, np.array(peaks)[t["precision"]]
