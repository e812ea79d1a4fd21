"""How long requests are: fixed, lognormal, drawn from a trace, or from a distribution fitted to one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.simulate.serving.given import instance, wholes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

__all__ = ["Lengths", "parse_lengths"]

_MOST = 10_000_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """A way to draw input and output tokens, each (count,), and what it is in words."""

    draw: Callable[[int, np.random.Generator], tuple[Ints, Ints]]
    about: str

    @staticmethod
    def resampled(input_tokens: Ints, output_tokens: Ints, name: str) -> Lengths:
        """Pairs of lengths drawn from those of a trace, with replacement."""
        input_tokens, output_tokens = _pairs(input_tokens, output_tokens)

        def draw(count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
            rows = rng.integers(0, len(input_tokens), count)
            return input_tokens[rows], output_tokens[rows]

        return Lengths(draw, f"drawn from {name}")

    @staticmethod
    def fitted(input_tokens: Ints, output_tokens: Ints, name: str) -> Lengths:
        """A lognormal distribution of both lengths together, by the moments of a trace's logarithms."""
        input_tokens, output_tokens = _pairs(input_tokens, output_tokens)
        logs = np.log(np.stack([input_tokens, output_tokens]).astype(np.float64))
        mean = logs.mean(axis=1)
        spread = np.cov(logs, ddof=0)

        def draw(count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
            both = np.exp(rng.multivariate_normal(mean, spread, count, method="eigh"))
            asked, answered = np.clip(np.rint(both), 1, _MOST).astype(np.int64).T
            return asked, answered

        medians, sigmas = np.exp(mean), np.sqrt(np.diag(spread))
        rho = float(spread[0, 1] / max(sigmas[0] * sigmas[1], 1e-12))
        return Lengths(
            draw,
            f"lognormal, fitted to {name}: medians {medians[0]:.0f} and {medians[1]:.0f} tokens, sigma {sigmas[0]:.2f} "
            f"and {sigmas[1]:.2f}, correlation {rho:.2f}",
        )


def _pairs(input_tokens: npt.ArrayLike, output_tokens: npt.ArrayLike) -> tuple[Ints, Ints]:
    asked, answered = (wholes(side, name, "lengths") for side, name in
                       ((input_tokens, "input_tokens"), (output_tokens, "output_tokens")))  # fmt: skip
    if asked.ndim != 1 or asked.shape != answered.shape or not len(asked) or min(asked.min(), answered.min()) < 1:
        what = f"input_tokens of shape {asked.shape}, output_tokens of {answered.shape}"
        raise InputError(what, "lengths", "give columns of one length, with 1 token or more a row")
    return asked, answered


def parse_lengths(isl: str, osl: str) -> Lengths:
    """Lengths from text: ``1024`` tokens, or ``lognormal:MEAN:CV``, for input and output.

    >>> parse_lengths("1024", "lognormal:256:0.5").about
    'input 1,024 tokens, output lognormal of mean 256 tokens and variation 0.5'
    """
    asked, about_asked = _side(isl, "--isl")
    answered, about_answered = _side(osl, "--osl")
    return Lengths(
        lambda count, rng: (asked(count, rng), answered(count, rng)), f"input {about_asked}, output {about_answered}"
    )


def _side(text: str, where: str) -> tuple[Callable[[int, np.random.Generator], Ints], str]:
    repair = "write tokens, e.g. 1024, or lognormal:MEAN:CV"
    name, *values = instance(text, str, "a length", where, "a text, e.g. 1024").strip().split(":")
    try:
        if name == "lognormal" and len(values) == 2:
            mean, cv = map(float, values)
            if not (1 <= mean <= _MOST and 0 <= cv <= 100):
                raise InputError(f"mean {mean:g} or variation {cv:g} out of range", where, repair)
            sigma = math.sqrt(math.log1p(cv * cv))
            mu = math.log(mean) - sigma * sigma / 2

            def lognormal(count: int, rng: np.random.Generator) -> Ints:
                return np.clip(np.rint(rng.lognormal(mu, sigma, count)), 1, _MOST).astype(np.int64)

            return lognormal, f"lognormal of mean {mean:,g} tokens and variation {cv:g}"
        tokens = int(text)
    except ValueError:
        raise InputError(f"{text[:40]!r} is no length", where, repair) from None
    if not 1 <= tokens <= _MOST:
        raise InputError(f"{tokens:,} tokens", where, f"give 1 to {_MOST:,}")
    return lambda count, rng: np.full(count, tokens, dtype=np.int64), f"{tokens:,} tokens"
