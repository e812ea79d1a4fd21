"""NanoFlow: a batch cut into nano-batches, so that what waits for memory or the network overlaps what computes.

>>> layer = (
...     Operation("products", "compute", work_s=6.0),
...     Operation("attention", "memory", work_s=3.0, after=("products",)),
... )
>>> found = search(layer)
>>> found.sequential_s, found.lower_bound_s, found.interference_bound_s
(9.0, 6.0, 7.2)
>>> 7.2 <= found.layer_s < 9.0, found.pipeline.nano_batches
(True, 2)
"""

from foretell.simulate.serving.nanoflow.engine import NanoFlow, layer_of
from foretell.simulate.serving.nanoflow.operations import Operation, lower_bound_s, sequential_s
from foretell.simulate.serving.nanoflow.schedule import Pipeline
from foretell.simulate.serving.nanoflow.search import Found, exhaustive, layer_s, search
from foretell.simulate.serving.nanoflow.sharing import A100, KINDS, PAPER, Sharing
from foretell.simulate.serving.nanoflow.steady import steady

__all__ = [
    "A100",
    "KINDS",
    "PAPER",
    "Found",
    "NanoFlow",
    "Operation",
    "Pipeline",
    "Sharing",
    "exhaustive",
    "layer_of",
    "layer_s",
    "lower_bound_s",
    "search",
    "sequential_s",
    "steady",
]
