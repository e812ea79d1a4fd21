"""How well predictions agree with public measurements: named slices, run and scored.

>>> from foretell.accuracy import slices
>>> "timm-inference-3090-amp-nchw-pt240" in slices()
True
"""

from foretell.accuracy.metrics import Score, score
from foretell.accuracy.runner import Prediction, Progress, Report, SliceResult, offered, run
from foretell.accuracy.schema import to_dict
from foretell.accuracy.slices import Row, Slice, data_folder, slices
from foretell.accuracy.tables import Source, TableResult, sources

__all__ = [
    "Prediction",
    "Progress",
    "Report",
    "Row",
    "Score",
    "Slice",
    "SliceResult",
    "Source",
    "TableResult",
    "data_folder",
    "offered",
    "run",
    "score",
    "slices",
    "sources",
    "to_dict",
]
