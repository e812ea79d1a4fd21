"""Peak training memory of timm models against nvidia-smi on an A100 40GB (GPUMemNet, Yousefzadeh-Asl-Miandoab et al.).

    python benchmarks/memory_gpumemnet.py [--sample N] [--jobs N] [--data DIR] [--out FILE.jsonl]

Each model's training step is captured at two batch sizes; the others follow (`foretell.graph.affine`). Results are
appended to a JSONL file as they come (default ``~/.cache/foretell/memory_gpumemnet/<digest>.jsonl``, the digest being
of the code that makes them), and what is there already is not computed again.

The data may be evaluated on, not fitted to: no constant of `foretell.cost.memory` comes from it.

What the measured jobs ran. The authors publish the numbers and not this script ("we used TIMM library models … added
some lines of code"); everything points to timm's own ``train.py`` of mid-2024 with its defaults, and what those add
to a step is added here, not in the product:

* the prefetching loader normalises batches on a side stream: when a batch is prepared, the one in use and the one
  before are still held, besides the uint8 images it comes from;
* SGD with weight decay makes a copy of the gradients (``torch._foreach_add``) of all parameters that decay, those
  with two dimensions or more;
* PyTorch ≥ 2.0 (``Tensor.untyped_storage`` in their profiler) whose libraries were loaded eagerly: jobs of theirs with
  one neuron held 1,237 MiB, twice what a lazily loaded context holds.

What is not predicted: ``nvidia-smi`` was sampled once a second, and now and then a sample fell into the search of
``cudnn.benchmark`` while it held the workspace of a plan it only tried (4.2 GiB over the steady state for one model at
batch 8: what the transformed weights of an FFT plan for 2048 to 512 channels take). Which rows these are is chance.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import foretell
from foretell.cost.allocator import MIB
from foretell.cost.memory import framework_bytes, peak_memory
from foretell.errors import ForetellError
from foretell.graph import Graph, Storage
from foretell.graph.affine import AffineFamily
from foretell.hardware import device

DEVICE = "a100-sxm4-40gb"
# The names measured are those of timm 1.0.9 (August 2024), whose default sizes these were; today's are larger.
IMAGE_SIZES = {"ese_vovnet57b": 224, "mobilenetv3_large_150d": 224, "sam2_hiera_tiny": 224}
CAPTURED = (4, 6)
BATCHES = (8, 16, 32, 64, 128)
BAR = {"median": 0.02, "p90": 0.07}
HERE = Path(__file__).resolve()


def measured(data: Path) -> dict[str, dict[int, float]]:
    """MiB by model and batch: the rows that SOURCE.md calls usable (others ran out of memory, unmarked).

    A model's series is kept up to where it stops growing by 2 % or passes 39,000 MiB.
    """
    series: dict[str, dict[int, float]] = {}
    with gzip.open(data / "gpumemnet" / "timm_training_memory_faketensor.csv.gz", "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            name, batch = row["Filename"].removesuffix(".out").rsplit("_", 1)
            series.setdefault(name, {})[int(batch)] = float(row["Max GPU Memory (MiB)"])
    usable = {}
    for name, points in sorted(series.items()):
        kept: dict[int, float] = {}
        last = 0.0
        for batch in sorted(points):
            if points[batch] < 1.02 * last or points[batch] > 39_000:
                break
            kept[batch] = last = points[batch]
        usable[name] = kept
    return usable


def fake_tensors(data: Path) -> dict[tuple[str, int], float]:
    """MiB by model and batch that the authors' own count of live tensors (FakeTensor) gives; the table has MB."""
    counted = {}
    with gzip.open(data / "gpumemnet" / "timm_training_memory_faketensor.csv.gz", "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            name, batch = row["Filename"].removesuffix(".out").rsplit("_", 1)
            counted[name, int(batch)] = float(row["GB after Backward"] or 0) * 1e6 / MIB
    return counted


def as_trained(graph: Graph) -> Graph:
    """The captured step with what timm's training script adds to it."""
    extra: list[Storage] = []
    for index in graph.inputs:
        tensor = graph.tensors[index]
        if len(tensor.shape) == 4:
            extra += [Storage(tensor.nbytes, "input")] * 2  # the batch before, and the next
            extra.append(Storage(tensor.nbytes // 4, "input"))  # the next as uint8
    update = next((i for i, op in enumerate(graph.ops) if op.phase == "optimizer"), None)
    if update is not None:
        parameters = {t.storage: len(t.shape) for t in graph.tensors if graph.storages[t.storage].role == "parameter"}
        decayed = [graph.storages[s].nbytes for s, rank in parameters.items() if rank > 1]
        extra += [Storage(nbytes, "temporary", update, len(graph.ops) - 1) for nbytes in decayed]
    return replace(graph, storages=(*graph.storages, *extra))


def predict(model: str, batches: Iterable[int]) -> Iterator[dict[str, Any]]:
    """One result a batch: predicted MiB and its breakdown."""
    size = IMAGE_SIZES.get(model)
    low, high = (
        foretell.capture(f"timm:{model}", batch=batch, image_size=size, train=True, optimizer="sgd", precision="fp32")
        for batch in CAPTURED
    )
    yield from predict_family(AffineFamily(low, high), batches)


def predict_family(family: AffineFamily, batches: Iterable[int]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        graph = family(batch)
        step = as_trained(graph)
        memory = peak_memory(step, device(DEVICE), framework="torch-eager-loading", cudnn_benchmark=True)
        yield {
            "batch": batch,
            "predicted_mib": memory.peak_bytes / MIB,
            "breakdown_mib": {part: round(nbytes / MIB, 1) for part, nbytes in memory.breakdown.items() if nbytes},
            "peak_op": graph.ops[memory.peak_op].name if memory.peak_op >= 0 else None,
        }


def work(model: str, points: dict[int, float]) -> list[dict[str, Any]]:
    """All results of a model, as lines of the JSONL file; one line with the reason where it cannot be captured."""
    try:
        results = list(predict(model, points))
    except ForetellError as error:
        return [{"model": model, "skipped": str(error)[:300]}]
    return [{"model": model, "measured_mib": points[r["batch"]], **r} for r in results]


def sample(names: list[str], count: int) -> list[str]:
    """`count` of the names, always the same ones: those with the smallest hashes."""
    return sorted(sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())[:count])


def digest() -> str:
    """Changes with the code that makes the results."""
    package = HERE.parents[1] / "src" / "foretell"
    files = [HERE, package / "cost" / "memory.py", package / "cost" / "allocator.py", package / "graph" / "affine.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def run(models: dict[str, dict[int, float]], out: Path, jobs: int) -> list[dict[str, Any]]:
    """Results of all models; those that `out` lacks are computed and appended to it."""
    done: dict[str, list[dict[str, Any]]] = {}
    if out.exists():
        for line in out.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # the line that was being written when an earlier run ended
            done.setdefault(entry["model"], []).append(entry)
    complete = {
        name for name, entries in done.items() if "skipped" in entries[0] or len(entries) == len(models.get(name, {}))
    }
    wanted = [name for name in models if name not in complete]
    results = [entry for name in models if name in complete for entry in done[name]]
    out.parent.mkdir(parents=True, exist_ok=True)
    progress = Progress(console=Console(stderr=True))
    with out.open("a", encoding="utf-8") as file, progress:
        task = progress.add_task("models", total=len(models), completed=len(models) - len(wanted))
        for entries in computed({name: models[name] for name in wanted}, jobs):
            file.writelines(json.dumps(entry) + "\n" for entry in entries)
            file.flush()
            results.extend(entries)
            progress.advance(task)
    return results


def computed(models: dict[str, dict[int, float]], jobs: int) -> Iterator[list[dict[str, Any]]]:
    """The results of each model as it is done, here or in `jobs` processes."""
    if jobs == 1:
        for name, points in models.items():
            yield work(name, points)
        return
    with ProcessPoolExecutor(jobs, max_tasks_per_child=40) as pool:
        pending = [pool.submit(work, name, points) for name, points in models.items()]
        for future in as_completed(pending):
            yield future.result()


def summary(results: list[dict[str, Any]]) -> dict[str, float]:
    """n, models, and median, mean, 90th percentile of the absolute relative error, and the bias (mean signed error)."""
    errors = np.array([r["predicted_mib"] / r["measured_mib"] - 1 for r in results if "predicted_mib" in r])
    return {
        "n": len(errors),
        "models": len({r["model"] for r in results if "predicted_mib" in r}),
        "median": float(np.median(np.abs(errors))),
        "mean": float(np.mean(np.abs(errors))),
        "p90": float(np.quantile(np.abs(errors), 0.9)),
        "bias": float(np.mean(errors)),
    }


def cut_short(result: dict[str, Any]) -> bool:
    """Whether the job never finished a step: it held less than the live tensors its authors count, and a context.

    `SOURCE.md` says that jobs which crashed are not marked; as a model's only or first row they pass its filter. The
    prediction takes no part in this.
    """
    held = result.get("fake_tensor_mib", 0.0) + framework_bytes(device(DEVICE), "torch-eager-loading") / MIB
    return bool(result["measured_mib"] < held)


def likely_cause(result: dict[str, Any]) -> str:
    """Why a row is off, as far as its own numbers tell."""
    gap = result["measured_mib"] - result["predicted_mib"]
    if cut_short(result):
        return "the job ended before its first whole step"
    if gap < 0:
        return "predicted more: fragmentation, or another version of the model"
    if gap > 500:
        return "measured more: a workspace that cudnn.benchmark tried was still held when sampled"
    return "measured more: kernels and workspaces not counted"


def report(results: list[dict[str, Any]], console: Console) -> bool:
    """Print the figures; True when they meet the bar."""
    usable = [r for r in results if "predicted_mib" in r]
    figures = summary(usable)
    table = Table(title=f"peak training memory, {DEVICE}, against nvidia-smi (GPUMemNet)")
    for heading in ("slice", "rows", "models", "median", "mean", "p90", "bias"):
        table.add_column(heading, justify="left" if heading == "slice" else "right")
    whole = [r for r in usable if not cut_short(r)]
    slices = {"all": usable, f"less {len(usable) - len(whole)} cut short": whole}
    slices |= {f"batch {b}": [r for r in usable if r["batch"] == b] for b in BATCHES}
    for name, rows in slices.items():
        if rows:
            s = summary(rows)
            percent = (f"{s[key]:.1%}" for key in ("median", "mean", "p90"))
            table.add_row(name, str(s["n"]), str(s["models"]), *percent, f"{s['bias']:+.1%}")
    console.print(table)
    worst = sorted(usable, key=lambda r: -abs(r["predicted_mib"] / r["measured_mib"] - 1))[:25]
    table = Table(title="largest errors")
    for heading in ("model", "batch", "measured MiB", "predicted MiB", "error", "likely cause"):
        table.add_column(heading, justify="left" if heading in ("model", "likely cause") else "right")
    for r in worst:
        error = r["predicted_mib"] / r["measured_mib"] - 1
        table.add_row(
            r["model"], str(r["batch"]), f"{r['measured_mib']:.0f}", f"{r['predicted_mib']:.0f}", f"{error:+.1%}",
            likely_cause(r),
        )  # fmt: skip
    console.print(table)
    for r in results:
        if "skipped" in r:
            console.print(f"skipped {r['model']}: {r['skipped']}", markup=False)
    met = all(figures[key] <= limit for key, limit in BAR.items())
    console.print(f"bar (median ≤ {BAR['median']:.0%}, p90 ≤ {BAR['p90']:.0%}): {'met' if met else 'NOT met'}")
    return met


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="only this many models, always the same ones")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--data", type=Path, default=None, help="folder of the public data (default $FORETELL_DATA)")
    parser.add_argument("--out", type=Path, help="JSONL file to append results to")
    arguments = parser.parse_args(argv)
    default = HERE.parents[2] / "shared" / "data"
    data = arguments.data or Path(os.environ.get("FORETELL_DATA", default))
    if not (data / "gpumemnet").is_dir():
        print(f"{data}: no folder gpumemnet; point --data or FORETELL_DATA at the public data", file=sys.stderr)
        return 2
    models = {name: points for name, points in measured(data).items() if points}
    if arguments.sample:
        models = {name: models[name] for name in sample(list(models), arguments.sample)}
    cache = Path(os.environ.get("FORETELL_CACHE") or Path.home() / ".cache" / "foretell")
    out = arguments.out or cache / "memory_gpumemnet" / f"{digest()}.jsonl"
    start = time.monotonic()
    results = run(models, out, arguments.jobs)
    counted = fake_tensors(data)
    for r in results:
        if "predicted_mib" in r:
            r["fake_tensor_mib"] = counted.get((r["model"], r["batch"]), 0.0)
    console = Console(width=max(120, Console().width))
    console.print(f"{len(models)} models in {time.monotonic() - start:.0f} s; results in {out}", markup=False)
    return 0 if report(results, console) else 1


if __name__ == "__main__":
    raise SystemExit(main())
