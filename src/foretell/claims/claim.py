"""`Claim`: what a paper reports, beside what we obtain and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from foretell.claims.rules import Rule

HOW: tuple[str, ...] = ("measured here", "measured on a GPU", "public data", "modelled", "not tried")
VERDICTS: tuple[str, ...] = ("reproduced", "partly", "not reproduced", "not tried")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a claim stands: the paper, and the place in it (abstract, table, section)."""

    paper: str
    year: int
    venue: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.paper}, {self.venue} {self.year}" + (f", {self.place}" if self.place else "")


@dataclass(frozen=True, slots=True)
class Claimed:
    """What the authors report: in words, and as a number in the claim's metric where they give one."""

    text: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Obtained:
    """What we obtain: in words, as a number in the same metric, and the figures it was made of."""

    text: str
    value: float
    details: Mapping[str, float | str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Record:
    """When and with what a figure was obtained."""

    date: str
    versions: Mapping[str, str]
    command: str
    took_s: float


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim of one published system.

    `metric` names the number and its unit; `setting` the conditions it was reported under. `run` obtains it anew and
    `how` says by what means; both are absent from a claim not tried. `rule` turns claimed and obtained into `verdict`.
    `obtained` and `record` are the figures committed with the claim. `cheap` claims are run again by the tests, and
    may differ from the record by `tolerance`, a share of the larger of recorded and claimed.
    """

    id: str
    system: str
    title: str
    source: Source
    metric: str
    claimed: Claimed
    setting: str
    rule: Rule
    how: str = "not tried"
    run: Callable[[], Obtained] | None = None
    note: str = ""
    cheap: bool = False
    tolerance: float = 1e-6
    obtained: Obtained | None = None
    record: Record | None = None

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`, by the claim's rule."""
        if self.obtained is None:
            return "not tried"
        return self.rule.judge(self.claimed.value, self.obtained.value)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        obtained = self.obtained
        record = self.record
        return {
            "id": self.id,
            "system": self.system,
            "title": self.title,
            "source": str(self.source),
            "metric": self.metric,
            "claimed": {"text": self.claimed.text, "value": self.claimed.value},
            "setting": self.setting,
            "obtained": None
            if obtained is None
            else {"text": obtained.text, "value": obtained.value, "details": dict(obtained.details)},
            "how": self.how,
            "rule": self.rule.text,
            "verdict": self.verdict,
            "note": self.note,
            "record": None
            if record is None
            else {
                "date": record.date,
                "versions": dict(record.versions),
                "command": record.command,
                "took_s": record.took_s,
            },
        }
