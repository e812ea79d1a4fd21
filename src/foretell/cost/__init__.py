"""What a graph costs on a device: time, memory, energy, money.

>>> from foretell.cost import models
>>> "roofline" in models()
True
"""

from foretell.cost.estimate import BOUNDS, MEMORY_PARTS, Estimate, Memory, OpEstimates
from foretell.cost.explain import explain
from foretell.cost.model import RUNTIMES, CostModel, OpTimes, Settings, Step, models
from foretell.cost.predict import estimate
from foretell.cost.program import Program, lower

__all__ = [
    "BOUNDS",
    "MEMORY_PARTS",
    "RUNTIMES",
    "CostModel",
    "Estimate",
    "Memory",
    "OpEstimates",
    "OpTimes",
    "Program",
    "Settings",
    "Step",
    "estimate",
    "explain",
    "lower",
    "models",
    "peak_memory",
]


def __getattr__(name: str) -> object:
    if name == "peak_memory":
        from foretell.cost.memory import peak_memory

        return peak_memory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
