"""Measured power: operators at a card's own limit, training under power limits, pipeline stages at locked clocks.

* ``aiconfigurator/power/*.csv.gz`` (Apache-2.0): watts beside the latency of matrix products and attention.
* ``zeus/summary_power_*.csv``, ``zeus/profile_data`` (ml-energy/zeus, Apache-2.0): time and power of training at each
  power limit; ``zeus/perseus_sosp24_stage_profile``: time and energy of pipeline stages at each locked clock.
* ``dlbench-dvfs/caffe`` (no licence: it only evaluates): time and power of Caffe at each core clock.

What AIConfigurator's watts are (its ``collector/helper.py``, ``collector/vllm/collect_gemm.py``): the mean of NVML
readings every 100 ms, from the first launch on, while a CUDA graph of `COPIES` layers is replayed up to 3000 times. A
small product is over before the second reading, and the first one still shows what went before: uploading, quantising,
waiting. Only where the replays last a second is the mean the operator's own (`PowerTable.window_s`).
"""

from __future__ import annotations

import csv
import gzip
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foretell.accuracy.aiconfigurator import read_table
from foretell.accuracy.measured import Measured
from foretell.cost.calibration import Calibration
from foretell.cost.energy import Activity, Power, activity_of, energy_of, power_of, sustained_clock, throttle
from foretell.cost.model import CostModel, Step
from foretell.errors import InputError
from foretell.hardware import Device, device

Floats = npt.NDArray[np.float64]

_REPLAYS = 3000  # at most
_MATCHING = {"gemm": ("gemm_dtype",), "encoder_attention": ("attn_dtype",)}  # what `read_table` splits a table by
_L2_HELD = 0.8  # share of the L2 cache that operands of repeated calls may fill and stay


@dataclass(frozen=True, slots=True)
class PowerTable:
    """Watts beside a table of operator times. `window_s` is how long power was read for, `copies` of layers taken in
    turn: what of the operands stays in L2 between calls depends on it.
    """

    measured: Measured
    power_w: Floats
    limit_w: Floats
    window_s: Floats
    copies: int

    def __len__(self) -> int:
        return len(self.power_w)

    def predicted_w(
        self, model: CostModel, *, measured_times: bool = True, calibration: Calibration | None = None
    ) -> tuple[Floats, Floats]:
        """Steady watts of each operator, and the share of it that is arithmetic.

        With `measured_times`, work is done at the pace that was measured, else at the pace that `model` predicts.
        """
        m = self.measured
        times = model.op_times(m.program, m.device, m.settings)
        table = m.program.table
        moved = table.bytes_read + table.bytes_written
        kept = self.copies * moved < _L2_HELD * (m.device.l2_bytes or 0)
        time = m.measured_s if measured_times else times.busy_s
        times = replace(times, details={**times.details, "dram_bytes": np.where(kept, 0.0, moved)})
        step = Step(float(time.sum()), time, np.zeros(len(time)), 0.0)
        power = power_of(m.device, calibration)
        if power is None:
            raise InputError("its TDP is unknown", m.device.name, "add `tdp` to its TOML file")
        activity = activity_of(power, m.device, m.program, times, step)
        core, memory = activity.core_j / time, np.minimum(activity.memory_j / time, 0.5 * self.limit_w)
        drawn = np.empty(len(time))
        for i, (core_w, memory_w, limit) in enumerate(zip(core, memory, self.limit_w, strict=True)):
            v = float(power.voltage(power.settled(core_w, memory_w, limit)))
            drawn[i] = min(limit, power.idle_w + power.leakage_w * v + core_w * v * v + memory_w)
        return drawn, np.minimum(1.0, core / drawn)


def read_power(path: Path) -> list[PowerTable]:
    """One power table of AIConfigurator, split by number format. Raises InputError naming what is malformed."""
    with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    kind = path.name.removesuffix(".csv.gz").split("__")[-1]
    formats = np.array([row.get(_MATCHING.get(kind, ("kv_cache_dtype",))[0], "") for row in rows])
    power = _column(rows, "power", path.name, 1.0, 1e4)
    limit = _column(rows, "power_limit", path.name, 1.0, 1e4)
    result = []
    for measured, name in zip(read_table(path), sorted(set(formats)), strict=True):
        mine = formats == name
        copies = 6 if kind == "gemm" and name in ("bfloat16", "float16", "fp8") else 1
        result.append(PowerTable(measured, power[mine], limit[mine], _REPLAYS * copies * measured.measured_s, copies))
    return result


def power_tables(root: Path) -> list[PowerTable]:
    """All power tables of matrix products and attention in the data folder."""
    files = sorted((root / "aiconfigurator" / "power").glob("*.csv.gz"))
    return [one for path in files if re.search("gemm|attention", path.name) for one in read_power(path)]


@dataclass(frozen=True, slots=True)
class Response:
    """Time and energy of one workload as a card is slowed down, relative to the first setting, the fastest.

    `setting` is watts of power limit or Hz of clock, descending; `knob` says which. `power_w` is the average at the
    first. `dense` work is matrix products throughout.
    """

    name: str
    device: Device
    knob: str
    setting: Floats
    time: Floats
    energy: Floats
    power_w: float
    dense: bool
    source: str


def zeus(root: Path) -> list[Response]:
    """Zeus's training under power limits: whole epochs, and windows of a fixed number of steps."""
    cards = {"a40": "a40", "v100": "v100-pcie-16gb", "p100": "p100-pcie-16gb", "rtx6000": "quadro-rtx-6000"}
    result = []
    for path in sorted((root / "zeus").glob("summary_power_*.csv")):
        name = path.stem.rsplit("_", 1)[-1]
        if name not in cards:
            raise InputError(f"card {name!r} is not known", path.name, f"known: {', '.join(cards)}")
        rows = _rows(path)
        limit, time, power = (
            _column(rows, c, path.name, 1e-6, 1e7) for c in ("power_limit", "time_per_epoch", "average_power")
        )
        key = [f"{r['network']} {r['dataset']} {r['batch_size']} {r['optimizer']}" for r in rows]
        for one, index in _groups(key):
            i = index[np.argsort(-limit[index])]
            result.append(_response(one, device(cards[name]), "limit", limit[i], time[i], power[i], False, path.name))
    for path in sorted((root / "zeus" / "profile_data").glob("*.csv")):
        card, network, gpus = path.stem.split("+")
        rows = _rows(path)
        limit = np.array([float(row["window_name"].rsplit("_", 1)[-1]) for row in rows])
        time = _column(rows, "elapsed_time", path.name, 1e-6, 1e7)
        energies = [_column(rows, c, path.name, 0.0, 1e9) for c in rows[0] if c.endswith("_energy")]
        i = np.argsort(-limit)
        power = np.mean(energies, axis=0) / time
        where = device(cards[card.lower()])
        result.append(_response(f"{network} {gpus}", where, "limit", limit[i], time[i], power[i], False, path.name))
    return result


def perseus(root: Path) -> list[Response]:
    """Perseus's pipeline stages (GPT-3 175B, BLOOM, bf16) at each locked clock."""
    cards = {"a100_sxm": "a100-sxm4-80gb", "a40": "a40"}
    result = []
    for path in sorted((root / "zeus" / "perseus_sosp24_stage_profile").glob("*.csv")):
        workload, card = path.stem.removesuffix("_bf16").split("+")
        if card not in cards:
            raise InputError(f"card {card!r} is not known", path.name, f"known: {', '.join(cards)}")
        rows = _rows(path)
        clock = 1e6 * _column(rows, "frequency", path.name, 100.0, 5000.0)
        time, energy = _column(rows, "time", path.name, 1e-6, 1e4), _column(rows, "energy", path.name, 1e-6, 1e6)
        for one, index in _groups([f"{workload} {row['stage']} {row['instruction']}" for row in rows]):
            i = index[np.argsort(-clock[index])]
            where = device(cards[card])
            result.append(_response(one, where, "clock", clock[i], time[i], energy[i] / time[i], True, path.name))
    return result


def dvfs(root: Path) -> list[Response]:
    """Caffe on older cards at each core clock, memory at its own (dlbench-dvfs); clocks given as offsets are left."""
    cards = {"gtx1080Ti": "gtx-1080-ti", "gtx980": "gtx-980"}
    result = []
    for path in sorted((root / "dlbench-dvfs" / "caffe").glob("*.csv")):
        name = path.stem.split("-")[0]
        if name not in cards:
            continue
        rows = _rows(path)
        core, memory = (np.array([float(row[c]) for row in rows]) for c in ("coreF", "memF"))
        time, power = _column(rows, "time/s", path.name, 1e-6, 1e4), _column(rows, "power/W", path.name, 1.0, 1e4)
        kept = np.flatnonzero((memory == memory.max()) & (core > 100))
        i = kept[np.argsort(-core[kept])]
        if len(i) > 1:
            where = device(cards[name])
            result.append(_response(path.stem, where, "clock", 1e6 * core[i], time[i], power[i], False, path.name))
    return result


@dataclass(frozen=True, slots=True)
class Shape:
    """What the workloads behind a response are made of, as far as their tables leave it open.

    `share` is that of arithmetic in the time of ordinary training. `traffic` is time of DRAM over time of arithmetic of
    dense work where the ridge is 100 FLOP/byte and the L2 cache 1 MiB; it grows with the ridge and falls with the root
    of the cache, as traffic of blocked products does (Hong and Kung 1981).
    """

    share: float
    traffic: float

    def of(self, response: Response) -> float:
        """Share of arithmetic in the time at boost clock."""
        if not response.dense:
            return self.share
        ridge = response.device.ridge("bf16") or response.device.ridge("fp16") or 100.0
        cache = (response.device.l2_bytes or 2**20) / 2**20
        return float(1.0 / (1.0 + self.traffic * ridge / 100.0 / np.sqrt(cache)))


#: Fitted with the constants of ``calibrations/energy.json`` (`benchmarks/energy.py --fit`).
SHAPE = Shape(share=0.744, traffic=1.46)
_LIMITED = 0.93  # of its limit: a card that draws this much is held back by it


def predicted(response: Response, calibration: Calibration, shape: Shape = SHAPE) -> tuple[Floats, Floats]:
    """Time and energy at each setting over those at the first, given the average power at the first.

    Dense work is taken to draw the limit there; a card that measures more than its sheet's TDP has that for a limit.
    """
    sheet = response.device.tdp_w or 0.0
    power = power_of(replace(response.device, tdp_w=max(sheet, response.power_w)), calibration)
    assert power is not None
    held = response.dense or response.power_w > _LIMITED * power.limit_w
    clock = sustained_clock(response.device, calibration) if held else 1.0
    activity = _activity(power, response, shape.of(response), clock)
    boost = response.device.boost_clock_hz or float(response.setting[0])
    time, energy = np.empty(len(response.setting)), np.empty(len(response.setting))
    for i, value in enumerate(response.setting):
        limit, locked = (value, None) if response.knob == "limit" else (None, min(1.0, value / boost))
        settled = throttle(power, activity, limit, locked, assumed=clock)
        seconds = activity.time_s(settled.scale, settled.memory_slowdown)
        time[i], energy[i] = seconds.sum(), energy_of(power, activity, settled, seconds).sum()
    return time / time[0], energy / energy[0]


def _activity(power: Power, response: Response, share: float, clock: float) -> Activity:
    """One second of work at `clock`: arithmetic, then DRAM traffic, drawing what was measured on average."""
    compute = share / clock
    compute /= compute + 1.0 - share
    voltage = float(power.voltage(clock))
    drawn = power.limit_w if response.dense else response.power_w
    dynamic = max(0.02 * power.limit_w, drawn - power.idle_w - power.leakage_w * voltage)
    bandwidth = response.device.memory_bandwidth_bytes_per_s or 0.0
    memory = min(0.5 * dynamic, (1.0 - compute) * bandwidth * power.dram_j_per_byte)
    return Activity(
        compute_s=np.array([compute, 0.0]),
        memory_s=np.array([0.0, 1.0 - compute]),
        fixed_s=np.zeros(2),
        core_j=np.array([(dynamic - memory) / voltage**2, 0.0]),
        memory_j=np.array([0.0, memory]),
    )


def _response(
    name: str, where: Device, knob: str, setting: Floats, time: Floats, power: Floats, dense: bool, source: str
) -> Response:
    relative, energy = time / time[0], time * power / (time[0] * power[0])
    return Response(name, where, knob, setting, relative, energy, float(power[0]), dense, source)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise InputError("holds no rows", path.name, "use the table as published")
    return rows


def _column(rows: list[dict[str, str]], name: str, where: str, least: float, most: float) -> Floats:
    """A column of numbers in a range. Raises InputError naming the row (the header being row 1)."""
    if not rows or name not in rows[0]:
        raise InputError(f"lacks the column {name!r}", where, "use the table as published")
    result = np.empty(len(rows))
    for i, row in enumerate(rows):
        try:
            result[i] = float(row[name])
        except (TypeError, ValueError):
            result[i] = np.nan
        if not least <= result[i] <= most:
            raise InputError(f"{name} is {row[name]!r}, not from {least:g} to {most:g}", f"{where}:{i + 2}")
    return result


def _groups(keys: list[str]) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    index: Mapping[str, list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        index[key].append(i)
    for key, rows in index.items():
        if len(rows) > 1:
            yield key, np.array(rows)
