"""How much of a long run is progress: failures, restarts, and how often to save.

Failures of any device stop the job; they come at random with a constant rate (exponential times between them), also
while the job restarts. A run is a chain of segments, each `interval_s` of training and a checkpoint; a failure throws
away what was done since the last one. The expected time of a segment then has a closed form (Daly, 2006), and so has
the best interval.

>>> job = Reliability(devices=16384, mtbf_device_s=H100_MTBF_S, checkpoint_s=30, restart_s=600)
>>> round(job.mtbf_s / 3600, 2), round(job.best_interval_s() / 60, 1)
(3.09, 13.3)
>>> found = job.goodput()
>>> round(found.share, 3), round(found.failures_per_day, 1)
(0.88, 7.8)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.errors import InfeasibleError, InputError

__all__ = ["H100_MTBF_S", "Goodput", "Reliability", "young_interval_s"]

Floats = npt.NDArray[np.float64]

DAY_S = 86_400.0
#: Mean time between unexpected interruptions for one H100 with its share of host, network and software, in seconds:
#: 419 of them in 54 days of pre-training Llama 3 405B on 16,384 GPUs (The Llama 3 Herd of Models, arXiv 2407.21783,
#: section 3.3.4).
H100_MTBF_S = 16_384 * 54 * DAY_S / 419

# A segment that is this many mean times between failures long practically never ends.
HOPELESS = 700.0


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Young's first-order interval between checkpoints, ``sqrt(2 · C · M)``, in seconds (1974)."""
    return math.sqrt(2 * checkpoint_s * mtbf_s)


@dataclass(frozen=True, slots=True)
class Goodput:
    """What becomes of a run's time. The four shares add up to 1.

    `share` is progress; `checkpoint`, `lost` (training and saving that a failure undid) and `restart` are the rest.
    """

    interval_s: float
    share: float
    checkpoint: float
    lost: float
    restart: float
    failures_per_day: float

    def wall_s(self, work_s: float) -> float:
        """Expected time of a run that would take `work_s` without failures and checkpoints."""
        return work_s / self.share


@dataclass(frozen=True, slots=True)
class Reliability:
    """A job and what happens to it. Times in seconds; infinite `mtbf` means that kind never fails.

    `checkpoint_s` is how long training stands still for a checkpoint (with an asynchronous one, only its first part);
    `restart_s` is from the failure to the first new step, and failures count; `repair_s` comes before it, while nothing
    runs and nothing can fail (waiting for a machine).
    """

    devices: int
    mtbf_device_s: float = math.inf
    nodes: int = 0
    mtbf_node_s: float = math.inf
    checkpoint_s: float = 0.0
    restart_s: float = 0.0
    repair_s: float = 0.0

    def __post_init__(self) -> None:
        if self.devices < 1 or self.nodes < 0:
            raise InputError(f"{self.devices} devices in {self.nodes} nodes", "reliability")
        for name in ("mtbf_device_s", "mtbf_node_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}, want more than 0", "reliability")
        for name in ("checkpoint_s", "restart_s", "repair_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} is {value}, want a time", "reliability")

    @property
    def rate_per_s(self) -> float:
        """Failures a second that stop the job."""
        return self.devices / self.mtbf_device_s + self.nodes / self.mtbf_node_s

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures that stop the job."""
        return math.inf if self.rate_per_s == 0 else 1 / self.rate_per_s

    def best_interval_s(self) -> float:
        """Training between checkpoints that makes the most progress: infinite without failures, 0 if saving is free.

        With ``x = rate · interval``, progress a second is greatest where ``(1 - x) · exp(x) = exp(-rate · C)``,
        whatever restarts take. Young's interval is its first-order solution.
        """
        if self.rate_per_s == 0:
            return math.inf
        if self.checkpoint_s == 0:
            return 0.0
        target = -math.expm1(-self.rate_per_s * self.checkpoint_s)  # 1 - (1 - x)·exp(x), which rises from 0 to 1
        low, high = 0.0, 1.0
        for _ in range(200):
            x = (low + high) / 2
            # 1 - (1 - x)·e^x, written so that small x keeps its digits.
            if x * math.exp(x) - math.expm1(x) < target:
                low = x
            else:
                high = x
        return low / self.rate_per_s

    def segment_s(self, interval_s: float) -> float:
        """Expected time of `interval_s` of training and its checkpoint, failures and restarts included.

        ``(1/rate + repair) · exp(rate · restart) · (exp(rate · (interval + checkpoint)) - 1)``: the number of failures
        of a segment is geometric, and each costs a repair and a restart that may itself fail.
        """
        rate = self.rate_per_s
        length = interval_s + self.checkpoint_s
        if rate == 0:
            return length
        if rate * (length + self.restart_s) > HOPELESS:
            raise InfeasibleError(
                f"a failure every {self.mtbf_s:.0f} s on average, and a segment takes {length + self.restart_s:.0f} s"
                " with its restart: it practically never ends",
                "save more often, restart faster, or use fewer devices",
            )
        return (1 / rate + self.repair_s) * math.exp(rate * self.restart_s) * math.expm1(rate * length)

    def goodput(self, interval_s: float | None = None) -> Goodput:
        """Shares of time with a checkpoint every `interval_s` of training, by default the best.

        Raises InfeasibleError where failures come faster than a segment can end.
        """
        interval = self.best_interval_s() if interval_s is None else interval_s
        if not interval >= 0:
            raise InputError(f"interval is {interval}, want a time", "goodput")
        rate = self.rate_per_s
        if rate == 0 or not math.isfinite(interval):
            if rate > 0:
                raise InputError("a run that never saves makes no progress where it can fail", "goodput")
            share = 1.0 if not math.isfinite(interval) else _ratio(interval, interval + self.checkpoint_s)
            return Goodput(interval, share, 1 - share, 0.0, 0.0, 0.0)
        if interval == 0:
            if self.checkpoint_s > 0:
                return self.goodput(1e-9 * self.mtbf_s)
            # Saving is free and continuous: only repairs and restarts cost.
            away = self._away_s()
            return Goodput(0.0, 1 / (1 + rate * away), 0.0, 0.0, 1 - 1 / (1 + rate * away), self._per_day(away))
        total = self.segment_s(interval)
        failures = math.expm1(rate * (interval + self.checkpoint_s))  # of one segment, those in restarts not counted
        restart = failures * self._away_s() / total
        share, saving = interval / total, self.checkpoint_s / total
        lost = max(0.0, 1 - share - saving - restart)
        return Goodput(interval, share, saving, lost, restart, self._per_day(self._away_s()))

    def _away_s(self) -> float:
        """Expected time from a failure to the first new step."""
        rate = self.rate_per_s
        return (1 / rate + self.repair_s) * math.exp(rate * self.restart_s) - 1 / rate

    def _per_day(self, away_s: float) -> float:
        """Failures a day of wall time, those during restarts included: all but repairs is exposed to them."""
        rate = self.rate_per_s
        # After a failure: `exp(rate · restart)` tries on average until one restart ends, each after a repair.
        repairs = math.exp(rate * self.restart_s) * self.repair_s
        return DAY_S * rate * (1 - repairs / (1 / rate + away_s))

    def sample(self, work_s: float, *, interval_s: float | None = None, runs: int = 1000, seed: int = 0) -> Floats:
        """Wall times of whole runs with random failures, sorted: how far a run may be from the expected time.

        The last segment is as long as is left. Raises InfeasibleError where segments practically never end.
        """
        interval = self.best_interval_s() if interval_s is None else interval_s
        if not work_s > 0 or runs < 1:
            raise InputError(f"{runs} runs of {work_s} s", "sample")
        if not interval > 0:
            raise InputError(f"interval is {interval}, want more than 0", "sample")
        lengths = [interval] * int(work_s // interval) if math.isfinite(interval) else []
        rest = work_s - sum(lengths)
        lengths += [rest] if rest > 1e-9 * work_s else []
        if self.rate_per_s == 0:
            return np.full(runs, work_s + len(lengths) * self.checkpoint_s)
        for length in sorted(set(lengths)):
            self.segment_s(length)
        if len(lengths) * runs > 50_000_000:
            raise InputError(f"{len(lengths)} segments of {runs} runs", "sample", "ask for fewer runs")
        rng = np.random.default_rng(seed)
        wall = np.zeros(runs)
        for length in sorted(set(lengths)):
            count = lengths.count(length)
            wall += self._segments(length + self.checkpoint_s, (runs, count), rng)
        return np.sort(wall)

    def _segments(self, length_s: float, shape: tuple[int, int], rng: np.random.Generator) -> Floats:
        """Total time of `shape[1]` segments of each run: (runs,)."""
        rate = self.rate_per_s
        failures = rng.geometric(math.exp(-rate * length_s), shape) - 1
        total = failures.sum(axis=1)
        wall = np.full(shape[0], shape[1] * length_s) + self._cut_short(total, length_s, rng)
        again = np.zeros(shape[0], dtype=np.int64)
        if self.restart_s > 0:
            # Each failure is followed by restarts until one lasts: the failed ones are cut short too.
            done = math.exp(-rate * self.restart_s)
            again[total > 0] = rng.negative_binomial(total[total > 0], done)
            wall += self._cut_short(again, self.restart_s, rng) + total * self.restart_s
        return np.asarray(wall + (total + again) * self.repair_s)

    def _cut_short(self, counts: npt.NDArray[np.int64], length_s: float, rng: np.random.Generator) -> Floats:
        """Sums of `counts` times to failure, each known to come within `length_s`."""
        every = int(counts.sum())
        uniform = rng.random(every)
        times = -np.log1p(uniform * math.expm1(-self.rate_per_s * length_s)) / self.rate_per_s
        ends = np.concatenate([[0], np.cumsum(counts)])
        sums = np.concatenate([[0.0], np.cumsum(times)])
        return np.asarray(sums[ends[1:]] - sums[ends[:-1]])


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 1.0
