"""Verdicts follow from numbers, at and around every boundary."""

import pytest

from foretell.claims import AtMost, Direction, Equal, Gain, Rule


@pytest.mark.parametrize(
    ("rule", "claimed", "obtained", "verdict"),
    [
        (Gain(), 0.8, 0.9, "reproduced"),  # more than claimed
        (Gain(), 0.8, 0.8 * 0.9, "reproduced"),
        (Gain(), 0.8, 0.71, "partly"),
        (Gain(), 0.8, 0.4, "partly"),
        (Gain(), 0.8, 0.39, "not reproduced"),
        (Gain(), 0.8, -0.5, "not reproduced"),
        (Equal(0.01), 100.0, 101.0, "reproduced"),
        (Equal(0.01), 100.0, 99.0, "reproduced"),
        (Equal(0.01), 100.0, 101.1, "partly"),
        (Equal(0.01), 100.0, 97.0, "partly"),
        (Equal(0.01), 100.0, 103.1, "not reproduced"),
        (AtMost(), 1e-5, 0.0, "reproduced"),
        (AtMost(), 1e-5, 1e-5, "reproduced"),
        (AtMost(), 1e-5, 1.5e-5, "partly"),
        (AtMost(), 1e-5, 2.1e-5, "not reproduced"),
        (Direction(), None, 0.05, "reproduced"),
        (Direction(), None, 0.01, "partly"),
        (Direction(), None, 0.0, "not reproduced"),
    ],
)
def test_a_verdict_follows_from_the_numbers(rule: Rule, claimed: float | None, obtained: float, verdict: str) -> None:
    assert rule.judge(claimed, obtained) == verdict


@pytest.mark.parametrize("rule", [Gain(), Equal(0.01), AtMost()])
def test_a_rule_that_compares_asks_for_a_number(rule: Rule) -> None:
    with pytest.raises(ValueError, match="has none"):
        rule.judge(None, 1.0)


def test_a_rule_does_not_overlook_a_number_or_its_sign() -> None:
    with pytest.raises(ValueError, match="looks at it"):
        Direction().judge(0.5, 1.0)
    with pytest.raises(ValueError, match="positive"):
        Gain().judge(-0.1, 1.0)
