"""NVLink SHARP: the NVSwitch reduces and multicasts, so a rank sends its data once and reads the sum once."""

from __future__ import annotations

import numpy as np

from foretell.simulate.collectives.fabric import Fabric
from foretell.simulate.collectives.family import Leg, algorithm, levels
from foretell.simulate.collectives.groups import Floats, Groups
from foretell.simulate.collectives.methods.tree import between_nodes

SOURCE = "Klenk et al., An in-network architecture for accelerating shared-memory multiprocessor collectives, ISCA 2020"


@algorithm("nvls", kinds=("all_reduce",), source=SOURCE, multiprocessors=16)
def nvls(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats:
    """Each rank reads its share reduced by the switch and multicasts it; between nodes, the shares take two trees."""
    rates = fabric.node_rates
    if rates is None or not has_nvls(fabric.node_kind):
        return np.full_like(nbytes, np.inf)
    local = groups.local
    # Through a port: the other ranks read all of the buffer, and the sums of all shares come back, each 1/local.
    sent = nbytes * (1 + 1 / local)
    near = Leg(rates.curve("nvls", kind), np.full_like(nbytes, 2.0), sent, nbytes, groups.ring_rate)
    far = None if fabric.network_rates is None else between_nodes(kind, nbytes, groups, fabric)
    return np.where(local > 2, levels(near, far, groups), np.inf)


def has_nvls(kind: str | None) -> bool:
    """Whether this kind of link reduces in its switches: NVSwitch from its third generation, of NVLink 4, on."""
    if kind is None or not kind.startswith("nvlink-") or not kind.endswith("-nvswitch"):
        return False
    return kind.split("-")[1].isdigit() and int(kind.split("-")[1]) >= 4
