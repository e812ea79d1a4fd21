"""Advice for reading: findings, largest gain first; a transformer's products and better shapes."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from foretell.advise import Advice, Finding
from foretell.advise.transformer import Shapes, Violation
from foretell.report.text import Flow, count, shorten, tail
from foretell.units import format_bytes, format_count, format_time

__all__ = ["advice_view", "shapes_view"]

_PRODUCTS = 12
_MODULES = 24  # beyond these, naming a few tells nothing


def advice_view(advice: Advice, most: int = 8) -> RenderableType:
    """The `most` findings with the largest gains, each with its evidence and its paper."""
    estimate = advice.estimate
    low, high = estimate.time_interval_s
    head: list[RenderableType] = [
        Text(f"{estimate.workload} on {estimate.device}", style="bold"),
        Flow(
            f"{format_time(estimate.time_s)} per step ({format_time(low)} to {format_time(high)})",
            estimate.precision,
            estimate.runtime,
            f"{estimate.model} model",
        ),
        Text(""),
    ]
    shown = advice.findings[:most]
    if not shown:
        return Group(*head, Text(f"{count(len(advice.rules), 'rule')} checked; none would make it faster"))
    for place, finding in enumerate(shown, 1):
        head += _finding(place, finding, estimate.time_s)
    left = len(advice.findings) - len(shown)
    more = f" {left} smaller ones are left out (--most)." if left else ""
    note = f"Each gain is of that change alone: together they are less than their sum.{more}"
    return Group(*head, Text(note, style="dim"))


def _finding(place: int, finding: Finding, time_s: float) -> list[RenderableType]:
    low, high = finding.gain_interval_s
    upto = "at most " if finding.at_most else ""
    gain = f"gains {upto}{format_time(finding.gain_s)}, {finding.gain_s / time_s:.1%} of the step"
    where = ", ".join(tail(module, 36) for module in finding.modules[:3] if module)
    if len(finding.modules) > _MODULES:
        where = f"{len(finding.modules):,} modules"
    elif len(finding.modules) > 3:
        where += f" and {len(finding.modules) - 3} more"
    lines: list[RenderableType] = [
        Text(f"{place}. {finding.what}", style="bold"),
        Text(f"{gain} ({format_time(low)} to {format_time(high)})", style="green"),
        Text(f"→ {finding.advice}"),
        Text(", ".join(_number(name, value) for name, value in finding.evidence.items()), style="dim"),
    ]
    if where:
        lines.append(Text(f"in {where}", style="dim"))
    lines.append(Text(f"rule {finding.rule}: {finding.source}", style="dim"))
    return [lines[0], *(Padding(line, (0, 0, 0, 3)) for line in lines[1:]), Text("")]


def _number(name: str, value: float) -> str:
    label = name.replace("_", " ")
    if name.endswith("_s"):
        return f"{label[:-2]} {format_time(value)}"
    if "bytes" in name:
        return f"{label} {format_bytes(round(value))}"
    if "share" in name:
        return f"{label} {value:.0%}"
    return f"{label} {format_count(value)}" if value >= 1000 else f"{label} {value:.3g}"


def shapes_view(found: Shapes) -> RenderableType:
    """A transformer's products, the rules its shape breaks, and shapes nearby that train faster."""
    setting, estimate = found.setting, found.estimate
    alone = setting.tensor_parallel == 1
    lines: list[RenderableType] = [
        Text(f"training {found.config.name} on {estimate.device}", style="bold"),
        Flow(
            f"{count(setting.batch, 'sequence')} of {setting.seq_len:,} tokens",
            None if alone else f"tensor parallel {setting.tensor_parallel}",
            None if setting.stages == 1 else f"{setting.stages} pipeline stages",
            setting.precision,
            "fused attention" if setting.attention == "fused" else "attention as products",
        ),
        Flow(
            f"{format_count(found.config.parameters)} parameters",
            f"{found.tokens_per_s:,.0f} tokens/s" + ("" if alone else ", communication left out"),
        ),
        Text(""),
        _products(found),
        Text(""),
    ]
    if found.violations:
        lines += [Text("Rules it breaks", style="bold"), *(_violation(v) for v in found.violations), Text("")]
    lines += _better(found)
    return Group(*lines)


def _products(found: Shapes) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("product", no_wrap=True)
    for name in ("m×n×k", "aligned", "tile", "fill", "waves", "peak", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for p in found.products[:_PRODUCTS]:
        size = (f"{p.batch}·" if p.batch > 1 else "") + f"{p.m}×{p.n}×{p.k}"
        table.add_row(
            shorten(p.name, 14),
            size,
            str(p.alignment),
            "" if p.tile is None else f"{p.tile[0]}×{p.tile[1]}",
            "" if p.fill is None else f"{p.fill:.0%}",
            "" if p.waves is None else f"{p.waves:.1f}",
            f"{p.efficiency:.0%}",
            format_time(p.time_s),
        )
    return table


def _violation(v: Violation) -> Text:
    value = f"{v.value:,.0f}" if v.value == int(v.value) else f"{v.value:,.2f}"
    wants = "whole" if v.multiple == 1 else f"a multiple of {v.multiple}"
    return Text(f"· {v.size} is {value}, want {wants}: {v.why}")


def _better(found: Shapes) -> list[RenderableType]:
    tried = f"{count(found.tried, 'shape')} within {found.within:.0%} of the parameters"
    if not found.better:
        return [Text(f"None of {tried} trains faster.")]
    lines: list[RenderableType] = [Text(f"Better shapes, among {tried}", style="bold")]
    for shape in found.better:
        sizes = dict(shape.changes)
        if sizes.get("kv_heads") == sizes.get("heads"):  # each query has keys of its own
            sizes.pop("kv_heads", None)
        changes = ", ".join(f"{name.replace('_', ' ')} {old} → {new}" for name, (old, new) in sizes.items())
        lines += [
            Text(f"+{shape.gain:.1%}  {shape.tokens_per_s:,.0f} tokens/s", style="green"),
            Padding(Text(changes), (0, 0, 0, 3)),
        ]
        mended = {v.size for v in found.violations} - {v.size for v in shape.violations}
        if mended:
            lines.append(Padding(Text(f"keeps the rule on {', '.join(sorted(mended))}", style="dim"), (0, 0, 0, 3)))
    note = "Gains are of tokens/s at equal parameters. No measurement of misaligned rows is in them: see the rules."
    return [*lines, Text(""), Text(note, style="dim")]
