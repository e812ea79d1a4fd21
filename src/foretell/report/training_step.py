"""The card of one predicted training step."""

from __future__ import annotations

from rich.console import RenderableType

from foretell.plan.training.predicted import PredictedStep
from foretell.report.training import plan_card, shared_ports
from foretell.units import format_bytes, format_time

__all__ = ["counted", "interval_text", "step_card"]


def step_card(found: PredictedStep) -> RenderableType:
    """The whole of a predicted step, for `rich.print`."""
    missing = float(found.memory.peak_bytes.max()) - (found.memory.capacity_bytes or 0)
    excess = (f"this plan cannot run: {format_bytes(missing)} too many on the fullest device",) if found.excess else ()
    return plan_card(
        found.config, found.plan, found.cluster, found.step, found.memory, tokens=found.tokens,
        notes=(*excess, *found.notes, *shared_ports(found.cluster)),
        interval=interval_text(found), counted=counted(found),
    )  # fmt: skip


def interval_text(found: PredictedStep) -> str:
    """The interval of the step's time, and what it rests on."""
    low, high = found.interval_s
    return f"80 % interval {format_time(low)} to {format_time(high)}; {found.basis}"


def counted(found: PredictedStep) -> str:
    """What of attention the FLOP count, in words."""
    return "attention in full" if found.full_flops else "causal half of attention"
