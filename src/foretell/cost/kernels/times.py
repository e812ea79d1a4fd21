"""`KernelTimes`: what a kernel family says of its kernels, as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Times and launches of one kernel per row, all columns (rows,).

    The kernel takes ``max(compute_s, memory_s) + latency_s``: pipes, device memory, and what neither hides. `floor_s`
    is what no kernel for this work can beat: arithmetic at peak, or compulsory traffic at the bandwidth of where the
    data can be. `blocks` of `threads` are launched, with `registers` a thread and `shared_bytes` a block. A block makes
    a `tile_m` × `tile_n` piece of the result, its reduced dimension divided in `split` parts. `dram_bytes` and
    `l2_bytes` are the traffic.
    """

    compute_s: Floats
    memory_s: Floats
    latency_s: Floats
    floor_s: Floats
    blocks: Floats
    threads: Floats
    registers: Floats
    shared_bytes: Floats
    tile_m: Floats
    tile_n: Floats
    split: Floats
    dram_bytes: Floats
    l2_bytes: Floats

    @property
    def time_s(self) -> Floats:
        """Seconds from a kernel's start to its end."""
        return np.maximum(self.compute_s, self.memory_s) + self.latency_s
