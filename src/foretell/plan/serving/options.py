"""`Option`: one way to serve on one GPU type, what it holds up, what it costs, and what binds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.errors import ForetellError, InfeasibleError
from foretell.hardware import Cluster, Device
from foretell.plan.serving.load import Load
from foretell.plan.serving.pareto import Point, points
from foretell.plan.serving.space import label, machines, plans
from foretell.plan.serving.steady import LIMITS, Iterations, most
from foretell.simulate.serving import Batch, ServingPlan
from foretell.simulate.serving.metrics import Slo
from foretell.workload.llm import LLMConfig

__all__ = ["Make", "Maker", "Option", "Survey", "link_of", "survey", "working_point"]

Floats = npt.NDArray[np.float64]

#: What makes a cost model of iterations for a plan on a machine.
Make = Callable[[LLMConfig, ServingPlan, Cluster], Iterations]
_SHAPE = ("engine", "version", "tp", "pp", "dp", "ep", "weight_dtype", "kv_dtype", "cuda_graph")


class Maker:
    """Makes `Iterations`, and makes each only once: batch sizes and token budgets share one, degrees and formats do
    not.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Any] = {}

    def __call__(self, config: LLMConfig, plan: ServingPlan, machine: Cluster) -> Iterations:
        from foretell.simulate.serving.iteration import Iterations as Real

        key = (config, machine.name, *(getattr(plan, name) for name in _SHAPE))
        if key not in self._made:
            self._made[key] = Real.of(config, plan, machine)
        made: Iterations = dataclasses.replace(self._made[key], plan=plan)
        return made


@dataclass(frozen=True, slots=True)
class Option:
    """A plan on a GPU type as it would serve the whole load: the most requests/s of one unit, and how that comes.

    A unit is a replica, or all prefill and decode replicas that belong together. `share` of the requests have sizes
    that it can serve; figures are of the mixture of these. `limit` is what stops the batch from
    growing (of `steady.LIMITS`) and `bound` what most of an iteration's time goes to; `parts` are shares of it.
    """

    gpu: str
    plan: ServingPlan
    machine: str
    devices: int
    usd_per_h: float | None
    #: Watts of all devices of the unit at its working point; None where a device's power is unknown.
    power_w: float | None
    share: float
    rate: float
    batch: float
    tpot_s: float
    ttft_s: float
    kv_tokens: float
    kv_capacity_tokens: float
    tokens_per_s: float
    limit: str
    bound: str
    parts: Mapping[str, float]

    @property
    def name(self) -> str:
        """GPU type and settings in one line."""
        return f"{self.gpu} {label(self.plan)}"

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Output tokens a second of one device."""
        return self.tokens_per_s / self.devices

    @property
    def usd_per_million(self) -> float | None:
        """Dollars for a million output tokens at the most the unit serves."""
        return None if self.usd_per_h is None else self.usd_per_h / 3600.0 / self.tokens_per_s * 1e6

    def cost(self, objective: str) -> float:
        """What a unit costs in the objective's measure: dollars an hour, GPUs, or watts."""
        values = {"cost": self.usd_per_h, "gpus": float(self.devices), "energy": self.power_w}
        value = values[objective]
        assert value is not None
        return value

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "gpu": self.gpu, "machine": self.machine, "devices": self.devices, "plan": self.plan.to_dict(),
            "usd_per_h": self.usd_per_h, "power_w": self.power_w, "share": self.share, "requests_per_s": self.rate,
            "batch": self.batch, "tpot_s": self.tpot_s, "ttft_s": self.ttft_s, "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu, "tokens_per_s_per_user": 1.0 / self.tpot_s,
            "usd_per_million_tokens": self.usd_per_million, "kv_tokens": self.kv_tokens,
            "kv_capacity_tokens": self.kv_capacity_tokens, "limit": self.limit, "bound": self.bound,
            "parts": dict(self.parts),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Survey:
    """All that was looked at on one GPU type: options that meet the objective, points of batch size, and why not."""

    gpu: str
    tried: int
    options: tuple[Option, ...]
    points: tuple[Point, ...]
    #: Why the nearest plan fails, where none meets the objective.
    reason: str


def link_of(machine: Cluster) -> float:
    """Bytes/s at which one device sends KV to another replica: within the machine where it is one, else its ports'
    share.
    """
    node = machine.nodes[0]
    if machine.network is not None:
        total = machine.network.total_bandwidth_bytes_per_s or 0.0
        return total / node.count or np.inf
    links = [link.total_bandwidth_bytes_per_s for link in node.device.links if link.kind == "pcie"]
    link = node.link.total_bandwidth_bytes_per_s if node.link is not None else next(iter(links), None)
    return float(link or np.inf)


def working_point(load: Load, batch: float) -> Batch:
    """The mean iteration of `batch` decoding sequences with the prompts that take the places of those that end."""
    arrivals = batch / load.output_tokens[0]
    return Batch.of(
        decode_seqs=batch, decode_tokens=batch * load.context[0], prefill_seqs=arrivals,
        prefill_tokens=arrivals * load.input_tokens[0], prefill_pairs=arrivals * load.pairs[0],
        sampled=batch + arrivals,
    )  # fmt: skip


def _parts(iterations: Any, at: Batch) -> tuple[str, dict[str, float]]:
    """What most of an iteration goes to, and the shares of its parts; "" and {} where the cost model does not say."""
    if not hasattr(iterations, "bound"):
        return "", {}
    found = {name: float(values[0]) for name, values in iterations.parts(at).items()}
    total = sum(found.values())
    return iterations.bound(at)[0], {name: value / total for name, value in found.items() if value > 0}


def survey(
    config: LLMConfig,
    device: Device,
    load: Load,
    slo: Slo,
    *,
    engine: str = "vllm",
    pinned: Mapping[str, Sequence[Any]] | None = None,
    usd_per_h: float | None = None,
    make: Make | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Survey:
    """Every plan on one GPU type by the closed form, for the mixture of the sizes in `load` that it can serve."""
    make = make or Maker()
    whole = load.mixed()
    options: list[Option] = []
    everything: list[Point] = []
    reasons: list[tuple[float, str]] = []  # how near a plan came, and why it fails
    todo = list(plans(config, device, engine, pinned))
    for at, plan in enumerate(todo):
        if progress is not None:
            progress(f"Trying {device.name}", at, len(todo))
        try:
            machine = machines(device, plan)
            iterations = make(config, plan, machine)
            capacity = float(iterations.kv_capacity_tokens)
        except InfeasibleError as error:
            reasons.append((-1.0 / plan.devices_per_replica, error.message))  # most devices come nearest
            continue
        units = max(1, plan.prefill_replicas + plan.decode_replicas)
        devices = plan.devices_per_replica * units
        link = link_of(machine)
        everything += points(device.name, plan, devices, iterations, whole, link)
        mine, share = whole, 1.0
        found = most(iterations, plan, mine, slo, link_bytes_per_s=link)
        if not found.rate[0] > 0:  # not for all sizes: for those that it serves one by one
            reasons.append(_near(plan, found, capacity, whole, slo))
            rows = np.flatnonzero(most(iterations, plan, load, slo, link_bytes_per_s=link).rate > 0)
            if not len(rows):
                continue
            mine, share = load.mixed(rows), float(load.rate[rows].sum() / load.rate.sum())
            found = most(iterations, plan, mine, slo, link_bytes_per_s=link)
            if not found.rate[0] > 0:
                continue
        batch = float(found.batch[0])
        mean = working_point(mine, batch)
        bound, parts = _parts(iterations, mean)
        options.append(Option(
            device.name, plan, machine.name, devices, None if usd_per_h is None else usd_per_h * devices,
            _watts(iterations, mean, devices), share, float(found.rate[0]), batch, float(found.tpot_s[0]),
            float(found.ttft_s[0]), float(found.kv_tokens[0]), capacity,
            float(found.rate[0] * mine.output_tokens[0]), LIMITS[int(found.limit[0])], bound, parts,
        ))  # fmt: skip
    full = any(option.share == 1 for option in options)
    reason = "" if full or not reasons else max(reasons, key=lambda one: one[0])[1]
    return Survey(device.name, len(todo), tuple(options), tuple(everything), reason)


def _near(plan: ServingPlan, found: Any, capacity: float, load: Load, slo: Slo) -> tuple[float, str]:
    if load.largest[0] > capacity:
        text = (f"{label(plan)}: the longest request has {load.largest[0]:,.0f} tokens and the KV cache holds"
                f" {capacity:,.0f}")  # fmt: skip
        return capacity / load.largest[0], text
    times = {"tpot": float(found.tpot_s[0]), "ttft": float(found.ttft_s[0])}
    times["e2e"] = times["ttft"] + times["tpot"] * (float(load.output_tokens[0]) - 1.0)
    near = 1.0
    for name, limit in slo.limits.items():
        near *= min(1.0, limit / times[name])
    said = " and ".join(f"{name.upper()} {1e3 * times[name]:,.3g} ms" for name in slo.limits or times)
    return 1.0 + near, f"{label(plan)}: a request alone has {said}"


def _watts(iterations: Iterations, at: Batch, devices: int) -> float | None:
    try:
        return float(iterations.power_w(at)[0]) * devices
    except ForetellError:
        return None
