"""Arrivals and lengths that are drawn, against the closed forms of their distributions."""

from __future__ import annotations

import numpy as np
import pytest

from foretell.errors import ForetellError, InputError, UnknownNameError
from foretell.simulate.serving.workloads import Lengths, arrivals, offline, parse_lengths, processes, synthetic
from foretell.simulate.serving.workloads.arrivals import process

COUNT = 200_000


def rng() -> np.random.Generator:
    return np.random.default_rng(11)


@pytest.mark.parametrize(
    ("spec", "cv"), [("poisson", 1.0), ("constant", 0.0), ("gamma:3", 3.0), ("gamma:0.5", 0.5), ("mmpp:1:1s", 1.0)]
)
def test_gaps_have_the_rate_and_the_variation_asked_for(spec: str, cv: float) -> None:
    at = arrivals(spec, 5.0, COUNT, rng())
    gaps = np.diff(at)
    assert (gaps >= 0).all()
    error = max(cv, 0.1) / np.sqrt(COUNT)  # of the mean, relative
    assert gaps.mean() == pytest.approx(0.2, rel=5 * error)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_bursts_of_a_modulated_process() -> None:
    """Its index of dispersion of counts over long times: 1 + (λ₁ − λ₂)² τ / (4 λ) for two states of mean length τ
    (Heffes and Lucantoni, 1986, for equal rates of change)."""
    rate, ratio, stay = 10.0, 9.0, 2.0
    at = arrivals(f"mmpp:{ratio}:{stay}s", rate, 2_000_000, rng())
    counts = np.histogram(at, bins=np.arange(0, at[-1], 200.0))[0]
    quiet = 2 * rate / (1 + ratio)
    dispersion = 1 + (ratio * quiet - quiet) ** 2 * stay / (4 * rate)
    assert counts.mean() / 200 == pytest.approx(rate, rel=0.03)
    assert counts.var() / counts.mean() == pytest.approx(dispersion, rel=0.2)
    assert dispersion > 13


def test_lognormal_lengths_have_the_mean_and_the_variation_asked_for() -> None:
    asked, answered = parse_lengths("lognormal:1024:0.5", "7").draw(COUNT, rng())
    assert asked.mean() == pytest.approx(1024, rel=0.01)
    assert asked.std() / asked.mean() == pytest.approx(0.5, rel=0.02)
    assert set(answered.tolist()) == {7}
    assert asked.min() >= 1


def test_lengths_fitted_to_a_trace_and_drawn_from_it() -> None:
    source = np.random.default_rng(1)
    logs = source.multivariate_normal([6.0, 4.0], [[0.64, 0.3], [0.3, 0.36]], 20_000)
    inputs, outputs = np.clip(np.exp(logs).round(), 1, None).astype(np.int64).T
    asked, answered = Lengths.fitted(inputs, outputs, "t").draw(COUNT, rng())
    assert np.median(asked) == pytest.approx(np.exp(6.0), rel=0.02)
    assert np.log(answered).std() == pytest.approx(0.6, rel=0.03)
    assert np.corrcoef(np.log(asked), np.log(answered))[0, 1] == pytest.approx(0.3 / 0.48, abs=0.02)
    pairs = set(zip(inputs.tolist(), outputs.tolist(), strict=True))
    drawn = Lengths.resampled(inputs, outputs, "t").draw(1000, rng())
    assert set(zip(*(side.tolist() for side in drawn), strict=True)) <= pairs


def test_requests_by_number_by_time_and_all_at_once() -> None:
    lengths = parse_lengths("10", "20")
    assert len(synthetic(lengths, rate=3.0, count=50)) == 50
    some = synthetic(lengths, rate=50.0, duration_s=100.0, process="gamma:4", seed=5)
    assert some.arrival_s[-1] < 100
    assert len(some) == pytest.approx(5000, abs=5 * 4 * 5000**0.5)
    again = synthetic(lengths, rate=50.0, duration_s=100.0, process="gamma:4", seed=5)
    assert again.arrival_s.tobytes() == some.arrival_s.tobytes()
    assert synthetic(lengths, rate=50.0, count=9, seed=6).arrival_s.tolist() != some.arrival_s[:9].tolist()
    all_at_once = offline(lengths, 30)
    assert set(all_at_once.arrival_s.tolist()) == {0.0}
    assert len(all_at_once) == 30
    with pytest.raises(InputError, match="--num-requests or --duration"):
        synthetic(lengths, rate=1.0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [("gamma", "write gamma:CV"), ("gamma:x", "CV is 'x'"), ("gamma:0", "CV is '0'"), ("gamma:nan", "CV is 'nan'"),
     ("poisson:3", "write poisson"), ("mmpp:2", "write mmpp"), ("mmpp:0.5:1s", "RATIO"), ("mmpp:2:1", "has no unit")],
)  # fmt: skip
def test_processes_that_are_none(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        arrivals(spec, 1.0, 3, rng())


def test_names_of_processes() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'poisson'"):
        arrivals("poison", 1.0, 3, rng())
    assert "gamma:CV" in processes()
    with pytest.raises(ForetellError, match="registered already"):
        process("poisson", "poisson")(lambda count, rate, rng, values: np.zeros(count))
    with pytest.raises(InputError, match="number above 0, up to 1e"):
        arrivals("poisson", 0.0, 3, rng())


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "many", "lognormal:5", "lognormal:0:1", "lognormal:x:1", "9" * 9])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="--osl"):
        parse_lengths("10", text)
