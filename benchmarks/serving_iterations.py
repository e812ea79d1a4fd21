"""Iterations of serving costed a second: ``python benchmarks/serving_iterations.py``.

For models of every kind: seconds to make the tables of a plan, microseconds of a single iteration, and iterations a
second in batches of 20,000. The bar is 20,000 a second on one core.
"""

from __future__ import annotations

import time

import numpy as np

from foretell.hardware import device
from foretell.simulate.serving import Batch, ServingPlan
from foretell.simulate.serving.iteration import Iterations
from foretell.workload import llm

PLANS = {
    "llama-3.1-8b": ServingPlan(),
    "llama-3.1-70b": ServingPlan(tp=4, weight_dtype="fp8", kv_dtype="fp8"),
    "gemma-3-27b": ServingPlan(engine="sglang"),
    "qwen3-30b-a3b": ServingPlan(dp=2, ep=2),
    "gpt-oss-120b": ServingPlan(weight_dtype="mxfp4"),
    "deepseek-v3": ServingPlan(engine="sglang", tp=8, weight_dtype="fp8"),
}
COUNT, SINGLE = 20_000, 500


def mixed(count: int) -> Batch:
    """Iterations of all sizes, half of them with prompts."""
    r = np.random.default_rng(0)
    seqs, prompts = r.integers(1, 300, count), r.integers(0, 2, count)
    tokens = prompts * r.integers(1, 8000, count)
    context = seqs * r.integers(1, 8000, count)
    return Batch.of(decode_seqs=seqs, decode_tokens=context, prefill_seqs=prompts, prefill_tokens=tokens)


def main() -> None:
    """Print a line for each model."""
    card = device("h100-sxm")
    print(f"{'model':<16}{'tables, s':>12}{'single, us':>12}{'a second':>14}")
    for name, plan in PLANS.items():
        start = time.perf_counter()
        iterations = Iterations.of(llm.config(name), plan, card)
        made = time.perf_counter() - start
        many = mixed(COUNT)
        start = time.perf_counter()
        iterations.time_s(many)
        rate = COUNT / (time.perf_counter() - start)
        one = many.take([0])
        start = time.perf_counter()
        for _ in range(SINGLE):
            iterations.time_s(one)
        single = (time.perf_counter() - start) / SINGLE
        print(f"{name:<16}{made:>12.2f}{single * 1e6:>12.0f}{rate:>14,.0f}")


if __name__ == "__main__":
    main()
