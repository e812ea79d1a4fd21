"""How sure a simulated share of requests is, though requests that meet in a server fare alike.

Requests that come one after another find the same queue, so a thousand of them tell less than a thousand that know
nothing of each other: an interval for independent trials (Wilson's alone) is several times too narrow. Here the shares
of a number of stretches of time (batch means) say how much the share varies, with a correction for neighbours that
still fare alike, as of an autoregression (as in Skart, Tafazzoli et al., INFORMS Journal on Computing 23, 2011). That
gives as how many independent requests those simulated count, and Wilson's interval is of so many (an effective sample
size, as Korn and Graubard have it for surveys, Survey Methodology 24, 1998): it stays within 0 and 1, and has a width
where all keep the limits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["LEVEL", "independent", "interval", "joined", "needed"]

#: How often an interval holds the share that ever more requests would come to.
LEVEL = 0.95
_Z = 1.95996  # standard errors of a normal distribution to either side for this level
_BATCHES = 20
_T = 2.09302  # standard errors where the spread itself is known from 20 batches (Student's t of 19 degrees)
_MOST_ALIKE = 0.5  # correlation of neighbouring batches at most: where it is more, twenty are too few to tell how much


def independent(kept: npt.NDArray[np.bool_]) -> float:
    """As how many independent requests those count whose outcomes are `kept`, in order of arrival.

    >>> kept = np.random.default_rng(0).random(8000) < 0.9
    >>> 4000 < independent(kept) < 8000
    True
    >>> independent(np.repeat(kept[:400], 20)) < 500  # twenty at a time fare alike
    True
    """
    count = len(kept)
    each = count // _BATCHES
    share = float(kept.mean())
    certain = (_Z / _T) ** 2
    if each < 2 or share in (0.0, 1.0):
        return count * certain
    means = kept[: each * _BATCHES].reshape(_BATCHES, each).mean(axis=1)
    off = means - means.mean()
    spread = float(off @ off)
    if not spread > 0.0:
        return count * certain
    # The estimate from few batches is too low by about one in their number.
    alike = float(np.clip(off[1:] @ off[:-1] / spread + 1.0 / _BATCHES, 0.0, _MOST_ALIKE))
    variance = spread / (_BATCHES - 1) * (1.0 + alike) / (1.0 - alike)
    return count * certain / max(1.0, each * variance / (share * (1.0 - share)))


def interval(share: float, count: float) -> tuple[float, float]:
    """Wilson's interval of a share of `count` independent requests.

    >>> [round(end, 4) for end in interval(0.9, 100)]
    [0.8256, 0.9448]
    >>> [round(end, 4) for end in interval(1.0, 100)]
    [0.963, 1.0]
    """
    z = _Z * _Z / count
    middle = share + z / 2.0
    half = float(np.sqrt(z * (share * (1.0 - share) + z / 4.0)))
    return max(0.0, (middle - half) / (1.0 + z)), min(1.0, (middle + half) / (1.0 + z))


def needed(share: float, low: float, high: float, goal: float) -> float:
    """About how many times the requests would take the interval off a goal in it, if the share stays what it is.

    >>> needed(0.92, 0.88, 0.94, 0.9), needed(0.9, 0.85, 0.93, 0.9)
    (4.0, inf)
    """
    far, wide = abs(share - goal), share - low if share > goal else high - share
    return round((wide / far) ** 2, 6) if far > 0.0 else float("inf")


def joined(parts: Sequence[tuple[float, float, float, float]]) -> tuple[float, float, float]:
    """The share of all, and its interval, of parts simulated by themselves: (weight, share, low, high) each.

    Distances to the ends add up as independent errors do (Zou and Donner, Statistics in Medicine 27, 2008).

    >>> [round(value, 3) for value in joined([(3.0, 0.9, 0.87, 0.92), (1.0, 0.94, 0.9, 0.96)])]
    [0.91, 0.885, 0.926]
    """
    weight, share, low, high = np.array(parts, dtype=np.float64).T
    weight = weight / weight.sum()
    mean = float(weight @ share)
    under, over = (float(np.sqrt(((weight * (share - end)) ** 2).sum())) for end in (low, high))
    return mean, max(0.0, mean - under), min(1.0, mean + over)
