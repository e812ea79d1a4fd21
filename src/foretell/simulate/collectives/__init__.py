"""Collectives over a described topology: which algorithm, how long, and what is in the way."""

from foretell.simulate.collectives.fabric import Fabric, Route, bus_factor
from foretell.simulate.collectives.family import KINDS, algorithm, algorithms, member

__all__ = ["KINDS", "Fabric", "Route", "algorithm", "algorithms", "bus_factor", "member"]
