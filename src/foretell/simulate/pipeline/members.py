"""The schedules there are, in the order of their codes in `foretell.simulate.training.PlanTable`."""

from foretell.simulate.pipeline import one_f_one_b  # noqa: I001  (the order is meant)
from foretell.simulate.pipeline import gpipe
from foretell.simulate.pipeline import interleaved
from foretell.simulate.pipeline import zero_bubble
from foretell.simulate.pipeline import layered

__all__ = ["gpipe", "interleaved", "layered", "one_f_one_b", "zero_bubble"]
