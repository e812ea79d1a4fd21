"""Round robin."""

from __future__ import annotations

from foretell.simulate.serving.engine.router import ROUTERS, Routing
from foretell.simulate.serving.engine.sequence import Seq


@ROUTERS.add("round-robin", source="common")
def round_robin(seq: Seq, routing: Routing) -> int:
    """One after the other."""
    return routing.sent % len(routing.loads)
