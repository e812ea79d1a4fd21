"""Least loaded."""

from __future__ import annotations

from foretell.simulate.serving.engine.router import ROUTERS, Routing
from foretell.simulate.serving.engine.sequence import Seq


@ROUTERS.add("least-loaded", source="common")
def least_loaded(seq: Seq, routing: Routing) -> int:
    """The replica with the fewest requests."""
    return routing.least()
