from collections.abc import Callable
from types import MappingProxyType

import pytest

from foretell.claims import VERDICTS, Claim, Claimed, Equal, Obtained, Record, Source
from foretell.report import claims_in_full, claims_table
from foretell.report.ledger import _STYLES

Printed = Callable[..., str]

SOURCE = Source("Doe: A Network", 2020, "ICML", "table 1")


def claim(name: str, obtained: float | None, **changes: object) -> Claim:
    """100 is claimed; within 1 % is reproduced, within 3 % partly."""
    got = None if obtained is None else Obtained(f"{obtained:g} M", obtained)
    values = {
        "id": f"net/{name}",
        "system": "net",
        "title": f"Parameters of {name}",
        "source": SOURCE,
        "metric": "parameters",
        "claimed": Claimed("100 M", 100.0),
        "setting": "1000 classes",
        "rule": Equal(0.01),
        "how": "measured here" if got else "not tried",
        "obtained": got,
        **changes,
    }
    return Claim(**values)  # type: ignore[arg-type]


CLAIMS = (claim("a", 100.0), claim("b", 102.0), claim("c", 110.0), claim("d", None, system="other", id="other/d"))


def cells(text: str, start: str) -> list[str]:
    row = next(line for line in text.splitlines() if line.startswith(start))
    return [cell.strip() for cell in row.split("  ") if cell.strip()]


def test_a_row_for_each_claim_under_its_system(printed: Printed) -> None:
    text = printed(claims_table(CLAIMS), 120)
    assert cells(text, "claim") == ["claim", "claimed", "obtained", "verdict"]
    assert cells(text, "  a") == ["a", "Parameters of a", "100 M", "100 M, measured here", "reproduced"]
    assert cells(text, "  b")[-1] == "partly"
    assert cells(text, "  c")[-1] == "not reproduced"
    assert cells(text, "  d") == ["d", "Parameters of d", "100 M", "not tried"]
    lines = [line.strip() for line in text.splitlines()]
    assert lines.index("net") < lines.index("other")
    assert lines[-1] == "4 claims of 2 systems: 1 reproduced, 1 partly, 1 not reproduced, 1 not tried"


def test_a_narrow_table_leaves_titles_to_the_full_view(printed: Printed) -> None:
    text = printed(claims_table(CLAIMS), 80)
    assert cells(text, "  a") == ["a", "100 M", "100 M, measured here", "reproduced"]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_long_texts_wrap(printed: Printed, width: int) -> None:
    words = Claimed("100 M, in words that take more than one line of their column " * 2, 100.0)
    text = printed(claims_table((claim("a-claim-with-a-long-name", 110.0, claimed=words),)), width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= min(width, 150)
    assert "…" not in text
    for word in ("a-claim-with-a-long-name", "column", "measured", "not reproduced"):
        assert word in text


def test_a_claim_in_full(printed: Printed) -> None:
    record = Record("2026-05-01", MappingProxyType({"torch": "2.9"}), "foretell claims net/a --run", 1.5)
    text = printed(claims_in_full((claim("a", 100.0, note="A note.", record=record),)), 120)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[:2] == ["Parameters of a", "net/a"]
    for line in (
        "Source Doe: A Network, ICML 2020, table 1",
        "Setting 1000 classes",
        "Metric parameters",
        "Claimed 100 M",
        "Obtained 100 M, measured here",
        "Verdict reproduced: reproduced within 1.00% of the claimed value, partly within 3.00%",
        "Note A note.",
        "Obtained on 2026-05-01 in 1.5 s; torch 2.9",
        "By foretell claims net/a --run",
    ):
        assert line in lines


def test_what_was_not_tried_says_so_in_full(printed: Printed) -> None:
    lines = [" ".join(line.split()) for line in printed(claims_in_full((claim("d", None),)), 120).splitlines()]
    assert "Obtained not tried" in lines
    assert not any(line.startswith(("Note", "By")) for line in lines)


def test_every_verdict_has_its_colour() -> None:
    assert set(_STYLES) == set(VERDICTS)
