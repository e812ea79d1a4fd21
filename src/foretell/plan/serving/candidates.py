"""Which of the plans that the closed form has looked at are worth simulating, and in which order.

Plans that differ in token budget and sequences only are one shape: what they hold up is much the same, and the closed
form tells them apart less surely than the simulator does. So shapes come in order of what they cost, each with its
settings in order of what they hold up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretell.plan.serving.options import Option
from foretell.plan.serving.space import shape

__all__ = ["cost", "ranked", "runners_up"]

NEAR = 0.15  # what a setting may hold up less than the best, by the closed form, and still be simulated
RUNNERS = 5  # of one shape


def cost(option: Option, objective: str) -> float:
    """What a unit costs in the objective's measure; infinite where that is unknown."""
    if objective == "energy" and option.power_w is None:
        return float("inf")
    if objective == "cost" and option.usd_per_h is None:
        return float("inf")
    return option.cost(objective)


def ranked(
    options: Sequence[Option], objective: str, rate: float
) -> tuple[list[tuple[Option, ...]], list[tuple[Option, ...]]]:
    """Shapes of plans of a GPU type, those that serve every size and those that serve some, each with the most
    promising first; a shape is its plans, the best setting first.

    Those for every size begin with the cheapest for any large load that is not split in prefill and decode, then those
    cheapest for `rate` in whole units, then those cheapest for any large load; the others follow in this last order.
    """

    def large(one: Option) -> tuple[float, float]:
        return cost(one, objective) / one.rate, cost(one, objective)

    def whole(one: Option) -> tuple[float, float]:
        return float(np.ceil(rate / one.rate - 1e-9)) * cost(one, objective), cost(one, objective) / one.rate

    shapes: dict[object, list[Option]] = {}
    for one in sorted(options, key=lambda one: (-one.share, large(one))):
        shapes.setdefault(shape(one.plan), []).append(one)
    groups = sorted((tuple(found) for found in shapes.values()), key=lambda group: large(group[0]))
    full = [group for group in groups if group[0].share == 1]
    part = [group for group in groups if group[0].share < 1]
    together = [group for group in full if not group[0].plan.prefill_replicas][:1]
    first = [*together, *sorted(full, key=lambda group: whole(group[0]))[:2], *full]
    wide = sorted(part, key=lambda group: -group[0].share)[:1]  # sorting keeps the cheaper of equal ones first
    return _once(first), _once([*wide, *part])


def _once(groups: Sequence[tuple[Option, ...]]) -> list[tuple[Option, ...]]:
    """Each shape where it comes first."""
    return list({group[0].plan: group for group in groups}.values())


def runners_up(group: Sequence[Option], near: bool) -> list[Option]:
    """The settings of a shape to simulate besides its best: those `near` it by the closed form.

    Or, where it fails at the lowest rates, those of another token budget: sequences are few there, and how many more
    may run changes nothing.
    """
    best = group[0]
    if near:
        return [one for one in group[1:] if one.share == best.share and one.rate >= (1.0 - NEAR) * best.rate][:RUNNERS]
    budgets = {one.plan.max_num_batched_tokens: one for one in reversed(group)}  # the best of each
    return [one for one in group[1:] if budgets[one.plan.max_num_batched_tokens] is one][:RUNNERS]
