"""`search`: which GPUs, how many, and which settings serve a load within an objective for the least.

1. Every plan of every GPU type by the closed form (`options.survey`).
2. The best few of each type (`candidates`) through the simulator: the largest rate at which enough requests meet the
   objective corrects what the closed form says. Settings that it rates nearly as well are simulated too, and the best
   of them goes on. Where a plan meets the objective at no rate its other settings are tried, then the next plans.
3. The cheapest mix of them for the load by size (`melange`).
4. Each chosen option with the requests that the mix sends it, through the simulator; where too few meet the objective
   its capacity shrinks and the mix is made anew. The share that does has an interval (`interval`): where the goal lies
   in it, more requests are simulated, up to a bound; then the share itself decides. Capacities start a little above
   what the second step found, as a whole instance more is dear: the check says whether one fewer will do. Each GPU type
   by itself goes the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.errors import InfeasibleError, InputError, unknown
from foretell.hardware import Device, cluster
from foretell.plan.serving.bca import Advice, advise
from foretell.plan.serving.candidates import cost, ranked, runners_up
from foretell.plan.serving.interval import interval, joined, needed
from foretell.plan.serving.load import Load, buckets
from foretell.plan.serving.melange import Mix, cheapest
from foretell.plan.serving.options import Make, Maker, Option, Survey, link_of, survey
from foretell.plan.serving.pareto import Point, front
from foretell.plan.serving.space import label
from foretell.plan.serving.steady import Iterations, curve, most, slo_text
from foretell.plan.serving.store import Results
from foretell.plan.serving.trial import Trial, largest_factor, paced, sampled
from foretell.plan.serving.why import percent
from foretell.simulate.serving import Requests, ServingPlan
from foretell.simulate.serving.metrics import Slo
from foretell.workload.llm import LLMConfig

__all__ = ["OBJECTIVES", "Answer", "Single", "Unit", "search", "times"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: What a search may make least, and the unit of it.
OBJECTIVES: Mapping[str, str] = {"cost": "$/h", "gpus": "GPUs", "energy": "W"}
_KEPT = (3, 2)  # shapes of plans of a GPU type that go on to the mix: for every size, and for some
_TRIED = (8, 2)  # that are simulated for that, where some of them fail
_TRIAL = 400  # requests of one simulation of a replica
_CHECK = 8000  # requests of the simulation of an option of the mix
_MORE = 4  # times that at most, where the goal is within the interval of the share
_BETTER = 1.025  # the least by which another setting of a plan has to hold up more
_LIVES = 6  # times the requests that run at once: what a simulation has of them
_WARM = 3  # and what comes before
_LONGEST = 6000
_ROUNDS = 8
_HOPE = 1.1  # capacities before the first check, over those of a trial: it is short, and its steps are of 2 %
_LEAST_FACTOR = 0.1
_SIMPLER = 5e-4  # of the cost, for each further GPU of a unit: of what costs the same, units of few GPUs
_NAMED = 3  # plans that a reason names
_SMALL = 1e-4  # dollars an hour decide between mixes of equal GPUs or watts


@dataclass(frozen=True, slots=True)
class Unit:
    """An option of the chosen mix: how many, what share of the load, and how it fared in the simulator."""

    option: Option
    count: int
    #: Units' worth of work, at most `count`.
    work: float
    requests_per_s: float
    #: The largest rate in the simulator over that of the closed form, which the capacities were corrected by.
    factor: float
    #: Output tokens a second of the requests that all of them get.
    tokens_per_s: float
    #: Sequences that decode at a time on a rank of one that is full of them.
    batch: float
    #: Sizes it serves in words.
    serves: str
    checked: Mapping[str, Any] | None
    advice: Advice | None

    @property
    def usd_per_million(self) -> float | None:
        """Dollars for a million output tokens where it is full of the requests that it gets."""
        usd = self.option.usd_per_h
        return None if usd is None else usd * self.work / 3600.0 / self.tokens_per_s * 1e6

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        advice = self.advice
        return {
            **self.option.to_dict(), "count": self.count, "work": self.work,
            "served_requests_per_s": self.requests_per_s, "served_tokens_per_s": self.tokens_per_s,
            "factor": self.factor,
            "full": {
                "requests_per_s": self.requests_per_s / self.work, "tokens_per_s": self.tokens_per_s / self.work,
                "batch": self.batch, "usd_per_million_tokens": self.usd_per_million,
            },
            "serves": self.serves,
            "simulated": None if self.checked is None else dict(self.checked),
            "memory": None if advice is None else {
                "batch": advice.batch, "fitting_batch": advice.largest_batch, "kv_bytes": advice.kv_bytes,
                "kv_budget_bytes": advice.budget_bytes, "throughput_kept": advice.rate / advice.best_rate,
                "replicas": advice.replicas, "gain": advice.gain,
            },
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Single:
    """The best that one GPU type does alone; `cost` None where it does not serve the load, with the reason."""

    gpu: str
    cost: float | None
    counts: tuple[tuple[str, int], ...]
    devices: int = 0
    reason: str = ""
    #: The share of requests within the objective in the simulator; None where nothing was simulated.
    attained: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "gpu": self.gpu, "value": self.cost, "devices": self.devices or None, "reason": self.reason or None,
            "units": [{"plan": name, "count": count} for name, count in self.counts], "attained": self.attained,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """What a search found: the mix, what single types would take, the front, and what was looked at."""

    config: LLMConfig
    requests: Requests
    load: Load
    group: Ints
    slo: Slo
    attainment: float
    objective: str
    units: tuple[Unit, ...]
    mix: Mix
    options: tuple[Option, ...]
    singles: tuple[Single, ...]
    front: tuple[Point, ...]
    surveys: tuple[Survey, ...]
    tried: int
    simulated: int
    reused: int
    rounds: int
    #: Plans by GPU type that keep the limits at no rate in the simulator.
    failed: Mapping[str, Sequence[str]]
    #: Requests that no plan can serve and that are left out, by reason.
    refused: Mapping[str, int]

    @property
    def rate(self) -> float:
        """Requests a second."""
        return float(self.load.rate.sum())

    @property
    def usd_per_h(self) -> float | None:
        """Dollars an hour of the mix; None where a price is unknown."""
        each = [u.option.usd_per_h for u in self.units]
        return None if None in each else sum(u.count * (u.option.usd_per_h or 0.0) for u in self.units)

    @property
    def devices(self) -> int:
        """GPUs of the mix."""
        return sum(u.count * u.option.devices for u in self.units)

    @property
    def power_w(self) -> float | None:
        """Watts of all GPUs at full work; None where a device's power is unknown."""
        each = [u.option.power_w for u in self.units]
        return None if None in each else sum(u.count * (u.option.power_w or 0.0) for u in self.units)

    @property
    def value(self) -> float:
        """The objective's measure of the mix."""
        return sum(u.count * u.option.cost(self.objective) for u in self.units)

    @property
    def attained(self) -> float | None:
        """The share of requests within the objective, over the simulations of all parts of the mix."""
        found = self._attained()
        return None if found is None else found[0]

    @property
    def attained_within(self) -> tuple[float, float] | None:
        """The interval of `attained`."""
        found = self._attained()
        return None if found is None else found[1:]

    @property
    def close(self) -> bool:
        """Whether the goal is within this interval: more requests might have decided otherwise."""
        found = self.attained_within
        return found is not None and found[0] < self.attainment < found[1]

    def _attained(self) -> tuple[float, float, float] | None:
        parts = [(u.requests_per_s, u.checked) for u in self.units]
        known = [(rate, *_within(checked)) for rate, checked in parts if checked is not None]
        return joined(known) if len(known) == len(parts) else None

    def shares(self, unit: Unit) -> Floats:
        """The share of each group of the load that a unit of the mix serves, (groups,)."""
        (at,) = (j for j, option in enumerate(self.options) if option is unit.option)
        return np.asarray(self.mix.shares[:, at])

    def _bucket(self, at: int) -> dict[str, Any]:
        shares = zip(self.options, self.mix.shares[at].tolist(), strict=True)
        return {
            "requests_per_s": float(self.load.rate[at]), "input_tokens": float(self.load.input_tokens[at]),
            "output_tokens": float(self.load.output_tokens[at]),
            "shares": {option.name: share for option, share in shares if share > 0},
        }  # fmt: skip

    def best_single(self) -> Single | None:
        """The GPU type that alone does it for the least."""
        done = [one for one in self.singles if one.cost is not None]
        return min(done, key=lambda one: one.cost or 0.0) if done else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        from foretell.plan.serving.why import why

        single = self.best_single()
        usd = self.usd_per_h
        return {
            "schema": "foretell.serving-plan/1",
            "workload": self.config.name,
            "requests": len(self.requests),
            "skipped": dict(self.requests.skipped),
            "refused": dict(self.refused),
            "trace": dict(self.requests.about),
            "requests_per_s": self.rate,
            "output_tokens_per_s": self.load.tokens_per_s,
            "objective": self.objective,
            "slo": {
                "ttft_s": self.slo.ttft_s, "tpot_s": self.slo.tpot_s, "e2e_s": self.slo.e2e_s,
                "attainment": self.attainment,
            },
            "units": [unit.to_dict() for unit in self.units],
            "devices": self.devices,
            "usd_per_h": usd,
            "usd_per_million_tokens": None if usd is None else usd / 3600.0 / self.load.tokens_per_s * 1e6,
            "power_w": self.power_w,
            "basis": "closed form" if self.attained is None else "simulation",
            "attained": self.attained,
            "attained_within": None if self.attained_within is None else list(self.attained_within),
            "close": self.close,
            "proven": self.mix.proven,
            "singles": [one.to_dict() for one in self.singles],
            "saved": None if single is None or not single.cost else 1.0 - self.value / single.cost,
            "buckets": [self._bucket(i) for i in range(len(self.load))],
            "front": [point.to_dict() for point in self.front],
            "tried": self.tried,
            "simulated": self.simulated,
            "reused": self.reused,
            "why": list(why(self)),
        }  # fmt: skip


def search(
    config: LLMConfig,
    requests: Requests,
    slo: Slo,
    gpus: Sequence[Device],
    *,
    rate: float | None = None,
    attainment: float = 0.9,
    objective: str = "cost",
    engine: str = "vllm",
    prices: Mapping[str, float] | None = None,
    available: Mapping[str, int] | None = None,
    pinned: Mapping[str, Sequence[Any]] | None = None,
    out: Path | None = None,
    trial: Trial | None = None,
    make: Make | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Answer:
    """The GPUs, how many and their settings that serve `requests` (at `rate` a second, or as they arrive).

    `attainment` is the share of requests that must meet `slo`. `prices` are dollars an hour of one device by its name,
    before the catalogue's; `available` devices of a type. `pinned` gives values of settings to try instead of the usual
    ones. `out` keeps simulations in a file, from which a search goes on. `trial` runs requests through a simulator;
    None: the closed form alone decides, and nothing is checked.

    Raises InputError for a wrong question, InfeasibleError where nothing serves the load.
    """
    if objective not in OBJECTIVES:
        raise unknown("objective", objective, OBJECTIVES)
    if not 0.0 < attainment <= 1.0:
        raise InputError(f"an attainment of {attainment:g} is no share of the requests", repair="give e.g. 0.9")
    if not gpus or len({device.name for device in gpus}) < len(gpus):
        raise InputError("each GPU type once is needed", "--gpus", "give e.g. h100-sxm,l4")
    priced = {device.name: _price(device, prices or {}) for device in gpus}
    unknown_price = [name for name, price in priced.items() if price is None]
    if objective == "cost" and unknown_price:
        raise InputError(f"no hourly price of {', '.join(unknown_price)} is known", "--gpus", "give --prices")
    make = make or Maker()
    asked = requests
    requests, refused = _servable(config, requests, pinned or {})
    rate = None if rate is None else rate * len(requests) / len(asked)
    load, group = buckets(requests, rate)
    surveys = tuple(
        survey(config, device, load, slo, engine=engine, pinned=pinned, usd_per_h=priced[device.name], make=make,
               progress=progress)
        for device in gpus
    )  # fmt: skip
    if not any(one.options for one in surveys):
        said = "; ".join(f"{one.gpu}: {one.reason}" for one in surveys)
        within = f" within {slo_text(slo)}" if slo.limits else ""
        raise InfeasibleError(f"no GPU type serves {config.name}{within} ({said})", _repair(slo))
    if objective == "energy" and any(option.power_w is None for one in surveys for option in one.options):
        raise InputError("the power of a GPU type is unknown", "--objective energy", "take cost or gpus")
    question = {
        "config": config, "requests": _digest(requests), "rate": rate, "slo": slo.limits, "attainment": attainment,
        "engine": engine, "available": dict(available or {}), "pinned": {k: list(v) for k, v in (pinned or {}).items()},
        "gpus": [device.name for device in gpus], "prices": priced, "objective": objective,
    }  # fmt: skip
    with Results(out, question) as results:
        found = _Search(
            config, requests, refused, available or {}, slo, attainment, objective, load, group, make, trial, results
        )
        return found.run(surveys, progress)


@dataclass(frozen=True, slots=True)
class _Held:
    """An option that goes on to the mix: what it holds up of the sizes it serves, over what the closed form says, and
    requests/s of each bucket.
    """

    option: Option
    factor: float
    column: Floats


class _Search:
    """One search after the survey: corrects capacities by simulation, chooses the mix, checks it."""

    def __init__(
        self, config: LLMConfig, requests: Requests, refused: Mapping[str, int], available: Mapping[str, int],
        slo: Slo, attainment: float, objective: str, load: Load, group: Ints, make: Make, trial: Trial | None,
        results: Results,
    ) -> None:  # fmt: skip
        self.config = config
        self.requests = requests
        self.refused = refused
        self.available = available
        self.slo = slo
        self.attainment = attainment
        self.objective = objective
        self.load = load
        self.group = group
        self.make = make
        self.trial = trial
        self.results = results
        self.simulated = 0
        #: Plans by GPU type that keep to the limits at no rate in the simulator.
        self.failed: dict[str, list[str]] = {}
        #: How fast these serve a request that they have to themselves: to its first token, and between tokens.
        self.slow: dict[str, list[tuple[float, float]]] = {}

    def iterations(self, option: Option) -> Iterations:
        return self.make(self.config, option.plan, cluster(option.machine))

    def held(self, option: Option, rows: Ints, like: Option, least: float = 0.0) -> float:
        """The largest rate in the simulator at which enough requests of the sizes in `rows` meet the objective on a
        unit; 0 where there is none, or none above `least`.

        The requests are those that a unit of `like` gets, so that plans are compared over the same.
        """
        assert self.trial is not None
        trial, iterations = self.trial, self.iterations(option)
        link = link_of(cluster(option.machine))
        mine = self.load.mixed(rows)
        base = self.closed(like, rows)
        if not base > 0:
            return 0.0
        whose = np.flatnonzero(np.isin(self.group, rows))
        if len(whose) < 2:
            return max(base, least)
        whole = _of(self.requests, whose)
        count, warm = _long(like, _TRIAL)
        floor = _LEAST_FACTOR * base

        def tried(rate: float, times: int) -> dict[str, Any]:
            # One of some units gets one request of so many; within a factor of two always the same ones.
            every = float(mine.rate[0]) / base / 2.0 ** round(np.log2(rate / base))
            some = paced(sampled(whole, times * count, every, warm), rate)

            def run() -> dict[str, Any]:
                self.simulated += 1
                return trial(iterations, option.plan, some, self.slo, link, warm).to_dict()

            found = self.results.of(["trial", option.gpu, option.plan.to_dict(), warm, _digest(some)], run)
            return _sure(found, times * count, len(whole) / max(every, 1.0))

        def good(rate: float) -> bool:
            found = tried(rate, 1)
            if rate <= floor and self.open(found):  # before a plan is given up
                found = tried(rate, _MORE)
            return self.holds(found)

        if least:
            return least * _BETTER * largest_factor(lambda f: good(least * _BETTER * f), 1.0)
        if not good(base) and not good(floor):
            return 0.0
        return base * largest_factor(lambda f: good(base * f), _LEAST_FACTOR)

    def closed(self, option: Option, rows: Ints) -> float:
        """Requests/s of sizes in `rows` that a unit serves by the closed form. Sizes that may miss the limits count
        with what a batch without limits on their prompts would serve.
        """
        mine = self.load.mixed(rows)
        link = link_of(cluster(option.machine))
        return float(most(self.iterations(option), option.plan, mine, self.slo, link_bytes_per_s=link).rate[0])

    def open(self, found: Mapping[str, Any]) -> bool:
        """Whether the goal is within the interval of a simulated share."""
        _, low, high = _within(found)
        return low < self.attainment < high

    def holds(self, found: Mapping[str, Any]) -> bool:
        """Whether enough requests meet the objective in a simulation, and leave as fast as they come."""
        return bool(found["keeps_up"]) and float(found["attainment"]) >= self.attainment

    def best_of(self, group: Sequence[Option]) -> _Held | None:
        """The setting of a shape that holds up most in the simulator; None where none meets the objective at any
        rate.
        """
        best = like = group[0]
        column = self.capacity(best)
        rows = np.flatnonzero(column > 0)
        if not len(rows):
            return None
        if self.trial is None:
            return _Held(best, 1.0, column)
        rate = self.held(best, rows, like)
        if not rate:
            self.fail(best)
        for other in runners_up(group, near=rate > 0):
            its = self.capacity(other)
            mine = np.flatnonzero(its > 0)
            if not len(mine) or (rate and not np.array_equal(mine, rows)):  # compared over the same requests only
                continue
            like = like if rate else other
            found = self.held(other, mine, like, rate)
            if found > rate:
                best, rate, rows, column = other, found, mine, its
            elif not rate:
                self.fail(other)
        if not rate:
            return None
        # A mix adds up the time that each size takes a unit; of all sizes together that must come to what was found.
        added = float(self.load.rate[rows].sum() / (self.load.rate[rows] / column[rows]).sum())
        return _Held(best, rate / added, column * (rate / added))

    def alone(self, option: Option) -> tuple[float, float]:
        """Seconds to the first token, and between tokens, of a request that has a unit to itself."""
        link = link_of(cluster(option.machine))
        found, _ = curve(self.iterations(option), option.plan, self.load.mixed(), 1.0, link_bytes_per_s=link)
        return float(found.ttft_s[0, 0]), float(found.tpot_s[0, 0])

    def fail(self, option: Option) -> None:
        """Remember a plan that meets the objective at no rate."""
        self.failed.setdefault(option.gpu, []).append(label(option.plan))
        if option.share == 1:
            self.slow.setdefault(option.gpu, []).append(self.alone(option))

    def hopeless(self, option: Option) -> bool:
        """Whether one that failed serves a request that it has to itself as fast: fewer of them will not do.

        What serves some sizes only may still serve these.
        """
        if option.share < 1:
            return False
        ttft, tpot = self.alone(option)
        return any(ttft >= 0.999 * a and tpot >= 0.999 * b for a, b in self.slow.get(option.gpu, ()))

    def capacity(self, option: Option) -> Floats:
        """Requests/s of each bucket that a unit serves, (buckets,).

        Sizes that can never meet the objective are served all the same while they are few: at most half of the requests
        that may miss it.
        """
        link, iterations = link_of(cluster(option.machine)), self.iterations(option)
        rate = most(iterations, option.plan, self.load, self.slo, link_bytes_per_s=link).rate
        never = np.flatnonzero(rate == 0)
        if len(never) and self.attainment < 1:
            never = never[np.argsort(self.load.rate[never], kind="stable")]
            few = never[np.cumsum(self.load.rate[never]) <= (1 - self.attainment) / 2 * self.load.rate.sum()]
            if len(few):
                anyhow = most(iterations, option.plan, self.load.take(few), Slo(), link_bytes_per_s=link)
                rate[few] = anyhow.rate
        return rate

    def promising(self, one: Survey, progress: Callable[[str, int, int], None] | None) -> list[_Held]:
        """The plans of a GPU type that go on to the mix: of the most promising shapes so many that hold up in the
        simulator, without what another matches in every bucket for no more.
        """
        found: list[_Held] = []
        both = ranked(one.options, self.objective, float(self.load.rate.sum()))
        for groups, kept, most_ in zip(both, _KEPT, _TRIED, strict=True):
            tried, held = 0, 0
            for group in groups:
                if held == kept or tried == most_:
                    break
                if self.matched(group[0], self.capacity(group[0]), found) or self.hopeless(group[0]):
                    continue
                if progress is not None:
                    progress(f"Simulating {one.gpu}", tried, most_)
                tried += 1
                best = self.best_of(group)
                if best is not None:
                    held += 1
                    found.append(best)
        return found

    def matched(self, option: Option, column: Floats, others: Sequence[_Held]) -> bool:
        """Whether one of `others` serves as much of every bucket (to half a per cent) for no more."""
        return any(
            cost(one.option, self.objective) <= cost(option, self.objective) and (one.column >= 0.995 * column).all()
            for one in others
        )

    def run(self, surveys: tuple[Survey, ...], progress: Callable[[str, int, int], None] | None) -> Answer:
        held = [found for one in surveys for found in self.promising(one, progress)]
        if not held:
            raise InfeasibleError(
                f"in the simulator no plan meets {slo_text(self.slo)} for {percent(self.attainment)} of the requests at"
                f" {percent(_LEAST_FACTOR)} of the rate it holds up on average", _repair(self.slo),
            )  # fmt: skip
        options, factors, columns = [o.option for o in held], [o.factor for o in held], [o.column for o in held]
        capacity = np.stack(columns, axis=1) * (1.0 if self.trial is None else _HOPE)
        caps = [None if o.gpu not in self.available else self.available[o.gpu] // o.devices for o in options]
        singles, alone = self.singles(options, capacity, caps, surveys, progress)
        mix, checked, rounds, good = self.settle(options, capacity, caps, progress)
        best = min(alone, key=lambda one: one[0].cost, default=None)
        if best is not None and (best[0].cost < mix.cost or not good):
            mix, checked = best
        rates = self.load.rate @ mix.shares
        # Capacities of the mix may still be higher than any trial found; how full units are goes by the lower.
        parts = self.load.rate[:, None] * mix.shares
        tried = np.divide(parts, np.stack(columns, axis=1), out=np.zeros_like(parts), where=parts > 0).sum(axis=0)
        work = np.minimum(np.maximum(mix.work, tried), mix.instances)
        tokens = self.load.output_tokens @ parts
        units = [
            Unit(option, int(mix.instances[j]), float(work[j]), float(rates[j]), factors[j], float(tokens[j]),
                 self.batch(option, parts[:, j], float(work[j])), self.serves(mix.shares[:, j]), checked[j],
                 self.advice(option))
            for j, option in enumerate(options) if mix.instances[j]
        ]  # fmt: skip
        ends = front([point for one in surveys for point in one.points])
        return Answer(
            self.config, self.requests, self.load, self.group, self.slo, self.attainment, self.objective,
            tuple(sorted(units, key=lambda u: -u.requests_per_s)), mix, tuple(options),
            singles, tuple(ends), surveys, sum(s.tried for s in surveys), self.simulated, self.results.reused, rounds,
            self.failed, self.refused,
        )  # fmt: skip

    def settle(
        self, options: Sequence[Option], capacity: Floats, caps: Sequence[int | None],
        progress: Callable[[str, int, int], None] | None,
    ) -> tuple[Mix, list[dict[str, Any] | None], int, bool]:  # fmt: skip
        """The mix that holds up in the simulator, how each option fares in it, rounds taken, and whether it does hold.

        Where too few requests of an option meet the objective, its capacity shrinks and the mix is made anew.
        """
        capacity = capacity.copy()
        rounds = 0
        while True:
            rounds += 1
            mix = self.mix(options, capacity, caps)
            checked = [self.check(option, j, mix, progress) for j, option in enumerate(options)]
            short = [j for j, one in enumerate(checked) if one is not None and not self.holds(one)]
            up = all(one["keeps_up"] for one in checked if one is not None)
            good = not short or (up and self.together(checked, mix) >= self.attainment)
            if good or rounds == _ROUNDS:
                return mix, checked, rounds, good
            for j in short:
                full = mix.work[j] / mix.instances[j]
                capacity[:, j] *= min(0.95, 0.999 * full)  # one unit more, or a twentieth of the work away

    def together(self, checked: Sequence[Mapping[str, Any] | None], mix: Mix) -> float:
        """The share of all requests within the objective, by the simulations of the parts."""
        rates = (self.load.rate @ mix.shares).tolist()
        return joined([(rate, *_within(one)) for rate, one in zip(rates, checked, strict=True) if one is not None])[0]

    def costs(self, options: Sequence[Option]) -> Floats:
        usd = np.array([o.usd_per_h or 0.0 for o in options])
        own = np.array([o.cost(self.objective) * (1.0 + _SIMPLER * (o.devices - 1)) for o in options])
        return own if self.objective == "cost" else own + _SMALL * usd

    def mix(self, options: Sequence[Option], capacity: Floats, caps: Sequence[int | None]) -> Mix:
        names = [self.load.name(i) for i in range(len(self.load))]
        kinds = list(dict.fromkeys(option.gpu for option in options))
        return cheapest(
            self.load.rate, capacity, self.costs(options), available=caps, names=names, slo=slo_text(self.slo),
            options=kinds, stock=[f"{count} of {gpu}" for gpu, count in self.available.items() if gpu in kinds],
        )  # fmt: skip

    def share(self, option: int, mix: Mix) -> Requests:
        """The requests that the mix sends an option: of each bucket its slices, evenly over the bucket's requests."""
        rows = []
        for bucket in np.flatnonzero(mix.shares[:, option] > 0):
            mine = np.flatnonzero(self.group == bucket)
            share, before = mix.shares[bucket, option], mix.shares[bucket, :option].sum()
            # Slot k of a bucket's requests goes to the option whose part of the golden sequence holds it.
            slots = (np.arange(len(mine)) * 0.6180339887498949) % 1.0
            rows.append(mine[(slots >= before) & (slots < before + share)])
        at = np.sort(np.concatenate(rows))
        at = at if len(at) else np.flatnonzero(np.isin(self.group, np.flatnonzero(mix.shares[:, option] > 0)))[:1]
        return _of(self.requests, at)

    def check(
        self, option: Option, at: int, mix: Mix, progress: Callable[[str, int, int], None] | None
    ) -> dict[str, Any] | None:
        """How the requests that the mix sends an option fare on its units; None where it has none, or nothing
        simulates.
        """
        count = int(mix.instances[at])
        if not count or self.trial is None:
            return None
        if progress is not None:
            progress("Checking", at, len(mix.instances))
        trial, mine = self.trial, self.share(at, mix)
        rate = float(self.load.rate @ mix.shares[:, at])
        if len(mine) < 2:
            return None
        each, warm = _long(option, _CHECK // 10)
        there = len(mine) / count  # requests that a unit gets

        def run(wanted: int) -> dict[str, Any]:
            # Units are like each other: as many as there are requests for.
            few = max(1, min(count, wanted // each))
            shown = max(few * each, min(int(there * few), wanted))
            some = paced(sampled(mine, shown, count / few, few * warm), rate * few / count)
            plan, before = times(option.plan, few), few * warm

            def make() -> dict[str, Any]:
                self.simulated += 1
                link = link_of(cluster(option.machine))
                return trial(self.iterations(option), plan, some, self.slo, link, before).to_dict()

            kept = self.results.of(["check", option.gpu, plan.to_dict(), before, _digest(some)], make)
            return _sure(kept, shown, there * few)

        found = run(_CHECK)
        if self.open(found) and there * count > _CHECK:
            found = run(int(np.clip(needed(*_within(found), self.attainment) * _CHECK, 2 * _CHECK, _MORE * _CHECK)))
        return found

    def singles(
        self, options: Sequence[Option], capacity: Floats, caps: Sequence[int | None], surveys: Sequence[Survey],
        progress: Callable[[str, int, int], None] | None,
    ) -> tuple[tuple[Single, ...], list[tuple[Mix, list[dict[str, Any] | None]]]]:  # fmt: skip
        """What each GPU type takes alone, and those of these mixes (over all `options`, with how each fares) that hold
        up in the simulator.
        """
        found, alone = [], []
        for one in surveys:
            mine = [j for j, option in enumerate(options) if option.gpu == one.gpu]
            if not mine:
                reason = one.reason or self.fails(one.gpu)
                found.append(Single(one.gpu, None, (), reason=reason))
                continue
            some = [options[j] for j in mine]
            try:
                mix, checked, rounds, good = self.settle(some, capacity[:, mine], [caps[j] for j in mine], progress)
            except InfeasibleError as error:
                fails = f"; {self.fails(one.gpu)}" if one.gpu in self.failed else ""
                found.append(Single(one.gpu, None, (), reason=error.message + fails))
                continue
            if not good:
                said = f"after {rounds} rounds too few requests keep the limits in the simulator"
                found.append(Single(one.gpu, None, (), reason=said))
                continue
            value = sum(int(n) * o.cost(self.objective) for n, o in zip(mix.instances, some, strict=True))
            counts = tuple((label(o.plan), int(n)) for n, o in zip(mix.instances, some, strict=True) if n)
            devices = sum(int(n) * o.devices for n, o in zip(mix.instances, some, strict=True))
            # A part of too few requests to simulate leaves the share unknown.
            known = all(kept is not None for kept, n in zip(checked, mix.instances, strict=True) if n)
            attained = self.together(checked, mix) if known else None
            found.append(Single(one.gpu, value, counts, devices, attained=attained))
            alone.append((_among(mix, mine, len(options)), _spread(checked, mine, len(options))))
        return tuple(found), alone

    def fails(self, gpu: str) -> str:
        """Which plans of a GPU type do not keep to the limits in the simulator, whatever the rate."""
        plans = self.failed.get(gpu, [])
        more = f" and {len(plans) - _NAMED} more" if len(plans) > _NAMED else ""
        named = ", ".join(plans[:_NAMED]) + more
        least = percent(_LEAST_FACTOR)
        return f"in the simulator too few requests keep the limits even at {least} of the rate ({named})"

    def batch(self, option: Option, rates: Floats, work: float) -> float:
        """Sequences that decode at a time on a rank of one that is full, where `work` of them together serve `rates` of
        each bucket: those that the closed form has at that rate.
        """
        rows = np.flatnonzero(rates > 0)
        mine = dataclasses.replace(self.load, rate=rates).mixed(rows)
        link = link_of(cluster(option.machine))
        found, _ = curve(self.iterations(option), option.plan, mine, link_bytes_per_s=link)
        grown = np.maximum.accumulate(found.rate[0])
        served = grown > 0
        return float(np.interp(rates.sum() / work, grown[served], found.batch[0][served])) if served.any() else 1.0

    def serves(self, share: Floats) -> str:
        """Sizes of the buckets that an option gets most of, in words."""
        mine = np.flatnonzero(share > 0)
        if not len(mine):
            return ""
        if len(mine) == len(share) and (share == 1).all():
            return "everything"
        inputs, outputs = self.load.input_tokens[mine], self.load.output_tokens[mine]
        return f"{_range(inputs)} in, {_range(outputs)} out"

    def advice(self, option: Option) -> Advice | None:
        """What the memory advisor says of a plan on one device, whose freed memory could hold replicas."""
        if option.devices > 1:
            return None
        iterations: Any = self.iterations(option)
        host = (lambda batch: iterations.parts(batch)["host"]) if hasattr(iterations, "parts") else None
        reserve = 0.0
        if hasattr(iterations, "budget"):
            reserve = float(iterations.budget.framework_bytes + iterations.budget.activations_bytes)
        try:
            return advise(
                iterations, option.plan, self.load.mixed(), tpot_s=self.slo.limits.get("tpot", np.inf),
                host_s=host, reserve_bytes=reserve,
            )  # fmt: skip
        except InfeasibleError:
            return None


def _among(mix: Mix, columns: Sequence[int], count: int) -> Mix:
    """A mix of some of `count` options as one of them all."""
    instances, work = np.zeros(count, dtype=np.int64), np.zeros(count)
    slices = np.zeros((len(mix.slices), count), dtype=np.int64)
    instances[columns], work[columns], slices[:, columns] = mix.instances, mix.work, mix.slices
    return Mix(instances, slices, work, mix.cost, mix.proven)


def _sure(found: Mapping[str, Any], shown: int, there: float) -> dict[str, Any]:
    """A simulated share with its interval; where requests came again, they do not make it surer."""
    count = float(found["independent"]) * min(1.0, there / shown)
    low, high = interval(float(found["attainment"]), count)
    return {**found, "independent": count, "attainment_low": low, "attainment_high": high}


def _within(found: Mapping[str, Any]) -> tuple[float, float, float]:
    """A simulated share and its interval."""
    return float(found["attainment"]), float(found["attainment_low"]), float(found["attainment_high"])


def _spread(
    checked: Sequence[dict[str, Any] | None], columns: Sequence[int], count: int
) -> list[dict[str, Any] | None]:
    found: list[dict[str, Any] | None] = [None] * count
    for j, one in zip(columns, checked, strict=True):
        found[j] = one
    return found


def _servable(
    config: LLMConfig, requests: Requests, pinned: Mapping[str, Sequence[Any]]
) -> tuple[Requests, dict[str, int]]:
    """Requests without those that are longer than the model, or the plans asked for, allow; and how many these are."""
    allowed = config.context_length or 0
    for value in pinned.get("max_model_len", ()):
        if allowed and value > allowed:
            raise InputError(f"{value:,} tokens", "--max-model-len", f"{config.name} allows 1 to {allowed:,}")
    longest = max(pinned.get("max_model_len", ()), default=0) or allowed
    tokens = requests.input_tokens + requests.output_tokens
    long = tokens > longest if longest else np.zeros(len(requests), dtype=bool)
    if not long.any():
        return requests, {}
    if long.all():
        what = f"every request is longer than {longest:,} tokens, which is all that {config.name} is served with"
        raise InputError(what, "requests", "take another model, or shorter requests")
    reason = f"longer than {longest:,} tokens (the longest {tokens.max():,})"
    kept = _of(requests, np.flatnonzero(~long), about=requests.about, skipped=requests.skipped)
    return kept, {reason: int(long.sum())}


def _of(requests: Requests, rows: Ints, **notes: Any) -> Requests:
    """Some of the requests."""
    r = requests
    return Requests.of(
        r.arrival_s[rows], r.input_tokens[rows], r.output_tokens[rows], r.prefix[rows], r.prefix_tokens[rows], **notes
    )


def _range(values: Floats) -> str:
    low, high = f"{values.min():,.0f}", f"{values.max():,.0f}"
    return low if low == high else f"{low}–{high}"


def _long(option: Option, least: int) -> tuple[int, int]:
    """Requests of a simulation of one unit, and how many come before them: a batch takes some lifetimes of a request to
    grow to what it stays at.
    """
    running = option.batch * option.plan.pp * option.plan.dp * max(1, option.plan.decode_replicas)
    return int(np.clip(_LIVES * running, least, _LONGEST)), int(np.clip(_WARM * running, 0, _LONGEST))


def times(plan: ServingPlan, count: int) -> ServingPlan:
    """`count` units of a plan behind one router."""
    if plan.prefill_replicas:
        p, d = plan.prefill_replicas * count, plan.decode_replicas * count
        return plan.replace(prefill_replicas=p, decode_replicas=d, replicas=p + d)
    return plan.replace(replicas=count)


def _price(device: Device, prices: Mapping[str, float]) -> float | None:
    price = prices.get(device.name, device.price_usd_per_h)
    if price is not None and not price > 0:
        raise InputError(f"the price of {device.name} is {price:g}", "--prices", "give dollars an hour above 0")
    return price


def _repair(slo: Slo) -> str:
    return "loosen the SLO, take faster GPUs, or more of them together (tp)" if slo.limits else "take larger GPUs"


def _digest(requests: Requests) -> str:
    import hashlib

    digest = hashlib.sha256()
    for name in ("arrival_s", "input_tokens", "output_tokens", "prefix", "prefix_tokens"):
        digest.update(getattr(requests, name).tobytes())
    return digest.hexdigest()
