"""`Times`: how long each piece of work of a pipeline takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError

__all__ = ["Times"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one micro-batch on each chunk of each rank, (pp, vp), and of what is sent.

    `backward_s` is the whole backward pass; `weights_s` is the part of it that makes gradients of weights, which only
    schedules with a split backward pass (``W``) can move. `p2p_s` is the time of a message between two ranks, by
    sender and receiver: (pp, pp). `gather_s` and `reduce_s` are what data-parallel ranks exchange once a step for each
    chunk: its parameters before its first forward, its gradients after its last backward. They go in as many equal
    pieces as `pieces`, (pp, vp), says (a chunk's layers, say): a chunk's first forward can begin with the first piece,
    and its last backward completes gradients piece by piece. Build with `Times.of`.
    """

    forward_s: Floats
    backward_s: Floats
    weights_s: Floats
    p2p_s: Floats
    gather_s: Floats
    reduce_s: Floats
    pieces: Floats

    @staticmethod
    def of(
        forward_s: npt.ArrayLike,
        backward_s: npt.ArrayLike,
        *,
        pp: int | None = None,
        vp: int | None = None,
        weights_s: npt.ArrayLike | None = None,
        p2p_s: npt.ArrayLike = 0.0,
        gather_s: npt.ArrayLike = 0.0,
        reduce_s: npt.ArrayLike = 0.0,
        pieces: npt.ArrayLike = 1,
    ) -> Times:
        """Times given as (pp, vp), as (pp,) for chunks alike, or as one number for all.

        `weights_s` is half the backward pass where it is not given (a matrix product has as much arithmetic for its
        weights as for its input). `p2p_s` is one number, (pp,) by sender, or (pp, pp). Raises InputError for another
        shape, a negative time or one that is not finite, weights_s above backward_s, and less than one piece.

        >>> Times.of([0.01, 0.02], 0.04, vp=2).forward_s.tolist()
        [[0.01, 0.01], [0.02, 0.02]]
        """
        given = {
            "forward_s": np.asarray(forward_s, dtype=np.float64),
            "backward_s": np.asarray(backward_s, dtype=np.float64),
            "gather_s": np.asarray(gather_s, dtype=np.float64),
            "reduce_s": np.asarray(reduce_s, dtype=np.float64),
            "pieces": np.asarray(pieces, dtype=np.float64),
        }
        if weights_s is not None:
            given["weights_s"] = np.asarray(weights_s, dtype=np.float64)
        ranks = pp or max((a.shape[0] for a in given.values() if a.ndim), default=1)
        chunks = vp or max((a.shape[1] for a in given.values() if a.ndim == 2), default=1)
        full = {name: _shaped(name, array, (ranks, chunks)) for name, array in given.items()}
        weights = full.setdefault("weights_s", full["backward_s"] / 2)
        if (weights > full["backward_s"]).any():
            raise InputError("weights_s is a part of backward_s and exceeds it", "pipeline times")
        if (full["pieces"] < 1.0).any():
            raise InputError("less than one piece", "pipeline times", "give 1 or more")
        p2p = np.asarray(p2p_s, dtype=np.float64)
        return Times(p2p_s=_shaped("p2p_s", p2p, (ranks, ranks)), **full)

    @property
    def pp(self) -> int:
        """Ranks of the pipeline."""
        return int(self.forward_s.shape[0])

    @property
    def vp(self) -> int:
        """Chunks of each rank."""
        return int(self.forward_s.shape[1])

    def of_kind(self, kind: str, splits: bool) -> Floats:
        """Seconds of the tasks of a kind (``F``, ``B``, ``W``), (pp, vp)."""
        if kind == "F":
            return self.forward_s
        if kind == "W":
            return self.weights_s
        return self.backward_s - self.weights_s if splits else self.backward_s


def _shaped(name: str, array: Floats, shape: tuple[int, int]) -> Floats:
    if not np.isfinite(array).all() or (array < 0.0).any():
        raise InputError(f"{name} holds a time that is negative or not finite", "pipeline times", "give seconds ≥ 0")
    if array.ndim == 1 and len(array) == shape[0]:
        array = array[:, None]
    fits = array.ndim == 0 or (array.ndim == 2 and array.shape[0] == shape[0] and array.shape[1] in (1, shape[1]))
    if not fits:
        raise InputError(
            f"{name} has shape {array.shape}", "pipeline times", f"give one number, {shape[:1]} or {shape}"
        )
    result = np.array(np.broadcast_to(array, shape))
    result.flags.writeable = False
    return result
