"""`Measured`: a table of measurements on one device, as one program whose rows fall into measurements."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from foretell.accuracy.programs import Programs
from foretell.accuracy.slices import Row, Slice
from foretell.cost.calibration import load
from foretell.cost.model import CostModel, OpTimes, Settings
from foretell.cost.program import Program
from foretell.errors import ForetellError
from foretell.graph import OpTable
from foretell.hardware import device as find_device
from foretell.hardware.device import Device

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ISSUED = ("graph", "step", "op", "call")


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurement i took `measured_s[i]` for rows ``starts[i]`` … ``starts[i + 1]`` of `program`.

    A table of single operators has ``starts = arange(n)``. `group` names what is held out together (a family, a
    shape). `issued` says how the measured work reached the device: ``graph`` (replayed, nothing waits for the host),
    ``step`` (one op after another by a host, running ahead), ``op`` (the host waits for each op, as a table that adds
    up ops measured apart) or ``call`` (one call between two events, launch gap included).
    `source` is the file it was read from, `label` what exactly each measurement was of, where that is worth a name.
    """

    name: str
    device: Device
    settings: Settings
    program: Program
    starts: Ints
    measured_s: Floats
    group: npt.NDArray[np.object_]
    issued: str
    source: str
    label: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.issued not in ISSUED:
            raise ValueError(f"issued is {self.issued!r}, not one of {ISSUED}")
        if not len(self.starts) == len(self.measured_s) == len(self.group):
            raise ValueError("starts, measured_s and group differ in length")

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def single(self) -> bool:
        """Whether every measurement is of one operation."""
        return len(self.starts) == len(self.program)

    def sample(self, limit: int) -> Measured:
        """`limit` of the measurements, drawn by a hash of their places in the table, so that any limit is fair."""
        if limit >= len(self):
            return self
        drawn = sorted(range(len(self)), key=lambda i: hashlib.sha256(f"{self.name} {i}".encode()).digest())[:limit]
        kept = np.array(sorted(drawn), dtype=np.int64)
        ends = np.append(self.starts[1:], len(self.program))
        parts = [np.arange(self.starts[i], ends[i]) for i in kept]
        return replace(
            self,
            program=_picked(self.program, np.concatenate(parts)),
            starts=np.concatenate([[0], np.cumsum([len(part) for part in parts])[:-1]]).astype(np.int64),
            measured_s=self.measured_s[kept],
            group=self.group[kept],
            label=tuple(self.label[i] for i in kept) if self.label else (),
        )

    def op_times(self, model: CostModel) -> OpTimes:
        """What `model` says of every operation."""
        from foretell.cost.kernel import Kernel
        from foretell.cost.learned import Learned

        if isinstance(model, Kernel | Learned):  # looks at whole steps, so it must know where each begins
            if self.single:
                return model.operator_times(self.program, self.device, self.settings)
            return model.step_times(self.program, self.device, self.settings, self.starts)
        return model.op_times(self.program, self.device, self.settings)

    def times(self, model: CostModel) -> Floats:
        """Seconds `model` predicts for each measurement."""
        return self.added(self.op_times(model))

    def predict(self, model: CostModel) -> tuple[Floats, Floats, Floats]:
        """Seconds `model` predicts for each measurement, and the ends of its 80 % interval."""
        times = self.op_times(model)
        seconds = self.added(times)
        ends = [times.details.get(f"interval_{end}") for end in ("low", "high")]
        if ends[0] is not None and ends[1] is not None:
            low, high = (end[self.starts] for end in ends if end is not None)
        else:
            step = model.step(self.program, times, self.settings)
            low, high, _ = model.interval(self.program, times, step, self.device, self.settings)
        return seconds, seconds * low, seconds * high

    def added(self, times: OpTimes) -> Floats:
        """Seconds of each measurement, given those of its operations."""
        repeat = self.program.table.repeat
        if self.issued == "op":
            return np.add.reduceat(np.maximum(times.busy_s, times.host_s) * repeat, self.starts)
        busy = np.add.reduceat(times.busy_s * repeat, self.starts)
        if self.issued == "graph":
            return busy
        if self.issued == "call":
            return busy + load("stream")["call.gap"]
        return np.maximum(busy, times.start_s + np.add.reduceat(times.host_s * repeat, self.starts))


_OWN = ("kernels", "issues", "group", "strided")  # columns of a program beside its table


def _picked(program: Program, rows: Ints) -> Program:
    """Those ops of a program, in that order."""
    table = program.table
    columns = {name: getattr(table, name)[rows] for name in table.__slots__}
    own = {name: getattr(program, name)[rows] for name in _OWN}
    return replace(Program.of(OpTable(**columns)), runtime=program.runtime, **own)


def compact(program: Program) -> Program:
    """Equal ops once, with how often in `repeat`; their order is lost, which sums over a step do not need."""
    table = program.table
    names = [f for f in table.__slots__ if f not in ("name", "module", "repeat")]
    columns = [np.asarray(getattr(table, f), dtype=np.float64) for f in names]
    columns += [program.kernels, program.issues, program.strided.astype(np.float64)]
    codes: dict[str, int] = {}
    columns.append(np.array([codes.setdefault(n, len(codes)) for n in table.name], dtype=np.float64))
    _, first, inverse = np.unique(np.stack(columns), axis=1, return_index=True, return_inverse=True)
    repeat = np.bincount(inverse.ravel(), weights=table.repeat)
    picked = {f: getattr(table, f)[first] for f in table.__slots__ if f != "repeat"}
    own = {f: getattr(program, f)[first] for f in _OWN}
    return replace(Program.of(OpTable(repeat=repeat, **picked)), runtime=program.runtime, **own)


def joined(parts: Iterable[Program], runtime: str) -> tuple[Program, Ints]:
    """Programs one after another as one, and the row each begins at."""
    parts = list(parts)
    own = {f: np.concatenate([getattr(p, f) for p in parts]) for f in _OWN}
    program = replace(Program.of(OpTable.concatenate([p.table for p in parts])), runtime=runtime, **own)
    return program, np.concatenate([[0], np.cumsum([len(p) for p in parts])[:-1]]).astype(np.int64)


def measured(entry: Slice, rows: Iterable[Row], get: Callable[[Row], Programs]) -> Measured | None:
    """Rows of a slice of whole steps; those whose capture fails, or is of another network, are left out."""
    parts, kept, families = [], [], []
    settings = None
    for row in rows:
        try:
            programs = get(row)
            if row.parameters and not row.parameters[0] <= programs.parameters <= row.parameters[1]:
                continue
            parts.append(compact(programs.at(row.batch, entry.runtime)))
        except ForetellError:
            continue
        kept.append(row)
        families.append(programs.family)
        settings = programs.settings[entry.runtime]
    if settings is None:
        return None
    program, starts = joined(parts, entry.runtime)
    return Measured(
        name=entry.name,
        device=find_device(entry.device),
        settings=settings,
        program=program,
        starts=starts,
        measured_s=np.array([row.measured_s for row in kept]),
        group=np.array(families, dtype=object),
        issued="step",
        source=entry.files[0],
        label=tuple(row.workload for row in kept),
    )
