"""DeepEP: the all-to-all of mixture-of-experts layers, each token sent once a node and forwarded there."""

from __future__ import annotations

import numpy as np

from foretell.simulate.collectives.experts import exchange_s
from foretell.simulate.collectives.fabric import Fabric
from foretell.simulate.collectives.family import algorithm
from foretell.simulate.collectives.groups import Floats, Groups

SOURCE = "DeepSeek-AI, DeepEP, 2025, normal kernels"
#: What a plain all-to-all does not say: how many experts a token goes to, out of how many (DeepSeek-V3's), and in what
#: pieces; only the first matters much.
TOPK, EXPERTS, TOKEN_BYTES = 8, 256, 7168


@algorithm("deepep", kinds=("all_to_all",), source=SOURCE, auto=False)
def deepep(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats:
    """Bytes are those of every copy of every token, eight each; `experts.exchange_s` takes the routing itself."""
    if fabric.node_rates is None:
        return np.full_like(nbytes, np.inf)
    return exchange_s(
        fabric,
        "dispatch",
        nbytes / (TOPK * TOKEN_BYTES),
        TOKEN_BYTES,
        TOPK,
        np.maximum(EXPERTS, groups.size),
        groups.size,
        groups.stride,
        value_bytes=1.0,
    )
