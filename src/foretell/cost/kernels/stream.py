"""Kernels that stream their operands through once or a few times: pointwise, softmax, norms, reductions, copies.

    time = max(traffic, operations, rows) + latency

* **Traffic.** Bytes over the share of the bandwidth that large kernels of the kind reach. Little's law: a device moves
  ``bytes in flight / latency``, so a kernel with less to move than its multiprocessors can keep in flight takes no
  less time than a few round trips to memory, and ends in a tail as the last blocks drain.
* **L2.** What was just written, or will be read again by the next call, is found in L2 where it fits. All traffic
  passes through L2, whose rate is so many bytes a cycle and multiprocessor.
* **Rows.** Softmax and norms go over a row more than once. Short rows stay in registers (a warp a row). Longer ones are
  read again: from L2 while the rows of all resident blocks fit there, from memory otherwise. Each row also costs its
  block a chain of reductions and barriers, which more resident rows hide.
* **Operations.** Kernels with many operations an element (powers, divisions) are bound by them on devices with little
  arithmetic, at the clock their power limit leaves.

Every column is (rows,), one kernel each; `share`, `again` and `operations` come from the caller by kind, `variant`
names them for PyTorch's operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from foretell.cost.calibration import Calibration
from foretell.cost.kernels.times import KernelTimes
from foretell.cost.rates import bandwidth, vector_rate
from foretell.graph.kinds import base_name
from foretell.hardware.device import Device

Floats = npt.NDArray[np.float64]

_UNROLLED_BYTES = 16.0  # a thread's load: four fp32 values
_THREADS = 128.0


@dataclass(frozen=True, slots=True)
class Variant:
    """How one operation streams: the constant ``share.<name>``, extra reads of a long row, operations an element."""

    name: str
    again: float = 0.0
    operations: float = 4.0
    block: bool = True  # a block, not a warp, works on each row however short


_SIMPLE = Variant("pointwise")
_VARIANTS: dict[str, Variant] = {
    "pow.Tensor_Tensor": Variant("pointwise", operations=120.0),
    "pow": Variant("pointwise", operations=6.0),
    "div": Variant("pointwise", operations=10.0),
    "gelu": Variant("pointwise", operations=30.0),
    "gelu_backward": Variant("pointwise", operations=40.0),
    "tanh": Variant("pointwise", operations=20.0),
    "native_dropout": Variant("dropout", operations=30.0),
    "where": Variant("broadcast", operations=12.0),
    "masked_fill": Variant("broadcast", operations=12.0),
    "_softmax": Variant("softmax", again=2.0, operations=12.0, block=False),
    "_log_softmax": Variant("softmax", again=2.0, operations=12.0, block=False),
    "_softmax_backward_data": Variant("softmax_backward", again=2.0, operations=8.0, block=False),
    "_log_softmax_backward_data": Variant("softmax_backward", again=1.0, operations=8.0, block=False),
    "native_layer_norm": Variant("layer_norm", again=1.0, operations=12.0),
    "native_layer_norm_backward": Variant("layer_norm_backward", again=2.0, operations=24.0),
    "embedding": Variant("embedding", operations=6.0),
    "embedding_dense_backward": Variant("embedding_backward", operations=12.0),
    "clone": Variant("permute", operations=16.0),
    "cat": Variant("permute", operations=16.0),
    "sum": Variant("reduction", operations=3.0),
    "mean": Variant("reduction", operations=3.0),
}


@cache
def variant(name: str, broadcasts: bool = False) -> Variant:
    """How the operation of a dispatcher name streams. `broadcasts`: an operand is smaller than the result.

    >>> variant("aten._softmax.default").name
    'softmax'
    """
    full = name.split(".", 1)[-1]
    found = _VARIANTS.get(full) or _VARIANTS.get(base_name(name), _SIMPLE)
    return Variant("broadcast", operations=12.0) if found is _SIMPLE and broadcasts else found


def stream(
    bytes_read: Floats,
    bytes_written: Floats,
    elements: Floats,
    reduced: Floats,
    share: Floats,
    device: Device,
    constants: Calibration,
    *,
    again: Floats | float = 0.0,
    operations: Floats | float = 4.0,
    block: Floats | float = 1.0,
) -> KernelTimes:
    """Times of streaming kernels.

    `reduced` is how many elements a row has (0: no rows), `share` the share of bandwidth of large kernels, `again` how
    often more than once a long row is read, `operations` fp32 operations an element, `block` whether short rows take a
    block each, too. Raises InputError where the device
    lacks its bandwidth.
    """
    n = len(elements)
    peak = bandwidth(device)
    processors = float(device.multiprocessors or 1)
    moved = bytes_read + bytes_written
    rows = np.where(reduced > 0, elements / np.maximum(reduced, 1.0), 0.0)
    row_bytes = np.where(rows > 0, bytes_read / np.maximum(rows, 1.0), 0.0)
    long = reduced > constants["rows.in_registers"]
    resident = np.minimum(rows, processors * constants["rows.resident"])
    cache = float(device.l2_bytes or 0)
    # Read again, from memory as far as the rows of resident blocks do not fit L2.
    sharpness = constants["rows.sharpness"]
    missed = 1.0 / (1.0 + (constants["rows.l2_fraction"] * cache / np.maximum(resident * row_bytes, 1.0)) ** sharpness)
    extra = np.where(long, np.asarray(again) * bytes_read, 0.0)
    dram = moved + extra * missed
    hit = 1.0 / (1.0 + (moved / max(1.0, constants["l2.fraction"] * cache)) ** 2) if cache else np.zeros(n)
    l2_rate = max(peak, processors * (device.boost_clock_hz or 1.5e9) * constants["l2.bytes_per_cycle"])
    memory = np.maximum(dram * (1.0 - hit) / (peak * share), (moved + extra) / l2_rate)
    # A kernel starts and drains: its first and last round trips move less than the device could.
    in_flight = peak * share * constants["latency.memory"]
    latency = constants["latency.kernel"] + constants["latency.memory"] * moved / (moved + in_flight)
    arithmetic = np.asarray(operations) * elements / (vector_rate(device).flops_per_s * constants["operations.share"])
    chain = rows * constants["rows.chain"] / (processors * constants["rows.resident"])
    compute = np.maximum(arithmetic, np.where(long | (np.asarray(block) > 0), chain, 0.25 * chain))
    blocks = np.where(rows > 0, np.maximum(1.0, rows), np.ceil(elements * 4.0 / (_UNROLLED_BYTES * _THREADS)))
    return KernelTimes(
        compute_s=compute,
        memory_s=memory,
        latency_s=np.broadcast_to(latency, (n,)).copy(),
        floor_s=moved / l2_rate,
        blocks=blocks,
        threads=np.full(n, _THREADS),
        registers=np.full(n, 32.0),
        shared_bytes=np.where(rows > 0, 512.0, 0.0),
        tile_m=np.zeros(n),
        tile_n=np.zeros(n),
        split=np.ones(n),
        dram_bytes=dram * (1.0 - hit),
        l2_bytes=moved + extra,
    )
