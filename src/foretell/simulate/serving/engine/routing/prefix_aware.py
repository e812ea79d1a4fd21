"""Prefix-aware: where the prefix is cached, unless that replica has too much to do."""

from __future__ import annotations

from foretell.simulate.serving.engine.router import ROUTERS, Routing
from foretell.simulate.serving.engine.sequence import Seq

#: Defaults of the cache-aware policy of SGLang's router: the share of a prompt that has to be cached, and from which
#: differences (absolute and relative) between loads on these count alone.
SHARE = 0.5
FAR_APART, TIMES = 32, 1.0001


@ROUTERS.add("prefix-aware", source="SGLang router, cache_aware policy")
def prefix_aware(seq: Seq, routing: Routing) -> int:
    """Where its prefix went last if that is half the prompt and loads are even; else the least loaded."""
    most, least = max(routing.loads), min(routing.loads)
    if not seq.prefix_tokens:
        return routing.least()
    home = routing.homes.get(seq.prefix)
    uneven = most - least > FAR_APART and most > TIMES * least
    if home is None or uneven or seq.prefix_tokens < SHARE * seq.inputs:
        home = routing.least()
    routing.homes[seq.prefix] = home
    return home
