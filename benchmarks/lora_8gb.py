"""Sweep fine-tuning of a language model on a small card: throughput, time, memory, energy, and what fits.

    python benchmarks/lora_8gb.py [--model llm:NAME] [--device NAME] [--lora rank=16] [--power-limit 115]

One line a configuration, the fastest that fits last. Energy is the board's power limit times the time.
"""

from __future__ import annotations

import argparse

from foretell.claims.workload.lora_8gb_profiling import DEVICE, LORA, MODEL, Point, fastest, sweep


def line(point: Point) -> str:
    """A row of the table."""
    return (
        f"{point.quantize or 'half':>5} {point.batch:>5} {point.seq_len:>6} {point.optimizer:>16} "
        f"{point.precision:>5} {'yes' if point.checkpointing else 'no':>5} {point.tokens_per_s:>8,.0f} "
        f"{point.s_per_10k_tokens:>7.2f} {point.peak_bytes / 2**30:>6.2f} {point.energy_j_per_10k_tokens:>7.0f} "
        f"{'yes' if point.fits else 'no':>4}"
    )


def main() -> None:
    """Print the sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--lora", default=LORA)
    parser.add_argument("--power-limit", type=float, default=None, help="watts (the device's TDP)")
    given = parser.parse_args()
    print(" base batch tokens        optimizer  half check    tok/s   s/10k    GiB   J/10k fits")
    points = []
    for point in sweep(model=given.model, device=given.device, lora=given.lora, power_limit_w=given.power_limit):
        points.append(point)
        print(line(point), flush=True)
    if any(point.fits for point in points):
        print("fastest that fits:")
        print(line(fastest(points)))


if __name__ == "__main__":
    main()
