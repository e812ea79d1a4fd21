"""`predict`: one training plan on one cluster, all there is to say of it as one value."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.hardware.cluster import Cluster
from foretell.plan.training.measured import MeasuredRun, Scale, fit, scaled
from foretell.plan.training.rows import energy, hourly_price
from foretell.plan.training.search import OPTIONS, Candidate, illegal_error
from foretell.simulate.training.constants import constants, measured_on
from foretell.simulate.training.kernels import arithmetic
from foretell.simulate.training.layers import Kernels, layer
from foretell.simulate.training.legality import explain
from foretell.simulate.training.memory import PARTS as MEMORY_PARTS
from foretell.simulate.training.memory import MemoryTable, by_rank, over_capacity
from foretell.simulate.training.plan import PlanTable, TrainingPlan
from foretell.simulate.training.stages import layers_of
from foretell.simulate.training.step import PARTS, StepTable, step
from foretell.workload.llm.config import LLMConfig

__all__ = ["SCHEMA", "PredictedStep", "predict", "unmasked_flops"]

Floats = npt.NDArray[np.float64]

#: Name and version of the document that `PredictedStep.to_dict` gives.
SCHEMA = "foretell.training-step/1"

_BASIS = "from the errors on published training runs, most of which the constants were fitted on"


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """One training step of `plan` on `cluster`.

    `step` is a table of this one plan, `memory` has a row for each rank of the pipeline. `interval_s` are the ends of
    an 80 % interval of the step's time and `basis` says what it rests on. With `full_flops` the FLOP, and so the MFU,
    count attention to every position, otherwise only what masks leave (`unmasked_flops`). `excess` says by how much the
    plan misses the memory and what would fit; empty where it fits.
    """

    config: LLMConfig
    plan: TrainingPlan
    cluster: Cluster
    step: StepTable
    memory: MemoryTable
    interval_s: tuple[float, float]
    basis: str
    full_flops: bool = False
    excess: str = ""
    tokens: float | None = None
    scale: Scale | None = None
    notes: tuple[str, ...] = ()

    @property
    def time_s(self) -> float:
        """Seconds of a step."""
        return float(self.step.time_s[0])

    @property
    def candidate(self) -> Candidate:
        """The same as the search's results are given."""
        one = self.step
        busy = one.compute_s + one.recompute_s + one.optimizer_s
        joules = float(energy(self.cluster, one.time_s, busy)[0])
        price = hourly_price(self.cluster)
        return Candidate(
            self.plan, self.cluster.node_count, self.time_s, one.parts(0), float(one.hidden_s[0]),
            float(self.memory.peak_bytes.max()), float(one.mfu[0]), None if joules != joules else joules,
            None if price is None else price * self.time_s / 3600.0,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Plain values, schema ``foretell.training-step/1``."""
        one, found = self.step, self.candidate
        device = self.cluster.groups[0][1].device
        memory = self.memory
        layers = layers_of(self.config, self.plan.pp, self.plan.vp, self.plan.first_layers, self.plan.last_layers)
        scale = self.scale
        run = None if self.tokens is None else found.run(self.tokens)
        return {
            "schema": SCHEMA,
            "workload": f"llm:{self.config.name}",
            "parameters": self.config.parameters,
            "cluster": self.cluster.name,
            "device": device.name,
            "devices": self.plan.devices,
            "nodes": self.cluster.node_count,
            "plan": self.plan.to_dict(),
            "time_s": self.time_s,
            "time_interval_s": list(self.interval_s),
            "interval_basis": self.basis,
            "parts_s": {name.removesuffix("_s"): found.parts[name] for name in PARTS},
            "exposed_s": found.exposed_s,
            "hidden_s": found.hidden_s,
            "tokens": self.plan.tokens,
            "tokens_per_s": found.tokens_per_s,
            "tokens_per_s_per_device": found.tokens_per_s_per_device,
            "flops_per_device": float(one.flops_per_device[0]),
            "flops_convention": "full" if self.full_flops else "causal",
            "peak_flops_per_s": float(one.peak_flops_per_s[0]),
            "mfu": found.mfu,
            "memory": {
                "peak_bytes": found.memory_bytes,
                "capacity_bytes": memory.capacity_bytes,
                "fits": None if memory.capacity_bytes is None else bool(memory.fits().all()),
                "fullest": int(memory.peak_bytes.argmax()),
                "ranks": [
                    {
                        "layers": int(layers[rank].sum()),
                        "peak_bytes": float(memory.peak_bytes[rank]),
                        "reserved_bytes": float(memory.reserved_bytes[rank]),
                        "allocated_bytes": float(memory.allocated_bytes[rank]),
                        "parts_bytes": {part: float(memory[part][rank]) for part in MEMORY_PARTS},
                    }
                    for rank in range(len(memory))
                ],
            },
            "energy_j": found.energy_j,
            "power_w": None if found.energy_j is None else found.energy_j / self.time_s,
            "usd_per_h": hourly_price(self.cluster),
            "cost_usd": found.cost_usd,
            "run": None if run is None else {
                "tokens": run.tokens, "steps": run.steps, "time_s": run.time_s, "device_hours": run.device_hours,
                "cost_usd": run.cost_usd, "energy_j": run.energy_j,
            },
            "calibration": None if scale is None else {
                "runs": len(scale.runs), "compute": scale.compute, "communication": scale.communication,
                "memory": scale.memory,
            },
            "notes": list(self.notes),
        }  # fmt: skip


def predict(
    config: LLMConfig,
    plan: TrainingPlan,
    cluster: Cluster,
    *,
    runs: Sequence[MeasuredRun] = (),
    full_flops: bool = False,
    tokens: float | None = None,
    notes: Sequence[str] = (),
) -> PredictedStep:
    """One training step: time with its parts and interval, memory of each stage, energy, cost.

    `runs` are measured ones to calibrate from, `tokens` those of a whole run. A plan that does not fit is predicted all
    the same, with its `excess` said. Raises InputError where devices differ or the plan breaks a rule, with the nearest
    that breaks none.

    >>> from foretell.hardware import cluster
    >>> from foretell.workload import llm
    >>> plan = TrainingPlan(global_batch=1024, seq_len=8192, tp=8, pp=4, dp=4)
    >>> found = predict(llm.config("llama-3-70b"), plan, cluster("16x dgx-h100"))
    >>> found.interval_s[0] < found.time_s < found.interval_s[1], found.excess
    (True, '')
    """
    if not cluster.homogeneous:
        repair = "predict each kind by itself; foretell plan train shares the work out"
        raise InputError("devices of several kinds", f"cluster {cluster.name!r}", repair)
    violations = explain(config, plan, cluster)
    if violations:
        raise illegal_error(violations, options=(*OPTIONS, "sequence_parallel"))
    table = step(config, plan, cluster)
    if runs:
        scale = fit(runs)
        table = scaled(table, scale)
        factors, basis = scale.interval(config, plan, cluster), scale.basis(config, plan, cluster)
        if scale.memory is not None:
            notes = (*notes, f"your runs reserved {scale.memory:.2f} times the memory predicted of them; "
                             "memory here is as predicted")  # fmt: skip
    else:
        scale = None
        factors, basis = constants().calibration.intervals["default"], _BASIS
        unseen = sorted({node.device.name for _, node in cluster.groups} - set(measured_on()))
        if unseen:
            # Nothing was measured on it: twice as far, which is a guess and is said.
            factors = (factors[0] ** 2, factors[1] ** 2)
            basis = f"no published training run on {', '.join(unseen)} was compared: taken to be twice as wide"
    if full_flops:
        more = unmasked_flops(config, PlanTable.of([plan]))
        table = dataclasses.replace(table, flops_per_device=table.flops_per_device + more)
    time_s = float(table.time_s[0])
    return PredictedStep(
        config, plan, cluster, table, by_rank(config, plan, cluster.groups[0][1].device),
        (factors[0] * time_s, factors[1] * time_s), basis, full_flops, over_capacity(config, plan, cluster), tokens,
        scale, tuple(notes),
    )  # fmt: skip


def unmasked_flops(config: LLMConfig, table: PlanTable) -> Floats:
    """FLOP of a step on each device that attention to every position takes beyond `StepTable.flops_per_device`, which
    leaves out what masks, windows and documents hide: (rows,). With it a token takes 6 N + 12 · layers · hidden ·
    length (PaLM, arXiv 2204.02311, appendix B)."""
    keys = ("seq_len", "document_len", "lora_rank")
    whole = PlanTable.build({"global_batch": 1, **{key: table[key] for key in keys}}, len(table))
    length = table["seq_len"].astype(np.float64)
    full = 2.0 * config.heads * (config.query_dim + config.value_dim) * length**2
    beyond = np.zeros(len(table))
    for group in config.groups:
        masked, _ = arithmetic(Kernels(attentions=layer(config, group, whole).attentions), len(table))
        beyond += group.layers * 3.0 * (full - masked)  # forward, and twice as much backward
    return np.asarray(beyond * table["global_batch"] / table.devices)
