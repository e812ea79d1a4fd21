"""How fast kernels run side by side: performance P of each kind at a share R of the device.

R is counted in tenths of what a matrix product would make of the device, so that a product given R runs at P = R by
definition. Products that give up a fifth of their speed leave R = 0.2, and what a kernel of another kind makes of that
is its P: more than a fifth, as it does not live on arithmetic. Shares of all that runs at one time sum to 1 at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from foretell.errors import InputError

__all__ = ["A100", "KINDS", "PAPER", "TENTHS", "Sharing"]

#: What an operation is bound by; of each kind one runs at a time.
KINDS = ("compute", "memory", "network")
#: Shares are handed out in tenths, as the published tables are.
TENTHS = 10


@dataclass(frozen=True, slots=True)
class Sharing:
    """Performance by kind and share: eleven values, for R = 0, 0.1 … 1, from 0 up to 1, never falling."""

    performance: Mapping[str, tuple[float, ...]]
    source: str

    def __post_init__(self) -> None:
        for kind in KINDS:
            values = self.performance.get(kind, ())
            if len(values) != TENTHS + 1:
                raise InputError(f"{len(values)} values of {kind} performance", "sharing", f"give {TENTHS + 1}")
            if values[0] != 0.0 or values[-1] != 1.0 or any(b < a for a, b in pairwise(values)):
                raise InputError(f"{kind} performance {values} does not rise from 0 to 1", "sharing")
            if values[1] <= 0.0:
                raise InputError(f"{kind} performance at a tenth is 0", "sharing", "give it some")

    def of(self, kind: str, tenths: int) -> float:
        """P of an operation of `kind` that is given so many tenths of the device (1 to 10).

        >>> A100.of("memory", 4), A100.of("network", 1), A100.of("compute", 8)
        (0.6, 0.4, 0.8)
        """
        return self.performance[kind][tenths]

    def cheapest(self, kind: str) -> float:
        """Least R / P: what part of the device's time an operation of `kind` takes for each second alone."""
        return min(share / TENTHS / self.performance[kind][share] for share in range(1, TENTHS + 1))


_PRODUCTS = tuple(share / TENTHS for share in range(TENTHS + 1))

#: The tables that NanoFlow's own search reads: A100, batched GEMV of decode attention, NCCL-like collectives with few
#: thread blocks. Above R = 0.5 the network's is not given; it is drawn to 1 in equal steps.
A100 = Sharing(
    MappingProxyType({
        "compute": _PRODUCTS,
        "memory": (0.0, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0),
        "network": (0.0, 0.4, 0.6, 0.7, 0.8, 0.9, 0.92, 0.94, 0.96, 0.98, 1.0),
    }),
    "efeslab/Nanoflow, autosearch/trace/gemv_interference.csv and net_interference.csv (commit d1bbe277)",
)

#: The table printed in the paper, which has R = 0.1, 0.2, 0.8 and 0.9, and decode attention at 0.4 in the text of its
#: figure 6 (P = 0.8); between them straight lines.
PAPER = Sharing(
    MappingProxyType({
        "compute": _PRODUCTS,
        "memory": (0.0, 0.2, 0.3, 0.55, 0.8, 0.8125, 0.825, 0.8375, 0.85, 0.95, 1.0),
        "network": (0.0, 0.3, 0.5, 0.5667, 0.6333, 0.7, 0.7667, 0.8333, 0.9, 1.0, 1.0),
    }),
    "Zhu et al., OSDI 2025, table 3 and section 4.1.4",
)
