"""`Operation`: what a layer does, by what bounds it; and how long a layer takes at the very least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foretell.errors import InputError, unknown
from foretell.simulate.serving.nanoflow.sharing import KINDS, Sharing

__all__ = ["Operation", "check", "lower_bound_s", "sequential_s"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a layer, on the rows ``start`` to ``stop`` of the batch (shares of it, 0 to 1).

    Alone on the device it takes ``fixed_s + work_s`` on all its rows; on a part of them `fixed_s` (weights read again,
    tiles that do not fill up, a collective's latency) and that part of `work_s`. It follows the operations `after` on
    the rows that they share; one that follows nothing follows the layer before.
    """

    name: str
    kind: str
    work_s: float
    fixed_s: float = 0.0
    after: tuple[str, ...] = ()
    start: float = 0.0
    stop: float = 1.0

    def time_s(self, low: float, high: float) -> float:
        """Seconds alone on the device, for the rows between `low` and `high` of the batch.

        >>> Operation("attention", "memory", work_s=4.0, fixed_s=1.0, stop=0.5).time_s(0.25, 1.0)
        3.0
        """
        rows = min(high, self.stop) - max(low, self.start)
        return 0.0 if rows <= 0.0 else self.fixed_s + self.work_s * rows / (self.stop - self.start)


def check(operations: Sequence[Operation]) -> None:
    """Raises InputError for operations that make no layer, unknown kinds and names."""
    names: list[str] = []
    if not operations:
        raise InputError("a layer without operations", "nanoflow", "give one at least")
    for operation in operations:
        where = f"operation {operation.name!r}"
        if operation.kind not in KINDS:
            raise unknown("kind of operation", operation.kind, KINDS)
        if operation.name in names:
            raise InputError("two operations have this name", where, "rename one")
        for name in operation.after:
            if name not in names:
                raise InputError(f"follows {name!r}, which is not before it", where, "list operations in their order")
        if not (operation.work_s >= 0.0 and operation.fixed_s >= 0.0):
            raise InputError(f"takes {operation.fixed_s} s + {operation.work_s} s", where, "times are 0 or more")
        if not 0.0 <= operation.start < operation.stop <= 1.0:
            raise InputError(f"rows {operation.start} to {operation.stop}", where, "give rising shares of the batch")
        names.append(operation.name)


def sequential_s(operations: Sequence[Operation]) -> float:
    """Seconds of a layer whose operations run one after the other on the whole batch."""
    return sum(operation.fixed_s + operation.work_s for operation in operations)


def lower_bound_s(operations: Sequence[Operation], sharing: Sharing | None = None) -> float:
    """Seconds of a layer that no schedule comes below.

    The fullest resource is busy that long, whatever overlaps. With `sharing` also: all operations together need that
    much of the device, each at the share where it needs least; this is what interference leaves to be won.
    """
    each = [op.fixed_s + op.work_s for op in operations]
    bound = max(sum(t for t, op in zip(each, operations, strict=True) if op.kind == kind) for kind in KINDS)
    if sharing is not None:
        bound = max(bound, sum(t * sharing.cheapest(op.kind) for t, op in zip(each, operations, strict=True)))
    return bound
