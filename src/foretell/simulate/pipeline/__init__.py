"""Pipelines: the order in which ranks work through micro-batches, what that takes of time and memory."""

from foretell.simulate.pipeline.schedule import REGISTRY, Order, Schedule, Task, in_flight, named
from foretell.simulate.pipeline.simulator import Simulation, simulate
from foretell.simulate.pipeline.times import Times

__all__ = ["REGISTRY", "Order", "Schedule", "Simulation", "Task", "Times", "in_flight", "named", "simulate"]
