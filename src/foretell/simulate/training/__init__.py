"""Training a transformer on many devices: plans, step time, memory."""

from foretell.simulate.training.plan import CHOICES, PlanTable, TrainingPlan

__all__ = ["CHOICES", "PlanTable", "TrainingPlan"]
