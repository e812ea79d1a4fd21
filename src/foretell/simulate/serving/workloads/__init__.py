"""What a server is asked for: traces read from files, arrivals and lengths drawn at random, and both put together.

Traces are a family: one file each in `readers`, chosen by name (``azure:conv.csv``) or by what the file holds.
"""

from foretell.simulate.serving.workloads.arrivals import arrivals, processes
from foretell.simulate.serving.workloads.family import Reader, Trace, Wanted, read, reader, readers
from foretell.simulate.serving.workloads.lengths import Lengths, parse_lengths
from foretell.simulate.serving.workloads.shaping import offline, replayed, synthetic

__all__ = [
    "Lengths",
    "Reader",
    "Trace",
    "Wanted",
    "arrivals",
    "offline",
    "parse_lengths",
    "processes",
    "read",
    "reader",
    "readers",
    "replayed",
    "synthetic",
]
