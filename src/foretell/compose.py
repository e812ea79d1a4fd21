"""Several estimates in turn as one answer: a pipeline of models, each run a number of times, on one device.

>>> import foretell
>>> step = foretell.predict("llm:gpt2", on="l4", batch=1, seq_len=64)
>>> total = pipeline([Part("once", step), Part("again", step, times=3)])
>>> total.flops == 4 * step.flops
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foretell.cost.estimate import Estimate
from foretell.errors import InputError


@dataclass(frozen=True, slots=True)
class Part:
    """One model of a pipeline: the estimate of one run, and how many times it runs."""

    name: str
    estimate: Estimate
    times: int = 1


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Parts run one after another on one device.

    `time_interval_s` adds the ends of the parts' intervals, as if all erred the same way. `peak_bytes` is that of
    `peak_part` alone: no part's weights stay while another runs. `energy_j` and `cost_usd` are None where a part's are.
    """

    parts: tuple[Part, ...]
    device: str
    time_s: float
    time_interval_s: tuple[float, float]
    flops: int
    peak_bytes: int
    peak_part: str
    energy_j: float | None
    cost_usd: float | None


def pipeline(parts: Sequence[Part]) -> Pipeline:
    """Add up `parts`. InputError where there are none, where one runs less than once, or where devices differ."""
    if not parts:
        raise InputError("a pipeline has no parts: give at least one Part(name, estimate, times)")
    for part in parts:
        if part.times < 1:
            raise InputError(f"part {part.name!r} runs {part.times} times: give 1 or more")
    devices = sorted({part.estimate.device for part in parts})
    if len(devices) > 1:
        raise InputError(f"parts are on different devices ({', '.join(devices)}): predict all on one")
    largest = max(parts, key=lambda part: part.estimate.memory.peak_bytes)
    return Pipeline(
        parts=tuple(parts),
        device=devices[0],
        time_s=math.fsum(part.times * part.estimate.time_s for part in parts),
        time_interval_s=(
            math.fsum(part.times * part.estimate.time_interval_s[0] for part in parts),
            math.fsum(part.times * part.estimate.time_interval_s[1] for part in parts),
        ),
        flops=sum(part.times * part.estimate.flops for part in parts),
        peak_bytes=largest.estimate.memory.peak_bytes,
        peak_part=largest.name,
        energy_j=_total([(part.times, part.estimate.energy_j) for part in parts]),
        cost_usd=_total([(part.times, part.estimate.cost_usd) for part in parts]),
    )


def _total(terms: Sequence[tuple[int, float | None]]) -> float | None:
    known = [times * value for times, value in terms if value is not None]
    return math.fsum(known) if len(known) == len(terms) else None
