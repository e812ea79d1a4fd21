"""How fast the engine simulator is: against real time, and on a trace of a million requests.

    python benchmarks/serving_speed.py [--requests 1000000] [--replicas 64] [--rate 10] [--routers …]

Llama-3.1-8B on H100s, requests by a Poisson process with lengths like those of the Azure conversation trace (means
1,155 and 211 tokens, log-normal). One process, one thread, seconds of its processor. The first line is one replica for
five minutes, the others the same load on each of many.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from foretell.hardware import device
from foretell.simulate.serving import Requests, ServingPlan
from foretell.simulate.serving.iteration import Iterations
from foretell.simulate.serving.simulator import Served, serve
from foretell.workload import llm

REAL_TIME = 200  # times faster than real time, one replica at 10 requests/s
SECONDS, GIGABYTES = 600, 2.0  # for a million requests on 64 replicas


def trace(count: int, rate: float) -> Requests:
    """Poisson arrivals with log-normal lengths."""
    rng = np.random.default_rng(0)

    def lengths(mean: float, sigma: float, most: int) -> np.ndarray:
        drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
        return np.clip(drawn.round(), 1, most).astype(np.int64)

    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    return Requests.of(arrivals, lengths(1155, 1.0, 14_000), lengths(211, 0.9, 2_000))


def timed(plan: ServingPlan, requests: Requests) -> tuple[Served, float]:
    """A simulation and the processor's seconds it took, tables of the iterations included."""
    start = time.process_time()
    iterations = Iterations.of(llm.config("llama-3.1-8b"), plan, device("h100-sxm"))
    result = serve(iterations, plan, requests)
    return result, time.process_time() - start


def main() -> None:
    """Print a line for each case, and fail where one is slower or larger than it has to be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second for each replica")
    parser.add_argument("--routers", default="round-robin,least-loaded")
    given = parser.parse_args()
    failed = []
    print(f"{'replicas':>8} {'router':13}{'requests':>10}{'iterations':>12}{'simulated':>11}{'took':>9}  real time")
    cases = [(1, "round-robin", int(300 * given.rate))]
    if given.requests:
        cases += [(given.replicas, router, given.requests) for router in given.routers.split(",")]
    for replicas, router, count in cases:
        result, took = timed(ServingPlan(replicas=replicas, router=router), trace(count, given.rate * replicas))
        iterations, factor = int(result.runs.iterations.sum()), result.end_s / took
        print(f"{replicas:>8} {router:13}{count:>10,}{iterations:>12,}", end="")
        print(f"{result.end_s:>10,.0f}s{took:>8,.1f}s  {factor:,.0f}x", flush=True)
        if not result.served.all():
            failed.append(f"{int((~result.served).sum())} requests refused")
        if replicas == 1 and factor < REAL_TIME:
            failed.append(f"one replica is {factor:.0f} times faster than real time, want {REAL_TIME}")
        if replicas > 1 and took > SECONDS * count / 1e6:
            failed.append(f"{count:,} requests take {took:.0f} s, want {SECONDS * count / 1e6:.0f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"memory {peak:.2f} GB")
    if peak > GIGABYTES:
        failed.append(f"{peak:.2f} GB of memory, want {GIGABYTES}")
    if failed:
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    main()
