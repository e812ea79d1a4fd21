"""The better of two."""

from __future__ import annotations

from foretell.simulate.serving.engine.router import ROUTERS, Routing
from foretell.simulate.serving.engine.sequence import Seq


@ROUTERS.add("two-choices", source="Mitzenmacher, IEEE TPDS 12 (2001)")
def two_choices(seq: Seq, routing: Routing) -> int:
    """Of two replicas drawn at random, the one with fewer requests."""
    count = len(routing.loads)
    one, other = routing.rng.randrange(count), routing.rng.randrange(count)
    return min(one, other, key=lambda index: (routing.loads[index], index))
