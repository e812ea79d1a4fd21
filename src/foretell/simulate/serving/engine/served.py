"""`Served`: what became of each request, and what each rank's iterations were, as columns."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from foretell.simulate.serving.batch import Batch
from foretell.timeline import Counter, Timeline

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

__all__ = ["Runs", "RunsWriter", "Served"]


@dataclass(frozen=True, slots=True)
class Runs:
    """Iterations of ranks, columns (runs,): each a run of `iterations` that follow each other without pause.

    Iterations with prompts in them are runs of one; iterations that only decode come in longer runs, in which the
    sequences stay the same and `decode_tokens` (given for the first) grows by `decode_seqs` each time. The other
    columns of the batch are those of `foretell.simulate.serving.Batch`. `kv_blocks` are held at the end, `running`
    and `waiting` sequences counted after scheduling; of those that decode, `late` got the token before at another
    time than the end of the last iteration: their cache was swapped in or sent here, or prompts ran in between. Rows
    of one replica are in order of time; the ranks of a replica (`rank`) have rows of the same times.
    """

    start_s: Floats
    end_s: Floats
    decode_tokens: Floats
    prefill_pairs: Floats
    prefill_cached: Floats
    replica: Ints
    rank: Ints
    iterations: Ints
    decode_seqs: Ints
    prefill_seqs: Ints
    prefill_tokens: Ints
    sampled: Ints
    kv_blocks: Ints
    running: Ints
    waiting: Ints
    late: Ints

    def __post_init__(self) -> None:
        for column in fields(self):
            getattr(self, column.name).flags.writeable = False

    def __len__(self) -> int:
        return len(self.start_s)

    @property
    def duration_s(self) -> Floats:
        """Seconds of one iteration, the mean over its run."""
        return (self.end_s - self.start_s) / self.iterations

    def batch(self, dp: int = 1) -> Batch:
        """The middle iteration of each run, as iterations are costed; a run costs `iterations` times that.

        With `dp` data-parallel ranks so many rows that follow each other are one iteration of theirs.
        """
        middle = self.decode_tokens + self.decode_seqs * (self.iterations - 1) / 2.0
        tokens = self.decode_seqs + self.prefill_tokens.astype(np.float64)
        together = tokens if dp == 1 else np.repeat(tokens.reshape(-1, dp).mean(axis=1), dp)
        return Batch.of(
            decode_seqs=self.decode_seqs,
            decode_tokens=middle,
            prefill_seqs=self.prefill_seqs,
            prefill_tokens=self.prefill_tokens,
            prefill_pairs=self.prefill_pairs,
            prefill_cached=self.prefill_cached,
            sampled=self.sampled,
            rank_tokens=together,
        )


_FLOATS = 5


class RunsWriter:
    """Collects runs row by row in two flat arrays, 84 bytes a row, and the breaks of answers in a third."""

    def __init__(self) -> None:
        self.breaks = array("d")
        self.floats = array("d")
        self.ints = array("i")

    def done(self) -> Runs:
        """The columns, in order of replica, then time, then rank."""
        names = [column.name for column in fields(Runs)]
        floats = np.frombuffer(self.floats, dtype=np.float64).reshape(-1, _FLOATS)
        ints = np.frombuffer(self.ints, dtype=np.intc).reshape(-1, len(names) - _FLOATS)
        order = np.lexsort((ints[:, 1], floats[:, 0], ints[:, 0]))
        columns = {name: floats[order, at] for at, name in enumerate(names[:_FLOATS])}
        columns |= {name: ints[order, at].astype(np.int32, copy=False) for at, name in enumerate(names[_FLOATS:])}
        return Runs(**columns)


@dataclass(frozen=True, slots=True)
class Served:
    """What a simulation tells. Columns (requests,) are in the order of the `Requests`; times are seconds, NaN for none.

    `arrival_s` is when the server got the request (in a closed loop, when its turn came). `first_scheduled_s` begins
    the iteration that first worked on it, `first_token_s` and `finished_s` end those that gave its first and last
    token. `output_tokens` were generated, `cached_tokens` of its prompt found in the prefix cache when it was first
    scheduled. `replica` finished it, `prefill_replica` ran its prompt (the same unless disaggregated); −1 where
    refused. `refused` indexes `reasons`, of which the first, empty, means that it was served. `breaks_s` (breaks, 2)
    are the times of two tokens of one answer that follow each other, between which it was preempted, sent from one
    replica to another, or delayed by prompts before its second token.
    """

    arrival_s: Floats
    first_scheduled_s: Floats
    first_token_s: Floats
    finished_s: Floats
    input_tokens: npt.NDArray[np.int64]
    output_tokens: Ints
    cached_tokens: Ints
    preemptions: Ints
    prefill_replica: Ints
    replica: Ints
    refused: npt.NDArray[np.int8]
    reasons: tuple[str, ...]
    runs: Runs
    #: KV blocks of one rank of each replica, and tokens in one.
    kv_capacity_blocks: tuple[int, ...]
    block_size: int
    about: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    breaks_s: Floats = field(default_factory=lambda: np.empty((0, 2)))

    def __post_init__(self) -> None:
        for column in fields(self):
            value = getattr(self, column.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def served(self) -> npt.NDArray[np.bool_]:
        """Which requests were served (requests,)."""
        return np.asarray(self.refused == 0)

    @property
    def refusals(self) -> dict[str, int]:
        """How many requests were refused, by reason.

        Reasons nobody was refused for are left out.
        """
        counts = np.bincount(self.refused, minlength=len(self.reasons))
        return {why: int(n) for why, n in zip(self.reasons[1:], counts[1:], strict=True) if n}

    @property
    def end_s(self) -> float:
        """When the last iteration ends."""
        return float(self.runs.end_s.max()) if len(self.runs) else 0.0

    def to_timeline(
        self, *, most_requests: int = 100, most_runs: int = 100_000, about: Mapping[str, str] | None = None
    ) -> Timeline:
        """Lanes of replicas with their runs of iterations, of `most_requests` requests with their phases, and counters.

        Requests are taken evenly from all that were served; a replica's runs from its first on, `most_runs` in all.
        `about` says more of where it is from: its ``workload`` and ``device`` make its title.
        """
        runs, chosen = self.runs, np.flatnonzero(self.served)
        if len(chosen) > most_requests:
            chosen = chosen[np.linspace(0, len(chosen) - 1, max(most_requests, 0)).round().astype(np.int64)]
        shown = np.sort(np.argsort(runs.start_s, kind="stable")[:most_runs])
        replicas = runs.replica[shown].tolist()
        dp = int(runs.rank.max(initial=0)) + 1
        where = [
            f"replica {replica}" + (f" rank {rank}" if dp > 1 else "")
            for replica, rank in zip(replicas, runs.rank[shown].tolist(), strict=True)
        ]
        prefill, decode = runs.prefill_seqs[shown] > 0, runs.decode_seqs[shown] > 0
        kinds = np.where(prefill, np.where(decode, "mixed", "prefill"), "decode").tolist()
        lanes = list(dict.fromkeys(sorted(where, key=lambda text: [int(w) for w in text.split() if w.isdigit()])))
        starts, durations = [runs.start_s[shown]], [runs.end_s[shown] - runs.start_s[shown]]
        names, args = list(kinds), {"decode_seqs": [runs.decode_seqs[shown].astype(np.float64)]}
        args["prefill_tokens"] = [runs.prefill_tokens[shown].astype(np.float64)]
        args["iterations"] = [runs.iterations[shown].astype(np.float64)]
        phases = (
            ("wait", self.arrival_s, self.first_scheduled_s),
            ("prompt", self.first_scheduled_s, self.first_token_s),
            ("answer", self.first_token_s, self.finished_s),
        )
        for phase, since, until in phases:
            starts.append(since[chosen])
            durations.append(np.maximum(until[chosen] - since[chosen], 0.0))
            names += [phase] * len(chosen)
            kinds += ["request"] * len(chosen)
            where += [f"request {index}" for index in chosen.tolist()]
            for columns in args.values():
                columns.append(np.full(len(chosen), np.nan))
        lanes += [f"request {index}" for index in chosen.tolist()]
        counters = []
        for at, lane in enumerate(lanes[: len(lanes) - len(chosen)]):
            mine = shown[np.asarray(where[: len(shown)]) == lane] if at < 16 else shown[:0]
            start, end = runs.start_s[mine], runs.end_s[mine]
            pauses = end[np.append(start[1:] > end[:-1] + 1e-9, True)] if len(mine) else end
            times = np.concatenate((start, pauses))
            order = np.argsort(times, kind="stable")
            for name, unit, column in (
                ("KV blocks", "blocks", runs.kv_blocks),
                ("running", "sequences", runs.running),
                ("waiting", "sequences", runs.waiting),
            ):
                if len(mine):  # a level holds until the next run, or until nothing runs
                    value = np.concatenate((column[mine].astype(np.float64), np.zeros(len(pauses))))
                    counters.append(Counter(f"{name}, {lane}", unit, times[order], value[order]))
        return Timeline.of(
            lane=where,
            start_s=np.concatenate(starts),
            duration_s=np.concatenate(durations),
            name=names,
            kind=kinds,
            args={key: np.concatenate(columns) for key, columns in args.items()},
            lanes=lanes,
            counters=counters,
            about={**self.about, **(about or {})},
        )
