"""One predicted training step as one HTML file that opens offline: tables and bars, no script."""

from __future__ import annotations

from foretell.plan.training.predicted import PredictedStep
from foretell.plan.training.why import NAMES
from foretell.report.html.page import Fact, Part, environment, versions
from foretell.report.text import count, rate, share
from foretell.report.training import degrees, money, settings, shared_ports
from foretell.report.training_step import counted, interval_text
from foretell.simulate.training.memory import PARTS as MEMORY_PARTS
from foretell.units import format_bytes, format_count, format_energy, format_money, format_time

__all__ = ["step_page"]


def step_page(found: PredictedStep, command: str) -> str:
    """The page's text. Everything from outside is escaped; nothing is loaded."""
    one, memory = found.candidate, found.memory
    most = memory.capacity_bytes or float(memory.peak_bytes.max())
    names = [part for part in MEMORY_PARTS if memory[part].max() > 0]
    return environment().get_template("step.html").render(
        title=f"llm:{found.config.name} · training on {found.cluster.name}",
        workload=f"llm:{found.config.name}",
        where=found.cluster.name,
        settings=[text for text in (
            f"{format_count(found.config.parameters)} parameters", count(found.plan.devices, "device"),
            *degrees(found.plan), *settings(found.plan), found.plan.framework,
        ) if text],
        facts=_facts(found),
        parts=[
            Part(NAMES[name], value / one.time_s, share(value / one.time_s), format_time(value))
            for name, value in one.parts.items() if value > 0
        ],
        hidden=f"{format_time(one.exposed_s)} of communication exposed, {share(one.exposed_s / one.time_s)} of the "
               f"step; {format_time(one.hidden_s)} hidden behind compute.",
        excess=found.excess,
        stages=[
            Part(f"stage {rank}" if len(memory) > 1 else "each device", peak / most, share(peak / most),
                 format_bytes(peak))
            for rank, peak in enumerate(map(float, memory.peak_bytes))
        ],
        memory_columns=names,
        memory_rows=[
            {"name": f"stage {rank}" if len(memory) > 1 else "each device",
             "cells": [f"{float(memory[part][rank]) / 2**30:.2f}" for part in names]}
            for rank in range(len(memory))
        ],
        command=command,
        notes=[interval_text(found), *found.notes, *shared_ports(found.cluster)],
        versions=versions(),
    )  # fmt: skip


def _facts(found: PredictedStep) -> list[Fact]:
    one, memory = found.candidate, found.memory
    capacity = memory.capacity_bytes
    room = "capacity unknown" if capacity is None else f"of {format_bytes(capacity)} on the fullest device"
    low, high = found.interval_s
    facts = [
        Fact("Step", format_time(one.time_s), (f"80 %: {format_time(low)} to {format_time(high)}",)),
        Fact("Rate", f"{rate(one.tokens_per_s)} tok/s", (f"{rate(one.tokens_per_s_per_device)} a GPU",)),
        Fact("MFU", share(one.mfu), (counted(found),)),
        Fact("Memory", format_bytes(one.memory_bytes), (room,)),
        Fact("Cost", "unknown" if one.cost_usd is None else f"{format_money(one.cost_usd)} a step",
             () if one.energy_j is None else (f"{format_energy(one.energy_j)} (devices)",)),
    ]  # fmt: skip
    if found.tokens is not None:
        run = one.run(found.tokens)
        lines = [f"{run.device_hours:,.0f} GPU-hours", "cost unknown" if run.cost_usd is None else money(run.cost_usd)]
        facts.append(Fact(f"{format_count(found.tokens)} tokens", f"{run.time_s / 86400:,.1f} days", tuple(lines)))
    return facts
