"""`Profiled`: iterations added up from a kernel profile, so that a simulator of engines can be judged alone.

LLMServingSim's profiler (casys-kaist/LLMServingSim, MIT) times each kernel of a layer as one of `tp` ranks runs it:
products and norms by tokens, experts by tokens and by how many experts are hit, the head by sequences, and attention
by the tokens of a prompt's chunk, the cached ones before it, decoding sequences and what each of them has cached.
Values between are linear along each axis. What the profile has not (messages between devices, what the host takes)
is another model's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foretell.accuracy.serving.row import lines
from foretell.errors import InputError
from foretell.simulate.serving import Batch, ServingPlan
from foretell.simulate.serving.iteration.sizes import touched
from foretell.workload.llm import LLMConfig

__all__ = ["Grid", "Profiled"]

Floats = npt.NDArray[np.float64]

#: How often a layer runs each kernel; the others are outside the layers.
IN_LAYER = {
    "layernorm": 2.0,
    "qkv_proj": 1.0,
    "qk_norm": 1.0,
    "rotary_emb": 1.0,
    "o_proj": 1.0,
    "gate_up_proj": 1.0,
    "act_fn": 1.0,
    "down_proj": 1.0,
}
OUTSIDE = ("embedding", "final_layernorm")
_EXPERTS = ("tokens", "activated_experts")
_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


@dataclass(frozen=True)
class Grid:
    """Values at the crossings of knots, linear between them along each axis and beyond the last as before it."""

    knots: tuple[Floats, ...]
    values: Floats

    @staticmethod
    def of(points: Mapping[tuple[float, ...], float], knots: tuple[Floats, ...]) -> Grid:
        """From values at points; crossings that have none continue a line along the last axis that has two before."""
        values = np.full([len(k) for k in knots], np.nan)
        for at in itertools.product(*(range(len(k)) for k in knots)):
            found = points.get(tuple(float(k[i]) for k, i in zip(knots, at, strict=True)))
            if found is not None:
                values[at] = found
        for axis in reversed(range(len(knots))):
            _continued(np.moveaxis(values, axis, 0), knots[axis])
        if np.isnan(values).any():
            raise InputError(f"{int(np.isnan(values).sum())} crossings of its grid have no value", "kernel profile")
        return Grid(knots, values)

    def at(self, *where: Floats) -> Floats:
        """Values at points, (points,)."""
        low, share = [], []
        for knots, x in zip(self.knots, where, strict=True):
            i = np.clip(np.searchsorted(knots, x, side="right") - 1, 0, len(knots) - 2)
            low.append(i)
            share.append((x - knots[i]) / (knots[i + 1] - knots[i]))
        result = np.zeros(len(where[0]))
        for corner in itertools.product((0, 1), repeat=len(low)):
            weight = np.prod([s if c else 1.0 - s for c, s in zip(corner, share, strict=True)], axis=0)
            if np.any(weight):
                result += weight * self.values[tuple(i + c for i, c in zip(low, corner, strict=True))]
        return result


def _continued(values: Floats, knots: Floats) -> None:
    for i in range(2, len(knots)):
        missing = np.isnan(values[i])
        slope = (values[i - 1] - values[i - 2]) / (knots[i - 1] - knots[i - 2])
        line = values[i - 1] + slope * (knots[i] - knots[i - 1])
        values[i] = np.where(missing, np.maximum(line, values[i - 1]), values[i])


@dataclass(frozen=True)
class Profiled:
    """Iterations of one rank of `plan`, in the manner of `foretell.simulate.serving.Iterations`."""

    config: LLMConfig
    plan: ServingPlan
    kv_capacity_tokens: int
    kv_bytes_per_token: float
    by_tokens: tuple[Floats, Floats]
    by_sequences: tuple[Floats, Floats]
    attention: Grid
    experts: Grid | None
    #: Seconds of messages and of the host in each iteration.
    besides: Callable[[Batch], Floats]

    @staticmethod
    def of(
        config: LLMConfig,
        plan: ServingPlan,
        folder: Path,
        *,
        kv_capacity_tokens: int,
        kv_bytes_per_token: float,
        besides: Callable[[Batch], Floats],
    ) -> Profiled:
        """From the tables of one number of tensor-parallel ranks. Raises InputError where one is missing or odd."""
        dense = _curves(folder / "dense.csv.gz", "tokens")
        unknown = [name for name in dense if name not in IN_LAYER and name not in OUTSIDE]
        if unknown:
            raise InputError(f"has layers {', '.join(unknown)[:80]}", str(folder), "say in IN_LAYER how often they run")
        tokens = np.array(sorted(set.union(*(set(curve) for curve in dense.values()))))
        total = np.zeros(len(tokens))
        for name, curve in dense.items():
            times = config.layers * IN_LAYER[name] if name in IN_LAYER else 1.0
            total += times * np.interp(tokens, list(curve), list(curve.values()))
        heads = _curves(folder / "per_sequence.csv.gz", "sequences")
        sequences = np.array(sorted(set.union(*(set(curve) for curve in heads.values()))))
        head = np.zeros(len(sequences))
        for curve in heads.values():
            head += np.interp(sequences, list(curve), list(curve.values()))
        points = {
            tuple(_number(line.text(c)) for c in _ATTENTION): line.number("time_us") * 1e-6
            for line in lines(folder / "attention.csv.gz")
        }
        experts = None
        if config.moe is not None:
            found = {
                tuple(_number(line.text(c)) for c in _EXPERTS): line.number("time_us") * 1e-6
                for line in lines(folder.parent / "tp1" / "moe.csv.gz")
            }
            experts = Grid.of(_whole(found), _axes(found))
        return Profiled(
            config,
            plan,
            kv_capacity_tokens,
            kv_bytes_per_token,
            (tokens, total),
            (sequences, head),
            _attention(points),
            experts,
            besides,
        )

    def time_s(self, batch: Batch) -> Floats:
        """Seconds of each iteration, (iterations,)."""
        rows = batch.tokens
        seconds = _read(self.by_tokens, rows) + _read(self.by_sequences, batch.sampled)
        seconds += self.config.layers * self._attended(batch)
        if self.experts is not None and self.config.moe is not None:
            seconds += self.config.layers * self._routed(batch)
        return np.where(rows > 0.0, seconds + self.besides(batch), 0.0)

    def _attended(self, batch: Batch) -> Floats:
        """One layer's attention: one chunk of a mean prompt beside the decoding sequences, and the others alone."""
        prompts = np.maximum(batch.prefill_seqs, 1.0)
        chunk = batch.prefill_tokens / prompts
        before = np.where(chunk > 0.0, batch.prefill_pairs / np.maximum(batch.prefill_tokens, 1.0) - chunk / 2.0, 0.0)
        n = batch.decode_seqs
        cached = np.where(n > 0.0, batch.decode_tokens / np.maximum(n, 1.0) + 1.0, 0.0)
        before, none = np.maximum(before, 0.0), np.zeros(len(n))
        seconds = self.attention.at(chunk, before, n, cached)
        return seconds + (prompts - 1.0) * self.attention.at(chunk, before, none, none)

    def _routed(self, batch: Batch) -> Floats:
        """One layer's experts of one rank, which get the tokens of all ranks."""
        moe, ep = self.config.moe, self.plan.ep
        assert moe is not None
        assert self.experts is not None
        everywhere = batch.rank_tokens * self.plan.dp
        hit = touched(moe.experts, moe.top_k, everywhere) / ep
        return self.experts.at(everywhere / ep, hit)


def _read(curve: tuple[Floats, Floats], x: Floats) -> Floats:
    """A curve at x, as a line beyond its end."""
    knots, values = curve
    beyond = np.maximum(x - knots[-1], 0.0) * (values[-1] - values[-2]) / (knots[-1] - knots[-2])
    return np.asarray(np.interp(x, knots, values) + beyond)


def _number(text: str) -> float:
    if not text.isdecimal():
        raise InputError(f"{text[:40]!r} is no count", "kernel profile", "use the table as published")
    return float(text)


def _curves(path: Path, column: str) -> dict[str, dict[float, float]]:
    found: dict[str, dict[float, float]] = {}
    for line in lines(path):
        found.setdefault(line.text("layer"), {})[_number(line.text(column))] = line.number("time_us") * 1e-6
    if not found:
        raise InputError("has no line", str(path), "use the table as published")
    return {name: dict(sorted(curve.items())) for name, curve in found.items()}


def _axes(points: Mapping[tuple[float, ...], float]) -> tuple[Floats, ...]:
    return tuple(np.array(sorted({point[i] for point in points})) for i in range(len(next(iter(points)))))


def _whole(points: Mapping[tuple[float, ...], float]) -> dict[tuple[float, ...], float]:
    """With values for more experts than so few tokens can hit, which grow as for the next number of tokens that can."""
    result = dict(points)
    tokens, hit = _axes(points)
    for m, more in reversed(list(itertools.pairwise(tokens))):
        most = max(k for t, k in points if t == m)
        for k in hit[hit > most]:
            result[float(m), float(k)] = result[m, most] + result[more, k] - result[more, most]
    return result


def _attention(points: Mapping[tuple[float, ...], float]) -> Grid:
    """The grid of powers of two. Without a chunk, or without a sequence, what is cached for it does not matter."""
    axes = tuple(np.array([x for x in axis if x == 0.0 or np.log2(x) % 1.0 == 0.0]) for axis in _axes(points))
    full = dict(points)
    full[0.0, 0.0, 0.0, 0.0] = 0.0
    for chunk, before, n, cached in itertools.product(*axes):
        key = (float(chunk), float(before), float(n), float(cached))
        alike = (
            key[0],
            key[1] if chunk else 0.0,
            key[2],
            0.0 if not n else max(key[3], float(axes[3][1])),
        )
        if alike in full:
            full[key] = full[alike]
    return Grid.of(full, axes)
