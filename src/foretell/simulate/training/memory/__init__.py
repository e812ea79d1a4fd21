"""Memory of distributed training, for each GPU and pipeline stage.

>>> from foretell import hardware
>>> from foretell.simulate.training import PlanTable, TrainingPlan
>>> from foretell.workload import llm
>>> plan = TrainingPlan(global_batch=128, seq_len=4096, tp=2, dp=4)
>>> found = memory(llm.config("llama-3-8b"), PlanTable.of([plan]), hardware.device("h100-sxm"))
>>> f"{found.peak_bytes[0] / 2**30:.0f} GiB", bool(found.fits()[0])
('46 GiB', True)
"""

from foretell.simulate.training.memory.fit import Repair, largest_micro_batch, over_capacity, repairs
from foretell.simulate.training.memory.table import ALLOCATED, PARTS, MemoryTable, by_rank, memory

__all__ = [
    "ALLOCATED",
    "PARTS",
    "MemoryTable",
    "Repair",
    "by_rank",
    "largest_micro_batch",
    "memory",
    "over_capacity",
    "repairs",
]
