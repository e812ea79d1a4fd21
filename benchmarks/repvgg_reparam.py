"""What re-parametrisation saves, measured on this machine's CPU and predicted for a GPU.

    python benchmarks/repvgg_reparam.py [MODEL…] [--batch N] [--image-size N] [--repeats N] [--on DEVICE] [--json FILE]

For each RepVGG of the zoo: the trained form, the same with batch norms folded, and the plain one; medians of runs
interleaved form by form after two to warm up, largest difference of the outputs, and the predicted speed-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foretell.transform import effect, fold_batch_norm, reparametrize
from foretell.workload import zoo

Forms = dict[str, Callable[[torch.Tensor], torch.Tensor]]


def medians(forms: Forms, x: torch.Tensor, repeats: int) -> dict[str, float]:
    """Median seconds a call of each form, the forms taking turns."""
    times: dict[str, list[float]] = {form: [] for form in forms}
    with torch.inference_mode():
        for repeat in range(repeats + 2):
            for form, run in forms.items():
                start = time.perf_counter()
                run(x)
                if repeat >= 2:
                    times[form].append(time.perf_counter() - start)
    return {form: statistics.median(seen) for form, seen in times.items()}


def measure(name: str, batch: int, size: int, repeats: int, on: str) -> dict[str, Any]:
    """One row: seconds of each form, speed-ups, and the error."""
    torch.manual_seed(0)
    model = zoo.build(name).eval()
    _statistics(model)
    forms: dict[str, nn.Module] = {
        "trained": model,
        "folded": fold_batch_norm(model).module,
        "plain": reparametrize(model).module,
    }
    x = torch.randn(batch, 3, size, size)
    with torch.inference_mode():
        expected = model(x)
        error = float((forms["plain"](x) - expected).abs().max() / expected.abs().max())
    found = medians(dict(forms), x, repeats)
    predicted = effect("reparametrize", model, torch.empty(128, 3, size, size, device="meta"), on=on)
    return {
        "model": name,
        **{f"{form}_s": seconds for form, seconds in found.items()},
        "speedup_over_trained": found["trained"] / found["plain"],
        "speedup_over_folded": found["folded"] / found["plain"],
        "error": error,
        f"predicted_speedup_{on}": predicted.speedup,
    }


def _statistics(model: nn.Module) -> None:
    """Batch-norm statistics and weights away from their initial values."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for tensor, low, high in (
                (layer.running_mean, -0.5, 0.5),
                (layer.running_var, 0.5, 2.0),
                (layer.weight, 0.5, 1.5),
                (layer.bias, -0.3, 0.3),
            ):
                assert tensor is not None
                nn.init.uniform_(tensor, low, high)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["repvgg_a0", "repvgg_a2", "repvgg_b0", "repvgg_b1g4"])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--on", default="gtx-1080-ti", help="device the prediction is for (batch 128)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    threads = torch.get_num_threads()
    print(f"CPU, {threads} threads, batch {given.batch}, torch {torch.__version__}; medians of {given.repeats}")
    heads = ("trained", 9), ("folded", 9), ("plain", 9), ("gain", 6), ("over folded", 11), ("error", 8), (given.on, 12)
    print(f"{'model':14}", *(f"{head:>{width}}" for head, width in heads))
    rows = []
    for name in given.models:
        row = measure(name, given.batch, given.image_size, given.repeats, given.on)
        rows.append(row)
        times = (f"{row[f'{form}_s'] * 1e3:6.0f} ms" for form in ("trained", "folded", "plain"))
        over, folded = row["speedup_over_trained"], row["speedup_over_folded"]
        predicted = row[f"predicted_speedup_{given.on}"]
        print(f"{name:14}", *times, f"{over:5.2f}× {folded:10.2f}× {row['error']:8.1e} {predicted:11.2f}×", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
