"""Speed ratios of efficient architectures, predicted against measured: which of two is faster, and by how much.

    python benchmarks/architectures.py [--data DIR] [--slice NAME …] [--model NAME …]

Two bodies of measurements:

* timm's inference tables (``$FORETELL_DATA/timm``): every pair of networks of two families, one of them RegNet,
  EfficientNet, GENet, TResNet, VoVNet, EfficientViT, LowFormer or RepVGG and the other any of these or a baseline, that
  one table has (one GPU, PyTorch, precision, layout and runtime). The shipped calibration has seen these tables.
  ``--model kernel`` has few constants and no trees, so it can hardly have learnt a family by heart: both are printed.
* pycls's published times of 35 RegNets, ResNets, ResNeXts and EfficientNets on a V100 (64 images, fp32, PyTorch 1.6),
  which no calibration has seen. Published figures, kept with the claims of ``regnet``.

The bars: the median error of the ratio at most 12 %, and the right one faster in at least 90 % of the pairs whose
measured times differ by more than 15 %. They are judged for the shipped model, ``auto``. Exit code 1 where one is
missed on timm's tables, 2 without data. Captures are kept under ``$FORETELL_CACHE``, so a second run takes seconds.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from foretell.accuracy.programs import Store
from foretell.accuracy.runner import home, predict
from foretell.accuracy.slices import Row, data_folder, slices
from foretell.claims.workload.regnet import PYCLS_MS
from foretell.cost.model import AUTO, default_model
from foretell.errors import ForetellError
from foretell.hardware import device as find

ERROR_BAR, ORDER_BAR, CLEAR = 0.12, 0.90, 1.15

# Architectures by name, as timm spells them: designs, then what their papers compare with.
DESIGNS = {
    "regnet": r"regnet[xy]_\d+",
    "efficientnet": r"efficientnet_b\d",
    "genet": r"gernet_[sml]",
    "tresnet": r"tresnet_(m|l|xl)",
    "vovnet": r"(ese_)?vovnet\w+",
    "efficientvit": r"efficientvit_m\d",
    "lowformer": r"lowformer_b\d+",
    "repvgg": r"repvgg_\w+",
}
BASELINES = {
    "resnet": r"resnet(18|34|50|101|152)",
    "resnext": r"resnext(50_32x4d|101_32x4d|101_32x8d)",
    "densenet": r"densenet(121|161|169|201)",
    "mobilenet": r"mobilenetv[23]_(large_|small_)?100",
    "mobilevit": r"mobilevit(_xxs|_xs|_s|v2_100)",
    "efficientformer": r"efficientformerv2_s[012]",
}


@dataclass(frozen=True, slots=True)
class Timed:
    """One network on one machine: seconds an image."""

    name: str
    family: str
    measured_s: float
    predicted_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Errors of the ratios of all pairs (shares), and the share of clear pairs whose faster member is the right one."""

    pairs: int
    error: float
    tenth: float
    order: float
    clear: int


def compare(networks: Sequence[Timed]) -> Outcome:
    """Every pair of two families, one of them a design.

    >>> a, b = Timed("a", "regnet", 1.0, 1.0), Timed("b", "resnet", 2.0, 1.5)
    >>> compare([a, b])
    Outcome(pairs=1, error=0.25, tenth=0.25, order=1.0, clear=1)
    """
    errors: list[float] = []
    clear = right = 0
    for a, b in itertools.combinations(networks, 2):
        if a.family == b.family or not {a.family, b.family} & DESIGNS.keys():
            continue
        measured, predicted = b.measured_s / a.measured_s, b.predicted_s / a.predicted_s
        errors.append(abs(predicted / measured - 1))
        if max(measured, 1 / measured) > CLEAR:
            clear += 1
            right += (measured > 1) == (predicted > 1)
    if not errors or not clear:
        raise ForetellError("no pair of networks to compare", "give a table that has several of the families")
    tenth = statistics.quantiles(errors, n=10)[-1] if len(errors) > 1 else errors[0]
    return Outcome(len(errors), statistics.median(errors), tenth, right / clear, clear)


def family(workload: str) -> str | None:
    """The design or baseline that a workload is of."""
    name = workload.removeprefix("timm:").partition(".")[0]
    for known, pattern in (DESIGNS | BASELINES).items():
        if re.fullmatch(pattern, name):
            return known
    return None


def smallest(rows: Sequence[Row]) -> dict[str, Row]:
    """One row for each network of the families: that of its smallest images."""
    found: dict[str, Row] = {}
    for row in rows:
        if family(row.workload) is None:
            continue
        known = found.get(row.workload)
        if known is None or row.options["image_size"] < known.options["image_size"]:
            found[row.workload] = row
    return found


def timed(rows: Sequence[Row], device_name: str, runtime: str, model: str, store: Store) -> list[Timed]:
    """The rows with predictions; those that cannot be made are named on stderr.

    timm measured RepVGG and EfficientViT with branches and norms merged: networks of another parameter count."""
    device = find(device_name)
    chosen = default_model(device) if model == AUTO else model
    made, left = [], []
    for row in rows:
        found = predict(row, device, runtime, chosen, store)
        of = family(row.workload)
        if found.time_s is None or of is None:
            left.append(f"{row.workload.removeprefix('timm:')} ({found.error})")
            continue
        made.append(Timed(row.workload, of, row.measured_s / row.batch, found.time_s / row.batch))
    if left:
        print(f"  {len(left)} left out: {'; '.join(left)}", file=sys.stderr)
    return made


def published() -> list[Row]:
    """pycls's times as rows."""
    return [
        Row(workload, {"precision": "fp32", "image_size": size}, 64, ms / 1e3, "facebookresearch/pycls, model zoo")
        for workload, size, ms in PYCLS_MS
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each table and model; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="DIR", help="folder of public measurements")
    parser.add_argument("--slice", action="append", metavar="NAME", help="only these of timm's tables")
    parser.add_argument("--model", action="append", metavar="NAME", help="cost models (default: auto and kernel)")
    given = parser.parse_args(argv)
    root = home(None)
    store = Store(None if root is None else root / "programs")
    try:
        folder = data_folder(given.data)
        entries = [s for n, s in slices().items() if n in given.slice] if given.slice else list(slices().values())
        entries = [s for s in entries if s.conditions.get("mode") == "inference" and s.present(folder)]
        if not entries:
            raise ForetellError("no inference tables of timm", "set FORETELL_DATA or give other --slice names")
        missed = []
        print(f"{'table':54}{'model':8}{'networks':>9}{'pairs':>7}{'median':>8}{'90 %':>7}{'order':>8}")
        for entry in entries:
            rows = list(smallest(entry.read(folder)).values())
            for model in given.model or (AUTO, "kernel"):
                outcome = report(entry.name, timed(rows, entry.device, entry.runtime, model, store), model)
                if model == AUTO and (outcome.error > ERROR_BAR or outcome.order < ORDER_BAR):
                    missed.append(entry.name)
        for model in given.model or (AUTO, "kernel"):
            report("pycls, V100 fp32 (never seen)", timed(published(), "v100-sxm2-16gb", "eager", model, store), model)
    except ForetellError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"bars: median at most {ERROR_BAR:.0%}, order right in {ORDER_BAR:.0%} of pairs over {CLEAR - 1:.0%} apart")
    if missed:
        print(f"missed in {', '.join(missed)}")
    return int(bool(missed))


def report(title: str, networks: Sequence[Timed], model: str) -> Outcome:
    """Print one line and give back what it says."""
    found = compare(networks)
    print(
        f"{title:54}{model:8}{len(networks):9}{found.pairs:7}{found.error:8.1%}{found.tenth:7.0%}{found.order:8.1%}",
        flush=True,
    )
    return found


if __name__ == "__main__":
    sys.exit(main())
