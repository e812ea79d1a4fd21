"""How well the machine at hand is predicted: 20 timm models, eager fp32, batch 1 and 8, after ``calibrate --here``.

Each model (random weights) is timed in several passes over all of them, so that what disturbs the machine for a while
disturbs no model alone. A pass gives the median of its runs; the measured time is the median of the passes, and the
spread (slowest over fastest pass) is printed beside it. Models play no part in the calibration, which knows
microbenchmarks only. The bar: median absolute error of at most 15 %.

    foretell calibrate --here
    python benchmarks/here.py [--times FILE] [--passes 3] [--calibration FILE] [MODEL …]

Times are kept as they come in FILE, and what it holds already is not measured again. Exit code 1 where the bar is
missed. Needs ``foretell[zoo]``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

BAR = 0.15
BATCHES = (1, 8)
MODELS = (
    *("resnet18", "resnet50", "resnext50_32x4d", "vgg11_bn", "mobilenetv2_100", "mobilenetv3_large_100"),
    *("efficientnet_b0", "mnasnet_100", "regnety_008", "regnetx_016", "densenet121", "vit_tiny_patch16_224"),
    *("vit_small_patch16_224", "swin_tiny_patch4_window7_224", "convnext_tiny", "mixer_s16_224", "resmlp_12_224"),
    *("repvgg_a0", "ghostnet_100", "poolformer_s12"),
)
_PASS_S = 0.12  # a pass repeats a model for at least this long, and at least twice


def measure(
    models: tuple[str, ...], passes: int, path: Path, microbenchmarks: Path | None = None
) -> dict[str, list[float]]:
    """Median seconds of each pass by "model@batch"; `path` keeps them.

    With `microbenchmarks`, a pass over those precedes each pass over the models, and that file keeps their samples: a
    shared machine's speed drifts within minutes, by more than the bar.
    """
    import timm
    import torch

    from foretell.calibrate import microbench

    known: dict[str, list[float]] = json.loads(path.read_text()) if path.exists() else {}
    wanted = [m for m in models if any(len(known.get(f"{m}@{b}", ())) < passes for b in BATCHES)]
    torch.manual_seed(0)
    nets = {name: timm.create_model(name).eval() for name in wanted}
    for turn in range(passes):
        if microbenchmarks is not None:
            microbench.run(microbenchmarks, seconds=30.0 * (turn + 1), passes=turn + 1)
        for name, net in nets.items():
            for batch in BATCHES:
                mine = known.setdefault(f"{name}@{batch}", [])
                if len(mine) > turn:
                    continue
                mine.append(_one(net, torch.randn(batch, 3, 224, 224)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known, indent=1))
    return {key: known[key] for m in models for key in (f"{m}@{b}" for b in BATCHES)}


def _one(net: object, images: object) -> float:
    """Median seconds of a few runs, after one to warm up."""
    import torch

    runs: list[float] = []
    with torch.inference_mode():
        net(images)
        until = time.perf_counter() + _PASS_S
        while len(runs) < 2 or (time.perf_counter() < until and len(runs) < 25):
            start = time.perf_counter()
            net(images)
            runs.append(time.perf_counter() - start)
    return statistics.median(runs)


def main() -> int:
    """Measure what is missing, predict, compare."""
    import foretell

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--times", type=Path, default=Path.home() / ".cache/foretell/here.json")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--microbenchmarks", type=Path, metavar="FILE", help="measure these too, in turn with them")
    parser.add_argument("--measure-only", action="store_true")
    given = parser.parse_args()
    times = measure(tuple(given.models), given.passes, given.times, given.microbenchmarks)
    if given.measure_only:
        return 0
    errors = []
    print(f"{'model':<32}{'batch':>6}{'measured':>12}{'spread':>8}{'predicted':>12}{'error':>8}  80 %")
    settings = {} if given.calibration is None else {"calibration": given.calibration}
    inside = 0
    for key, passes in times.items():
        name, batch = key.split("@")
        estimate = foretell.predict(f"timm:{name}", on="local-cpu", batch=int(batch), **settings)
        measured = statistics.median(passes)
        error = estimate.time_s / measured - 1.0
        errors.append(abs(error))
        low, high = estimate.time_interval_s
        held = low <= measured <= high
        inside += held
        print(
            f"{name:<32}{batch:>6}{measured * 1e3:>9.2f} ms{max(passes) / min(passes):>8.2f}"
            f"{estimate.time_s * 1e3:>9.2f} ms{error:>+8.1%}  {'' if held else 'out'}"
        )
    median = statistics.median(errors)
    print(f"\nmedian absolute error {median:.1%} (bar {BAR:.0%}), mean {statistics.fmean(errors):.1%}, "
          f"within the 80 % interval {inside / len(errors):.0%}")
    return 0 if median <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
