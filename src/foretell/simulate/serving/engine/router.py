"""The family of routers: which of several replicas a request goes to."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from foretell.simulate.serving.engine.family import Registry
from foretell.simulate.serving.engine.sequence import Seq

__all__ = ["ROUTERS", "Router", "Routing"]


@dataclass(slots=True)
class Routing:
    """What a router sees and remembers. `loads` are requests at each replica, waiting or running."""

    loads: list[int]
    rng: random.Random
    sent: int = 0
    #: Where requests of a prefix went last.
    homes: dict[int, int] = field(default_factory=dict)

    def least(self) -> int:
        """The replica with the fewest requests, the first among equals."""
        return self.loads.index(min(self.loads))


Router = Callable[[Seq, Routing], int]
#: Routers: ``route(sequence, routing)`` returns the index of a replica.
ROUTERS: Registry[Router] = Registry("router", "foretell.simulate.serving.engine.routing")
