"""How many plans of training a second one core looks at, each with its legality, memory, time, cost and energy.

    python benchmarks/plan_speed.py [--repeat 3]

Counts whole configurations: every legal plan is asked for its memory, those that fit for the rest. One process, one
thread, seconds of its processor. The first search of a model also costs the kernels of its shapes: it is shown apart.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

from foretell.hardware import cluster
from foretell.plan.training.rows import budget_bytes, evaluate
from foretell.plan.training.space import Space
from foretell.simulate.training import TrainingPlan
from foretell.workload import llm

CASES = (
    ("llama-3-8b", "1x dgx-h100", 256, 8192, "fsdp2"),
    ("llama-3-70b", "16x dgx-h100", 1024, 8192, "megatron"),
    ("llama-3-70b", "16x dgx-a100", 1024, 4096, "deepspeed"),
    ("deepseek-v3", "64x dgx-h100", 4096, 4096, "megatron"),
    ("llama-3.1-405b", "2048x dgx-h100", 2048, 8192, "megatron"),
    ("llama-3.1-405b", "1024x dgx-h100", 2048, 131072, "megatron"),
)
WANTED = 20_000  # configurations a second


def main() -> None:
    """Print a line for each case, and fail where one is slower than it has to be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=3)
    repeat = parser.parse_args().repeat
    slow = []
    print(f"{'model':16}{'cluster':18}{'framework':11}{'plans':>9}{'fit':>9}{'first':>11}{'again':>11}  a second")
    for name, on, batch, seq_len, framework in CASES:
        machines = cluster(on)
        space = Space(llm.config(name), machines, TrainingPlan(batch, seq_len, framework=framework))
        rates, legal, fitting = [], 0, 0
        for _ in range(max(2, repeat)):
            start = time.process_time()
            parts = [evaluate(space, index, budget_bytes(machines, 0.9)) for index in range(space.blocks)]
            took = time.process_time() - start
            legal, fitting = sum(part.legal for part in parts), sum(len(part.rows) for part in parts)
            rates.append(legal / took)
        first, again = rates[0], sorted(rates[1:])[len(rates[1:]) // 2]
        print(f"{name:16}{on:18}{framework:11}{legal:>9,}{fitting:>9,}{first:>11,.0f}{again:>11,.0f}")
        if again < WANTED:
            slow.append(name)
    if slow:
        raise SystemExit(f"slower than {WANTED:,} a second: {', '.join(slow)}")


if __name__ == "__main__":
    main()
