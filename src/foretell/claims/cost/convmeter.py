"""ConvMeter: a linear model of the time of convolutional networks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import AtMost

SYSTEM = "convmeter"
SHARE = 7  # every so-many-th workload of the tables


def _source(place: str) -> Source:
    return Source(
        "Beringer, Stock, Mazaheri, Wolf: Dissecting Convolutional Neural Networks for Runtime and Scalability"
        " Prediction",
        2024,
        "ICPP",
        place,
    )


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: where it was made, the terms of its forward, backward and update, and how long it took."""

    slice: str
    device: str
    condition: str
    family: str
    workload: str
    forward: Any
    backward: Any
    update: Any
    measured_s: float

    @property
    def columns(self) -> Any:
        """What the time is linear in."""
        import numpy as np

        if not self.backward[-1]:
            return np.array(self.forward)
        # A step's time does not tell its passes apart: both have the same coefficients, and there is one constant.
        return np.concatenate([self.forward[:-1] + self.backward[:-1], self.forward[-1:], self.update])


def cases(mode: str, share: int = SHARE, store: Any = None) -> Iterator[Case]:
    """Measurements of timm's tables (Apache-2.0) of networks with convolutions, of every `share`-th workload."""
    import numpy as np

    from foretell.accuracy.programs import Store
    from foretell.accuracy.slices import data_folder, slices
    from foretell.cost.convmeter import features
    from foretell.errors import CaptureError
    from foretell.graph import KINDS
    from foretell.hardware import device
    from foretell.workload.cache import folder as cache_folder

    data = data_folder()
    if store is None:
        kept = cache_folder()
        store = Store(None if kept is None else kept / "programs")
    for table in slices().values():
        if not table.name.startswith(f"timm-{mode}") or not table.present(data):
            continue
        layout = ".channels_last" if table.conditions["layout"] == "nhwc" else ""
        on = device(table.device)
        for row in table.read(data):
            if zlib.crc32(row.workload.encode()) % share:
                continue
            try:
                programs = store.get(row.workload, **row.options)
            except CaptureError:
                continue
            program, settings = programs.at(row.batch, table.runtime), programs.settings[table.runtime]
            convolution = program.table.kind == KINDS.index("convolution")
            macs = program.table.macs * program.table.repeat
            if macs[convolution].sum() < 0.5 * macs.sum():  # a convolutional network
                continue
            of = features(program, on, settings)
            yield Case(
                table.name,
                on.name,
                f"{settings.mode}.{table.runtime}{layout}",
                programs.family,
                row.workload,
                of.totals(program.table.repeat, False),
                of.totals(program.table.repeat, True),
                np.array([of.weights.sum()]),
                row.measured_s,
            )


def held_out(found: list[Case]) -> list[tuple[Case, float]]:
    """Each case with its time by coefficients of its table's other families."""
    import numpy as np

    from foretell.cost.convmeter import least_squares

    result = []
    for name in dict.fromkeys(case.slice for case in found):
        own = [case for case in found if case.slice == name]
        columns, measured = np.array([case.columns for case in own]), np.array([case.measured_s for case in own])
        families = np.array([case.family for case in own])
        for family in dict.fromkeys(families.tolist()):
            out = families == family
            if (~out).sum() >= 2 * columns.shape[1]:  # else there is no telling
                predicted = columns[out] @ least_squares(columns[~out], measured[~out])
                result += list(zip([case for case in own if case.family == family], predicted.tolist(), strict=True))
    return result


def _error(mode: str, store: Any = None) -> Obtained:
    """Mean absolute error of networks whose family was held out, tables weighed alike."""
    import numpy as np

    from foretell.errors import InputError

    pairs = held_out(list(cases(mode, store=store)))
    if not pairs:
        raise InputError(f"no measurements of {mode}", "folder of measurements", "it needs timm/")
    by_table: dict[str, list[float]] = {}
    for case, predicted in pairs:
        by_table.setdefault(case.slice, []).append(abs(predicted / case.measured_s - 1.0))
    means = {name: float(np.mean(errors)) for name, errors in by_table.items()}
    every = np.concatenate([np.array(errors) for errors in by_table.values()])
    value = float(np.mean(list(means.values())))
    details: dict[str, float | str] = {**{k: round(v, 4) for k, v in means.items()}, "rows": float(len(every))}
    details["families"] = float(len({case.family for case, _ in pairs}))
    return Obtained(f"{value:.1%} (median {np.median(every):.1%})", value, details)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="convmeter/inference-error",
        system=SYSTEM,
        title="Inference time of convolutional networks, mean error",
        source=_source("abstract"),
        metric="mean absolute relative error",
        claimed=Claimed("less than 20 %", 0.20),
        setting="various ConvNets",
        rule=AtMost(),
        how="public data",
        run=lambda: _error("inference"),
        note="timm's inference tables (consumer GPUs, mixed precision), every seventh network, coefficients of each"
        " table from its other families",
    ),
    Claim(
        id="convmeter/training-error",
        system=SYSTEM,
        title="Training time of convolutional networks, mean error",
        source=_source("abstract"),
        metric="mean absolute relative error",
        claimed=Claimed("less than 18 %", 0.18),
        setting="various ConvNets, on one or more nodes",
        rule=AtMost(),
        how="public data",
        run=lambda: _error("train"),
        note="timm's training tables (one RTX 3090, mixed precision), every seventh network, coefficients of each"
        " table from its other families; several nodes are not in these tables",
    ),
)
