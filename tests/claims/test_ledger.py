"""The contract over every claim, and the ledger's own working."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from foretell.claims import HOW, VERDICTS, Claim, Claimed, Equal, Obtained, Source, claims, ledger, run
from foretell.claims.record import main
from foretell.errors import ForetellError, InputError, UnknownNameError

ALL = claims()
CHEAP = [claim for claim in ALL if claim.cheap]


@pytest.mark.parametrize("claim", ALL, ids=lambda c: c.id)
def test_every_claim_keeps_the_contract(claim: Claim) -> None:
    assert re.fullmatch(r"[a-z0-9-]+/[a-z0-9-]+", claim.id)
    assert claim.id.startswith(f"{claim.system}/")
    for text in (claim.title, claim.metric, claim.claimed.text, claim.setting, claim.rule.text, claim.source.paper):
        assert text.strip()
    assert 1940 < claim.source.year < 2100
    assert claim.source.venue
    assert claim.source.place, "say where in the paper it stands"
    assert claim.how in HOW
    assert claim.verdict in VERDICTS
    # Tried means: it can be run, it was, and the figures say when and with what.
    tried = claim.how != "not tried"
    assert (claim.run is not None) == tried
    assert (claim.obtained is not None) == tried, f"python -m foretell.claims.record {claim.id}"
    assert (claim.record is not None) == tried
    assert (claim.verdict != "not tried") == tried
    if not tried:
        assert claim.note, "say what trying it would take"
    if claim.obtained is not None and claim.record is not None:
        assert claim.obtained.text
        assert math.isfinite(claim.obtained.value)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", claim.record.date)
        assert {"foretell", "python"} <= claim.record.versions.keys()
        assert claim.id in claim.record.command
        assert claim.record.took_s >= 0
    assert json.loads(json.dumps(claim.to_dict()))["verdict"] == claim.verdict


def test_every_module_holds_one_system_of_its_name() -> None:
    for claim, path in ledger._found():
        assert path.stem == claim.system.replace("-", "_")


def test_the_headline_claims_of_both_systems_are_there() -> None:
    """What the abstracts of the two papers claim, whatever came of it."""
    texts = " ".join(f"{c.title} {c.claimed.text}" for c in claims("repvgg", "hardnet"))
    for words in ("83 %", "101 %", "over 80 %", "35 %", "36 %", "30 %", "32 %", "45 %", "FC-DenseNet-103"):
        assert words in texts


@pytest.mark.parametrize("claim", CHEAP, ids=lambda c: c.id)
def test_cheap_claims_come_out_as_recorded(claim: Claim) -> None:
    (again,) = run(claim.id)
    assert again.obtained is not None
    assert claim.obtained is not None
    repair = f"if that is meant: python -m foretell.claims.record {claim.id}"
    scale = max(abs(claim.obtained.value), abs(claim.claimed.value or 0))
    assert again.obtained.value == pytest.approx(claim.obtained.value, abs=claim.tolerance * scale), repair
    assert again.verdict == claim.verdict, repair
    assert again.obtained is not claim.obtained


def test_claims_are_chosen_by_id_and_by_system_in_any_spelling() -> None:
    assert [c.id for c in claims("repvgg/speed-resnet50")] == ["repvgg/speed-resnet50"]
    assert {c.system for c in claims("HarDNet")} == {"hardnet"}
    assert claims("repvgg/speed_resnet50", "repvgg") == claims("repvgg")  # none twice
    assert len(claims("repvgg")) + len(claims("hardnet")) <= len(ALL)


def test_an_unknown_id_lists_near_ones() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'repvgg/speed-resnet50'"):
        claims("repvgg/speed-resnet5")
    with pytest.raises(UnknownNameError, match="did you mean 'repvgg'"):
        claims("repvg")


def test_running_a_claim_not_tried_leaves_it_so() -> None:
    seen: list[Claim] = []
    (claim,) = run("repvgg/imagenet-top1", progress=seen.append)
    assert claim.verdict == "not tried"
    assert seen == []


def test_listing_imports_no_framework() -> None:
    code = "import sys; from foretell.claims import claims; claims(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def one(id: str = "system/claim", value: float = 2.0) -> Claim:
    return Claim(
        id=id,
        system="system",
        title="Two is two",
        source=Source("A paper", 2020, "A venue", "table 1"),
        metric="number",
        claimed=Claimed("2", 2.0),
        setting="anywhere",
        rule=Equal(0.01),
        how="measured here",
        run=lambda: Obtained(f"{value:g}", value, {"of": "a test"}),
        note="",
    )


def test_ids_that_differ_in_spelling_only_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "system.json"
    for other in ("system/claim", "System/claim"):
        with pytest.raises(ForetellError, match="two claims are called"):
            ledger.collect(iter([(one(), place), (one(other), place)]))
    with pytest.raises(ForetellError, match="'system/a-b' and 'system/a_b'"):
        ledger.collect(iter([(one("system/a-b"), place), (one("system/a_b"), place)]))


def test_recorded_figures_are_written_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "system.json"
    monkeypatch.setattr(ledger, "_found", lambda: iter([(one(), place), (one("system/other", 9.0), place)]))
    ledger._ledger.cache_clear()
    try:
        assert [c.verdict for c in ledger.claims()] == ["not tried", "not tried"]
        assert [c.verdict for c in ledger.record("system/other")] == ["not reproduced"]
        ledger.record("system/claim")
        first, second = ledger.claims("system")
        assert first.verdict == "reproduced"
        assert first.obtained == Obtained("2", 2.0, {"of": "a test"})
        assert first.record is not None
        assert first.record.command == "foretell claims system/claim --run"
        assert second.verdict == "not reproduced"
        assert list(json.loads(place.read_text())) == ["system/claim", "system/other"]  # the order of the module
        assert replace(second, obtained=None).verdict == "not tried"
    finally:
        ledger._ledger.cache_clear()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "not a JSON object"),
        ('{"system/claim": {"value": 1}}', "figures of 'system/claim' are malformed"),
        ('{"system/gone": {}}', "'system/gone', which is no claim"),
    ],
)
def test_broken_figures_say_where(tmp_path: Path, text: str, message: str) -> None:
    place = tmp_path / "system.json"
    place.write_text(text)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        ledger.collect(iter([(one(), place)]))
    assert str(place) in str(caught.value)


def test_malformed_figures_can_be_recorded_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "system.json"
    place.write_text('{"system/claim": {"value": 1}, "system/gone": {}}')
    monkeypatch.setattr(ledger, "_found", lambda: iter([(one(), place)]))
    ledger._ledger.cache_clear()
    try:
        ledger.record("system")
        assert [c.verdict for c in ledger.claims()] == ["reproduced"]
        assert list(json.loads(place.read_text())) == ["system/claim"]
    finally:
        ledger._ledger.cache_clear()


def test_the_recording_command_names_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["repvgg/imagenet-top1"]) == 0
    assert capsys.readouterr().out == "repvgg/imagenet-top1: not tried\n"
    assert main(["repvggg"]) == 2
    assert "did you mean 'repvgg'" in capsys.readouterr().err
