"""SHARP: InfiniBand switches reduce on the way up and multicast on the way down."""

from __future__ import annotations

import numpy as np

from foretell.simulate.collectives.fabric import Fabric
from foretell.simulate.collectives.family import Leg, algorithm, seconds
from foretell.simulate.collectives.groups import Floats, Groups

SOURCE = "Graham et al., Scalable hierarchical aggregation protocol (SHArP), COM-HPC 2016"


@algorithm("sharp", kinds=("all_reduce",), source=SOURCE)
def sharp(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats:
    """Scattered within the node, sent once up to the switches, which send the sum down; gathered within the node."""
    if not fabric.sharp or fabric.network_rates is None or fabric.network_kind != "infiniband":
        return np.full_like(nbytes, np.inf)
    # Each node sends the data once and gets the sum once, whatever the number of nodes: half a ring's traffic.
    tiers = np.where(groups.leaves > 1, 2.0, 1.0)
    curve = fabric.network_rates.curve("sharp", kind)
    time = seconds(Leg(curve, 2 * tiers, nbytes, nbytes, groups.node_rate))
    if fabric.node_rates is not None:
        sent = nbytes * (groups.local - 1) / groups.local
        for half in ("reduce_scatter", "all_gather"):
            curve = fabric.node_rates.curve("ring", half)
            inside = seconds(Leg(curve, groups.local - 1, sent, nbytes, groups.ring_rate))
            time = time + np.where(groups.local > 1, inside, 0.0)
    return np.where(groups.across, time, np.inf)
