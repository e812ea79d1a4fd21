"""Pipelines: the order in which ranks work through micro-batches, what that takes of time and memory."""

from foretell.simulate.pipeline.schedule import REGISTRY, Order, Schedule, Task, in_flight, named

__all__ = ["REGISTRY", "Order", "Schedule", "Task", "in_flight", "named"]
