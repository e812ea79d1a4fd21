"""Networks for training: what a job sends to whom, and what a fabric that carries just that costs.

`traffic` derives who sends how much to whom in a step; `clos` and `rail_only` count the switches and transceivers of
two fabrics; `compare` says what a step loses without a spine. Rail-only is the network of Wang, Ghobadi, Shakeri, Zhang
and Hasani (arXiv 2307.12169): devices with the same place in their high-bandwidth domain (a node, or a rack of NVLink)
form a rail, switches join a rail only, and what must cross rails is forwarded inside a domain.

>>> usual, rails = clos(32768, radix=128), rail_only(32768, domain=256, radix=128)
>>> usual.tiers, usual.switches, rails.tiers, rails.switches
(3, 1280, 1, 256)
>>> round(1 - rails.cost_usd() / usual.cost_usd(), 3)
0.748
"""

from foretell.plan.network.bill import Bill, Powers, Prices, clos, rail_only
from foretell.plan.network.flows import KINDS, Traffic, traffic
from foretell.plan.network.forwarding import Comparison, Wires, compare

__all__ = [
    "KINDS",
    "Bill",
    "Comparison",
    "Powers",
    "Prices",
    "Traffic",
    "Wires",
    "clos",
    "compare",
    "rail_only",
    "traffic",
]
