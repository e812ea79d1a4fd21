"""The card of a serving plan: what stays where it is narrow, and who serves which sizes."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from foretell.plan.serving.load import INPUT_EDGES, OUTPUT_EDGES, Load
from foretell.plan.serving.melange import Mix
from foretell.plan.serving.options import Option, Survey
from foretell.plan.serving.search import Answer, Single, Unit
from foretell.report.serving_plan import serving_plan_view
from foretell.simulate.serving import Requests, ServingPlan
from foretell.simulate.serving.metrics import Slo
from foretell.workload import llm

CHECKED = {
    "attainment": 0.95, "attainment_low": 0.93, "attainment_high": 0.97, "ttft_p99_s": 0.31, "tpot_p99_s": 0.0275,
}  # fmt: skip
KINDS = (("h100-sxm", 6.88, ServingPlan()), ("a100-sxm4-80gb", 4.0, ServingPlan(tp=2)), ("l4", 0.8, ServingPlan()))


def answer(shares: Any, slo: Slo, checked: bool = True) -> Answer:
    """A mix for four sizes of requests, each share of eight slices; at most three GPU types."""
    load = Load.of([50, 50, 3000, 3000], [20, 700, 20, 700], [8.0, 8.0, 4.0, 4.0])
    slices = np.array(shares)
    rates = load.rate[:, None] * slices / 8
    options = tuple(
        Option(gpu, plan, gpu, plan.tp, usd, 300.0, 1.0, 12.0, 40.0, 0.02, 0.1, 1e3, 1e4, 4e3, "tpot", "", {})
        for gpu, usd, plan in KINDS[: slices.shape[1]]
    )
    units = tuple(
        Unit(option, 2, 1.5, float(rates[:, j].sum()), 0.6, float(load.output_tokens @ rates[:, j]), 24.0, "",
             CHECKED if checked else None, None)
        for j, option in enumerate(options)
    )  # fmt: skip
    count = len(options)
    mix = Mix(np.full(count, 2), slices, np.full(count, 1.5), 1.0, True)
    surveys = tuple(Survey(option.gpu, 1, (option,), (), "") for option in options)
    singles = tuple(
        Single(o.gpu, 20.0 + j, (("tp1", 3),), 3, attained=0.915 if checked else None) for j, o in enumerate(options)
    )
    requests = Requests.of(np.arange(4.0), [50, 50, 3000, 3000], [20, 700, 20, 700])
    return Answer(
        llm.config("opt-1.3b"), requests, load, np.arange(4), slo, 0.9, "cost", units, mix, options, singles, (),
        surveys, count, 9 if checked else 0, 0, 1, {}, {},
    )  # fmt: skip


def shown(found: Answer, width: int = 80) -> list[str]:
    """Lines of the card, none of them wider than the screen."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(serving_plan_view(found))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    return lines


def after(lines: list[str], heading: str) -> list[str]:
    """What stands below a heading, up to the next empty line."""
    rest = lines[lines.index(heading) + 1 :]
    return rest[: rest.index("")]


@pytest.mark.parametrize(("slo", "kept", "gone"), [
    (Slo(tpot_s=0.05), "TPOT p99", "TTFT p99"), (Slo(ttft_s=0.5), "TTFT p99", "TPOT p99"),
])  # fmt: skip
def test_what_has_a_limit_stays_longest(slo: Slo, kept: str, gone: str) -> None:
    found = answer([[8, 0], [8, 0], [0, 8], [0, 8]], slo)
    for width in (80, 70, 60, 56, 52):
        (head,) = [line for line in shown(found, width) if line.startswith("units ")]
        assert kept in head
        assert "in SLO" in head
        assert (gone in head) <= ("batch" in head)
        assert ("$/M tokens" in head) >= ("requests/s" in head)
    assert kept in head
    assert "$/M tokens" not in head


def test_rows_and_the_line_below_them_are_of_one_rate() -> None:
    lines = shown(answer([[8, 0], [8, 0], [0, 8], [0, 8]], Slo(tpot_s=0.05)), 120)
    rows = [re.split(r" {2,}", line) for line in lines[: lines.index("Who serves which sizes")] if line[:3] == "2x "]
    heads = re.split(r" {2,}", next(line for line in lines if line.startswith("units ")))
    table = [dict(zip(heads, row, strict=True)) for row in rows]
    # 16 and 8 requests/s, of 360 tokens each on average; each unit is three quarters full.
    (said,) = [float(x) for x in re.findall(r"\$([\d.]+) for a million output tokens", "\n".join(lines))]
    tokens = [float(row["requests/s"]) * 360 for row in table]
    spent = [float(row["$/M tokens"]) / 0.75 * each for row, each in zip(table, tokens, strict=True)]
    assert [row["full"] for row in table] == ["75 %", "75 %"]
    assert [row["batch"] for row in table] == ["24", "24"]
    assert sum(spent) / sum(tokens) == pytest.approx(said, rel=0.01)


def test_who_serves_which_sizes() -> None:
    slo = Slo(tpot_s=0.05)
    heading = "Who serves which sizes"
    plain = shown(answer([[8, 0], [8, 0], [2, 6], [2, 6]], slo))
    first, head, *rows = after(plain, heading)
    assert first == "Of each size 2x h100-sxm tp1 serves this share, 2x a100-sxm4-80gb tp2 the rest:"
    assert head.split() == ["tokens", "out:", "any"]
    assert [row.split() for row in rows] == [["≤", "2,048", "in", "100", "%"], [">", "2,048", "in", "25", "%"]]
    even = shown(answer([[3, 5]] * 4, slo))
    assert after(even, heading) == ["2x h100-sxm tp1 serves 37.5 % of the requests of every size."]
    three = after(shown(answer([[8, 0, 0], [0, 8, 0], [0, 4, 4], [8, 0, 0]], slo)), heading)
    assert [line for line in three if "serve" in line] == [
        "Of each size 2x h100-sxm tp1 serves this share:", "Of each size 2x a100-sxm4-80gb tp2 serves this share:",
        "2x l4 tp1 serves the rest.",
    ]  # fmt: skip
    assert three[1].split() == ["tokens", "out:", "≤", "512", ">", "512"]
    assert three[-1] == "How many tokens come out, a router has to predict."
    one = answer([[8], [8], [8], [8]], slo)
    assert heading not in shown(one)


@pytest.mark.parametrize("width", [45, 60, 80, 120])
def test_sizes_that_are_all_divided_otherwise(width: int) -> None:
    """Every cell of the grid of sizes has a share of its own: what does not fit is named, and nothing is cut."""
    inputs, outputs = (a.ravel() for a in np.meshgrid([*INPUT_EDGES, 100_000], [*OUTPUT_EDGES, 10_000]))
    first = np.arange(len(inputs)) % 7
    found = answer([[4, 4]] * 4, Slo(tpot_s=0.05))
    mix = replace(found.mix, slices=np.stack([first, 8 - first], axis=1))
    lines = after(shown(replace(found, load=Load.of(inputs, outputs), mix=mix), width), "Who serves which sizes")
    assert sum(line.endswith("%") for line in lines) == len(INPUT_EDGES) + 1
    assert ("left out for want of width" in " ".join(lines)) == (width < 80)


def test_a_plan_that_was_not_simulated_claims_nothing() -> None:
    slo = Slo(tpot_s=0.05)
    sure, open_ = (" ".join(shown(answer([[8, 0], [8, 0], [0, 8], [0, 8]], slo, checked))) for checked in (True, False))
    assert "Nothing was simulated: a plan by the closed form alone can fail the SLO in simulation." in open_
    assert "within the SLO when simulated" in sure
    for said in ("within the SLO", "in SLO", "p99", "no mix of types takes less"):
        assert said not in open_
    assert "Nothing was simulated" not in sure
    assert not re.search(r"\d%", sure + open_)
    mixed = answer([[8, 0], [8, 0], [0, 8], [0, 8]], slo)
    some = replace(mixed, units=(mixed.units[0], replace(mixed.units[1], checked=None)))
    assert "Not all of it was simulated" in " ".join(shown(some))


def test_other_types_are_named_only_where_they_were_asked_for() -> None:
    slo = Slo(tpot_s=0.05)
    both = answer([[8, 0], [8, 0], [0, 8], [0, 8]], slo)
    one = replace(both, units=both.units[:1])
    for found, said in (
        (both, " an hour, the least found."),
        (answer([[8]] * 4, slo), " an hour, the least found on h100-sxm."),
        (replace(one, singles=(both.singles[0], replace(both.singles[1], cost=None, reason="it is slow"))),
         "; no other GPU type of those asked for serves everything within TPOT ≤ 50 ms."),
    ):  # fmt: skip
        text = " ".join(" ".join(shown(found)).split())
        assert said in text
        assert ("no other GPU type" in text) == ("no other GPU type" in said)


def test_less_than_one_sequence_is_not_none() -> None:
    both = answer([[8, 0], [8, 0], [0, 8], [0, 8]], Slo(tpot_s=0.05))
    found = replace(both, units=tuple(replace(u, batch=b) for u, b in zip(both.units, (0.3, 1.1), strict=True)))
    lines = shown(found, 120)
    assert all(f" {said} " in line for said, line in zip(("< 1", "1"), after(lines, "")[1:3], strict=True))
    text = " ".join(" ".join(lines).split())
    assert "h100-sxm: < 1 sequence at a time when full; the closed form has up to 40, as" in text
    assert "a100-sxm4-80gb: 1 sequence at a time when full" in text
    assert "batch, TTFT p99 and full left out for want of width" in " ".join(shown(found, 70))


def test_each_type_alone_has_its_share_within_the_limits() -> None:
    table = after(shown(answer([[8, 0], [8, 0], [0, 8], [0, 8]], Slo(tpot_s=0.05))), "One GPU type alone")
    assert re.search(r"\$/h +the mix saves +in SLO$", table[0])
    assert all(line.endswith(" 91.5 %") for line in table[1:3])
