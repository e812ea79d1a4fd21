import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from foretell import claims as ledger
from foretell.claims import Obtained

Run = Callable[..., Any]


def test_the_ledger_as_a_table(run: Run) -> None:
    result = run("claims")
    assert result.exit_code == 0, result.output
    for claim in ledger.claims():
        assert claim.system in result.stdout
    assert f"{len(ledger.claims())} claims of " in result.stdout
    assert result.stdout.split()[:4] == ["claim", "claimed", "obtained", "verdict"]
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_system_in_full(run: Run) -> None:
    result = run("claims", "repvgg")
    assert result.exit_code == 0, result.output
    for claim in ledger.claims("repvgg"):
        assert f"\n{claim.id}\n" in result.stdout
    assert "hardnet" not in result.stdout
    assert "CVPR 2021" in result.stdout


def test_the_ledger_as_json(run: Run) -> None:
    result = run("claims", "--json")
    assert json.loads(result.stdout) == [claim.to_dict() for claim in ledger.claims()]


def test_an_unknown_claim(run: Run) -> None:
    result = run("claims", "repvg")
    assert result.exit_code == 2
    assert "'repvgg'" in result.stderr


def test_figures_are_obtained_anew(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real runner on a claim whose own run is replaced, so that its figure must come from there."""
    name = "repvgg/parameters-a2"
    (claim,) = ledger.claims(name)
    changed = replace(claim, run=lambda: Obtained("12.34 M", 12.34e6))
    module = __import__("foretell.claims.ledger", fromlist=["_ledger"])
    monkeypatch.setattr(module, "_ledger", lambda: {name: changed})
    kept = run("claims", name).stdout
    assert "12.34 M" not in kept
    anew = run("claims", name, "--run").stdout
    assert "12.34 M" in anew
    assert "not reproduced" in anew
