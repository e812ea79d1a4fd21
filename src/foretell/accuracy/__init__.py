"""How well predictions agree with public measurements: named slices, run and scored.

>>> from foretell.accuracy import slices
>>> "timm-inference-3090-amp-nchw-pt240" in slices()
True
"""

from foretell.accuracy.metrics import Score, score
from foretell.accuracy.runner import Prediction, Progress, Report, SliceResult, run
from foretell.accuracy.schema import to_dict
from foretell.accuracy.slices import Row, Slice, data_folder, slices

__all__ = [
    "Prediction",
    "Progress",
    "Report",
    "Row",
    "Score",
    "Slice",
    "SliceResult",
    "data_folder",
    "run",
    "score",
    "slices",
    "to_dict",
]
