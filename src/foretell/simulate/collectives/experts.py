"""Tokens to their experts and back: the exchange of mixture-of-experts layers by DeepEP's kernels.

Two kinds of kernel. *Normal* ones, for training and prefill, send a token once to each node that has one of its experts
and there, over the links of the node, once to each rank; a given number of multiprocessors moves the data.
*Low-latency* ones, for decoding, send a token once for each of its experts, straight to the expert's rank.

Bytes follow from the routing: with `topk` of `experts` chosen evenly, the expected number of ranks or nodes that have
at least one is `spread`. Sources: DeepEP (github.com/deepseek-ai/DeepEP), its documents and test programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError, unknown
from foretell.simulate.collectives.groups import Floats
from foretell.simulate.collectives.rates import section

if TYPE_CHECKING:
    from foretell.simulate.collectives.fabric import Fabric

__all__ = ["FP8_BYTES", "PHASES", "Exchange", "exchange_s", "spread"]

PHASES = ("dispatch", "combine")
#: A value in FP8 with its share of the scale of 128 of them.
FP8_BYTES = 1 + 4 / 128
#: Nodes a token may go to at most: DeepSeek-V3's group-limited gating, as DeepEP's own test programs have it.
NODES_A_TOKEN = 4
#: Multiprocessors that DeepEP's normal kernels are given by default.
MULTIPROCESSORS = 24
#: What one multiprocessor moves in DeepEP's second version (ElasticBuffer), here or between nodes, bytes/s: what 24 of
#: them do within a node of B200, 643 GB/s, next to 726 GB/s of 64 (DeepEP, README.md).
ELASTIC_SM_BYTES_PER_S = 33e9
#: How sharply the slower of two limits rules: the p of a p-norm over the times of links and multiprocessors.
SHARPNESS = 4.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """Constants of one phase on one kind of link.

    Normal kernels: `base_s`; `wire`, one over the efficiency of the links. One multiprocessor spends `token_s` on a
    token and moves `sm_bytes_per_s` of its copies (`far_sm_bytes_per_s` where tokens go on to other nodes); the other
    end handles `token_bytes_per_s` of the tokens themselves, adding up their copies. Low-latency ones: `fast_base_s`,
    and `fast_expert_s` more for each expert; `fast_wire`; `pair_bytes_per_s`, what the warps move that unpack one
    sender's tokens for one expert; a rank has as many such groups of warps as there are experts in all.
    """

    base_s: float
    wire: float
    sm_bytes_per_s: float
    far_sm_bytes_per_s: float
    token_s: float
    token_bytes_per_s: float
    fast_base_s: float
    fast_expert_s: float
    fast_wire: float
    pair_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Far:
    """Constants of one phase over a kind of network: `base_s` once more and `step_s` for each doubling of nodes."""

    base_s: float
    step_s: float
    wire: float


def spread(places: npt.ArrayLike, experts: npt.ArrayLike, topk: npt.ArrayLike) -> Floats:
    """Expected number of `places` (ranks, nodes), experts dealt to them evenly, with one of `topk` chosen evenly.

    ``places · (1 - C(experts - experts/places, topk) / C(experts, topk))``.

    >>> float(spread(8, 8, 2)), round(float(spread(8, 256, 8)), 2)
    (2.0, 5.29)
    """
    n, e, k = np.broadcast_arrays(*(np.asarray(v, np.float64) for v in (places, experts, topk)))
    elsewhere = e - e / n
    missed = np.ones(n.shape)
    for i in range(int(k.max(initial=0))):
        factor = np.clip((elsewhere - i) / np.maximum(e - i, 1), 0, 1)
        missed = np.where(i < k, missed * factor, missed)
    return np.asarray(n * (1 - missed), np.float64)


def exchange_s(
    fabric: Fabric,
    phase: str,
    tokens: npt.ArrayLike,
    hidden: npt.ArrayLike,
    topk: npt.ArrayLike,
    experts: npt.ArrayLike,
    size: npt.ArrayLike,
    stride: npt.ArrayLike = 1,
    *,
    value_bytes: float | None = None,
    low_latency: bool = False,
    multiprocessors: npt.ArrayLike = MULTIPROCESSORS,
    nodes_a_token: int = NODES_A_TOKEN,
    elastic: bool = False,
) -> Floats:
    """Seconds to send each rank's `tokens` of `hidden` values to their experts (``dispatch``) or back (``combine``).

    Everything broadcasts to (rows,). `size` ranks, `stride` apart, hold the `experts`. `value_bytes` is `FP8_BYTES`
    for dispatch and 2 (bfloat16) for combine unless given. `multiprocessors` are what a normal kernel is given;
    `elastic` ones are of DeepEP's second version, which needs fewer.

    Raises UnknownNameError for another phase, InputError for sizes below 1, fewer experts than a token chooses, or a
    machine without links.
    """
    if phase not in PHASES:
        raise unknown("phase of an exchange", phase, PHASES)
    rows = np.broadcast_arrays(*(np.asarray(v, np.float64) for v in (tokens, hidden, topk, experts, size, stride)))
    shape = rows[0].shape
    count, width, chosen, total, ranks, apart = (row.ravel() for row in rows)
    if min(width.min(initial=1), chosen.min(initial=1), ranks.min(initial=1)) < 1 or count.min(initial=0) < 0:
        raise InputError("an exchange with a size below 1", None, "give hidden, topk, experts and ranks of 1 or more")
    if np.any(total < chosen):
        raise InputError(f"{total.min():g} experts, and a token goes to more", "experts", "choose fewer of them")
    groups = fabric.groups(ranks.astype(np.int64), apart.astype(np.int64), True)
    inside, outside = constants(fabric.node_kind, fabric.network_kind, phase)
    each = value_bytes if value_bytes is not None else FP8_BYTES if phase == "dispatch" else 2.0
    nbytes = count * width * each  # of all tokens of a rank, once
    far = np.where(groups.across, (groups.nodes - 1) / groups.nodes, 0.0)
    near = (groups.local - 1) / groups.local
    if low_latency:
        sent = nbytes * chosen
        at_home = sent * (1 - far) * near * inside.fast_wire / groups.mesh_rate
        unpacked = sent / total / inside.pair_bytes_per_s
        base = inside.fast_base_s + inside.fast_expert_s * total
        time = base + (at_home**SHARPNESS + unpacked**SHARPNESS) ** (1 / SHARPNESS)
        if fabric.network_rates is not None:
            wired = sent * far * outside.wire / groups.rank_rate
            limits = at_home**SHARPNESS + unpacked**SHARPNESS + wired**SHARPNESS
            time = np.where(groups.across, base + _more(groups.nodes, outside) + limits ** (1 / SHARPNESS), time)
    else:
        # A token reaches `reached` nodes, and there the ranks of its experts, all experts being in those nodes.
        allowed = np.minimum(groups.nodes, nodes_a_token)
        reached = spread(allowed, total * allowed / groups.nodes, chosen)
        delivered = spread(allowed * groups.local, total * allowed / groups.nodes, chosen)
        sm_rate = np.where(groups.across, inside.far_sm_bytes_per_s, inside.sm_bytes_per_s)
        if elastic:
            sm_rate = np.full_like(sm_rate, ELASTIC_SM_BYTES_PER_S)
        workers = np.asarray(multiprocessors, np.float64).ravel()
        moved = (count * (0.0 if elastic else inside.token_s) + nbytes * delivered / sm_rate) / workers
        added = nbytes / (workers * np.where(elastic, np.inf, inside.token_bytes_per_s))
        linked = nbytes * delivered * near * inside.wire / groups.mesh_rate
        wired = np.zeros_like(nbytes)
        more = np.zeros_like(nbytes)
        if fabric.network_rates is not None:
            wired = np.where(groups.across, nbytes * reached * far * outside.wire / groups.rank_rate, 0.0)
            more = np.where(groups.across, _more(groups.nodes, outside), 0.0)
        limits = moved**SHARPNESS + added**SHARPNESS + linked**SHARPNESS + wired**SHARPNESS
        time = inside.base_s + more + limits ** (1 / SHARPNESS)
    time = np.where((ranks <= 1) | (count <= 0), 0.0, time)
    return np.asarray(time.reshape(np.broadcast_shapes(shape, np.shape(multiprocessors))), np.float64)


def _more(nodes: Floats, outside: Far) -> Floats:
    return np.asarray(outside.base_s + outside.step_s * np.log2(np.maximum(nodes, 2)), np.float64)


def constants(node_kind: str | None, network_kind: str | None, phase: str) -> tuple[Exchange, Far]:
    """The constants of `phase`; other links take those of the newest NVLink and of InfiniBand."""
    inside: Mapping[str, Mapping[str, Mapping[str, float]]] = section("deepep")
    links = inside["inside"]
    near = links.get(f"{node_kind}.{phase}") or links[max(k for k in links if k.endswith(phase))]
    nets = inside["outside"]
    far = nets.get(f"{network_kind}.{phase}") or nets[f"infiniband.{phase}"]
    return Exchange(**near), Far(**far)
