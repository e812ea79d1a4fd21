"""Serving a language model under load: engines, requests, what an iteration takes, what users see."""

from foretell.simulate.serving.batch import Batch
from foretell.simulate.serving.plan import CHOICES, ServingPlan
from foretell.simulate.serving.requests import Requests

__all__ = ["CHOICES", "Batch", "Requests", "ServingPlan"]
