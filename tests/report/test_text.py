import io
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from foretell.report.text import Bar, Flow, Framed, not_counted_text, rate, share, shorten, singular, tail

Printed = Callable[..., str]


@given(st.floats(0, 1), st.integers(1, 60), st.booleans())
def test_a_bar_fills_its_track_in_proportion(part: float, width: int, ascii_only: bool) -> None:
    filled, rest = Bar(part).text(width, ascii_only)
    assert len(filled) + len(rest) == width
    assert abs(len(filled) - part * width) <= 1


@pytest.mark.parametrize(
    ("part", "drawn"),
    [
        *((0.0, "········"), (0.5, "━━━━····"), (1.0, "━━━━━━━━")),
        *((0.3125, "━━╸·····"), (1e-6, "╸·······"), (1.2, "━━━━━━━▶")),
    ],
)
def test_a_bar_by_eye(part: float, drawn: str, printed: Printed) -> None:
    assert printed(Bar(part, width=8)).rstrip("\n") == drawn


def test_a_bar_without_unicode() -> None:
    class Ascii(io.StringIO):
        encoding = "ascii"  # type: ignore[assignment]

    out = Ascii()
    Console(file=out, width=20).print(Bar(0.5, width=8))
    assert out.getvalue().strip() == "####...."


def test_a_bar_of_what_is_not_a_number_is_empty() -> None:
    assert Bar(math.nan).text(4) == ("", "····")


def test_parts_break_only_between_parts(printed: Printed) -> None:
    flow = Flow("activations 3 GiB", "parameters 1 GiB", "framework 1 GiB")
    assert printed(flow, 40).splitlines() == ["activations 3 GiB · parameters 1 GiB", "framework 1 GiB"]


def test_empty_parts_leave_no_dot(printed: Printed) -> None:
    assert printed(Flow("a", None, "", "b")).strip() == "a · b"


@given(st.lists(st.text("ab ", min_size=1, max_size=12), min_size=1, max_size=12), st.integers(12, 60))
def test_a_flow_keeps_every_part_and_the_width(parts: list[str], width: int) -> None:
    lines = Flow(*parts).lines(width)
    assert " · ".join(line.plain for line in lines) == " · ".join(parts)
    assert all(line.cell_len <= width for line in lines)


def test_a_frame_is_drawn_on_a_terminal_only(printed: Printed) -> None:
    on_terminal = printed(Framed("title", "body", "foot"), terminal=True)
    assert on_terminal.startswith("╭─ title ─")
    assert "│  body" in on_terminal
    piped = printed(Framed("title", "body", "foot"))
    assert piped.splitlines() == ["title", "", "body", "", "foot"]


def test_a_frame_stays_within_its_limit(printed: Printed) -> None:
    lines = printed(Framed("t" * 300, "b", "f" * 300), width=200, terminal=True).splitlines()
    assert {len(line) for line in lines} == {100}


def test_shares_and_rates() -> None:
    assert share(math.nan) == "unknown"
    assert share(0.0995) == "10 %"
    assert share(0.09949) == "9.9 %"
    assert rate(math.inf) == "unknown"
    assert rate(99.96) == "100"


def test_names() -> None:
    assert [singular(n) for n in ("images", "tokens", "queries", "loss", "batch")] == [
        *("image", "token", "query", "loss", "batch")
    ]
    assert tail("a.b.c", 10) == "a.b.c"
    assert shorten("abcdef", 4) == "abc…"


def test_what_is_not_counted_reads_as_a_sentence() -> None:
    assert not_counted_text({"aten.foo.default": 3, "data loading": 0}) == (
        "arithmetic of aten.foo.default ×3; data loading"
    )
    assert not_counted_text({"data loading": 0, "input copies": 0}) == "data loading; input copies"
