"""NVLink SHARP: the NVSwitch reduces and multicasts, so a rank sends its data once and reads the sum once."""

from __future__ import annotations

import numpy as np

from foretell.simulate.collectives.fabric import Fabric
from foretell.simulate.collectives.family import PASSES, algorithm, seconds
from foretell.simulate.collectives.groups import Floats, Groups

SOURCE = "Klenk et al., An in-network architecture for accelerating shared-memory multiprocessor collectives, ISCA 2020"


@algorithm("nvls", kinds=("all_reduce",), source=SOURCE)
def nvls(kind: str, nbytes: Floats, groups: Groups, fabric: Fabric, /) -> Floats:
    """Each rank reads its share reduced by the switch and multicasts it; between nodes, the shares take a ring."""
    rates = fabric.node_rates
    if rates is None or not has_nvls(fabric.node_kind):
        return np.full_like(nbytes, np.inf)
    local = groups.local
    # Through a port: the other ranks read all of the buffer, and the sums of all shares come back, each 1/local.
    sent = nbytes * (1 + 1 / local)
    time = seconds(rates.curve("nvls", kind), np.full_like(nbytes, 2.0), sent, nbytes, groups.ring_rate)
    if fabric.network_rates is not None:
        outside_sent = PASSES[kind] * nbytes * (groups.nodes - 1) / groups.nodes
        rate = np.minimum(groups.node_rate, groups.leaf * groups.spine_rate)
        steps = 2 * np.ceil(np.log2(np.maximum(groups.nodes, 2)))
        outside = seconds(fabric.network_rates.curve("tree", kind), steps, outside_sent, nbytes, rate)
        time = np.where(groups.across, np.maximum(time, outside), time)
    return np.where(local > 2, time, np.inf)


def has_nvls(kind: str | None) -> bool:
    """Whether this kind of link reduces in its switches: NVSwitch from its third generation, of NVLink 4, on."""
    if kind is None or not kind.startswith("nvlink-") or not kind.endswith("-nvswitch"):
        return False
    return kind.split("-")[1].isdigit() and int(kind.split("-")[1]) >= 4
