"""How a verdict follows from a claimed and an obtained number. Stated once, typed in nowhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Rule(Protocol):
    """Turns two numbers into a verdict; `text` says how, for a reader."""

    @property
    def text(self) -> str:
        """The rule in words."""
        ...

    def judge(self, claimed: float | None, obtained: float) -> str:
        """``reproduced``, ``partly`` or ``not reproduced``."""
        ...


@dataclass(frozen=True, slots=True)
class Equal:
    """For counts and sizes: the same number, to the printed digit or a stated share."""

    tolerance: float

    @property
    def text(self) -> str:
        return f"reproduced within {self.tolerance:.2%} of the claimed value, partly within {3 * self.tolerance:.2%}"

    def judge(self, claimed: float | None, obtained: float) -> str:
        value = _needed(claimed)
        deviation = abs(obtained - value)
        if deviation <= self.tolerance * abs(value):
            return "reproduced"
        return "partly" if deviation <= 3 * self.tolerance * abs(value) else "not reproduced"


@dataclass(frozen=True, slots=True)
class Gain:
    """For improvements (a speed-up less one, a share saved): as large as claimed, or nearly."""

    nearly: float = 0.9
    part: float = 0.5

    @property
    def text(self) -> str:
        return f"reproduced from {self.nearly:.0%} of the claimed gain on, partly from {self.part:.0%}"

    def judge(self, claimed: float | None, obtained: float) -> str:
        value = _needed(claimed)
        if value <= 0:
            raise ValueError(f"a claimed gain is positive, not {value}")
        if obtained >= self.nearly * value:
            return "reproduced"
        return "partly" if obtained >= self.part * value else "not reproduced"


@dataclass(frozen=True, slots=True)
class AtMost:
    """For errors: no larger than claimed."""

    @property
    def text(self) -> str:
        return "reproduced up to the claimed value, partly up to twice that"

    def judge(self, claimed: float | None, obtained: float) -> str:
        value = _needed(claimed)
        if obtained <= value:
            return "reproduced"
        return "partly" if obtained <= 2 * value else "not reproduced"


@dataclass(frozen=True, slots=True)
class Direction:
    """For gains claimed in words only: there is one worth the name."""

    least: float = 0.05

    @property
    def text(self) -> str:
        return f"no number is claimed: reproduced from a gain of {self.least:.0%} on, partly from any"

    def judge(self, claimed: float | None, obtained: float) -> str:
        if claimed is not None:
            raise ValueError("a claimed number asks for a rule that looks at it")
        if obtained >= self.least:
            return "reproduced"
        return "partly" if obtained > 0 else "not reproduced"


def _needed(claimed: float | None) -> float:
    if claimed is None:
        raise ValueError("this rule compares with a claimed number, and the claim has none")
    return claimed
