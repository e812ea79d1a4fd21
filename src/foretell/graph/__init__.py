"""What a workload does, as data: operations, the tensors between them, and the memory under those.

Conventions, said once for the whole package:

* **One multiply-add is 2 FLOP.** `Graph.macs` counts multiply-adds, `Graph.flops` is always twice that.
* ``"matmul"`` (ours) counts matrix products, convolutions and attention, forward and backward, and nothing else.
  Attention is counted in full, causal or not; `Op.attrs["causal"]` says which, and `Graph.flops(causal="half")`
  counts the part below the diagonal only.
* ``"fvcore"`` adds what fvcore counts besides, forward only: 2 multiply-adds per element of a batch norm, 5 of a
  layer or group norm or of a batch norm over its own input's statistics (1 fewer without a scale), resampling and
  adaptive pooling.
* Bytes are those that cross the memory interface when every operation runs as a kernel of its own.

Nothing here imports torch.
"""

from foretell.graph.dtypes import DTYPES, dtype_bytes, is_floating
from foretell.graph.graph import CONVENTIONS, MODES, Graph
from foretell.graph.kinds import KINDS, kind_of
from foretell.graph.op import PHASES, ROLES, Op, Storage, Tensor, make_op
from foretell.graph.rules import Work, work_of
from foretell.graph.table import OpTable

__all__ = [
    "CONVENTIONS",
    "DTYPES",
    "KINDS",
    "MODES",
    "PHASES",
    "ROLES",
    "Graph",
    "Op",
    "OpTable",
    "Storage",
    "Tensor",
    "Work",
    "dtype_bytes",
    "is_floating",
    "kind_of",
    "make_op",
    "work_of",
]
