"""Parity with timm's published tables: parameters, and multiply-adds as fvcore counts them.

Every (model, image size) with ``infer_gmacs`` in the newest inference tables of ``$FORETELL_DATA/timm`` is captured at
batch 1 in fp32 and compared with the table's figures, which have two decimals:

* parameters equal after rounding, for at least 99.5 % of the rows;
* multiply-adds within 1 % or equal after rounding, for at least 99 %.

Some rows were measured after re-parametrisation (parallel branches folded into one convolution): where only the folded
network has the table's parameters, it is the one compared, and the row says so. Each miss is printed with its cause.
It is found by running fvcore itself on the same network: if that gives the table's figure, fvcore leaves something out
that runs; if it gives ours, the table measured another network.

    python benchmarks/parity_timm.py [--data DIR] [--limit N] [--jobs N]

Rows are kept as they come under ``$FORETELL_CACHE`` (default ``~/.cache/foretell``), so a second run goes on from
where the first stopped. Exit code 1 where a bar is missed, 2 without data. Needs ``foretell[zoo]``; causes need fvcore.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.metadata
import json
import logging
import multiprocessing
import re
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell.accuracy.slices import data_folder
from foretell.errors import ForetellError, InputError
from foretell.graph import Graph
from foretell.workload import cache
from foretell.workload.options import Options, options
from foretell.workload.resolve import on_meta, resolve, timm_module

if TYPE_CHECKING:
    from torch import nn

PARAMETER_BAR = 0.995
MAC_BAR = 0.99
MAC_TOLERANCE = 0.01
ROUNDING = 0.005 * (1 + 1e-6)  # the tables have two decimals, of 10⁶ parameters and 10⁹ multiply-adds
LARGEST_FVCORE_BYTES = 4e9  # fvcore runs the network with real weights: leave larger ones alone


# --- the tables -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """What the tables say of one model at one square image size, per image."""

    model: str
    image_size: int
    parameters_m: float
    gmacs: float

    def same_parameters(self, parameters: int) -> bool:
        """Whether a count is the table's, after rounding."""
        return abs(parameters / 1e6 - self.parameters_m) <= ROUNDING

    def same_macs(self, macs: float) -> bool:
        """Whether multiply-adds are the table's, within 1 % or after rounding."""
        difference = abs(macs / 1e9 - self.gmacs)
        return difference <= ROUNDING or difference <= MAC_TOLERANCE * self.gmacs


def newest_tables(folder: Path) -> list[Path]:
    """The inference tables of the newest framework version there (``pt113`` is 1.13, ``pt291`` is 2.9.1)."""
    found: dict[tuple[int, ...], list[Path]] = {}
    for path in sorted(folder.glob("benchmark-infer-*.csv")):
        match = re.search(r"-pt(\d)(\d+)-", path.name)
        if match:
            major, rest = match.groups()
            version = (int(major), int(rest)) if major == "1" else (int(major), *map(int, rest))
            found.setdefault(version, []).append(path)
    return found[max(found)] if found else []


def read_rows(paths: Iterable[Path]) -> list[Row]:
    """Distinct rows with ``infer_gmacs``, in order of name and size. Raises InputError where a table is malformed."""
    rows = set()
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            for line, record in enumerate(csv.DictReader(file), start=2):
                try:
                    if record["infer_gmacs"]:
                        size = int(float(record["infer_img_size"]))
                        rows.add(Row(record["model"], size, float(record["param_count"]), float(record["infer_gmacs"])))
                except (KeyError, TypeError, ValueError) as error:
                    raise InputError(f"not a timm table: {error!r}", f"{path.name}:{line}") from error
    return sorted(rows, key=lambda row: (row.model, row.image_size, row.parameters_m, row.gmacs))


def sample(rows: Sequence[Row], limit: int | None) -> list[Row]:
    """At most `limit` rows, in order, drawn by a hash of their names: always the same ones, and no family's alone."""
    if limit is None or limit >= len(rows):
        return list(rows)
    drawn = sorted(rows, key=lambda row: hashlib.sha256(f"{row.model}@{row.image_size}".encode()).digest())
    kept = set(drawn[:limit])
    return [row for row in rows if row in kept]


# --- one row ----------------------------------------------------------------------------------------------------


def measure(row: Row) -> dict[str, Any]:
    """Our counts of a row as plain data, and what is needed to explain them where they differ from the table's."""
    started = time.perf_counter()
    record: dict[str, Any] = {"model": row.model, "image_size": row.image_size, "form": "as built"}
    request = options(batch=1, image_size=row.image_size)
    try:
        graph = resolve(f"timm:{row.model}", request)
        if not row.same_parameters(graph.parameters):
            folded = _reparametrised(row, request)
            if folded is not None and row.same_parameters(folded.parameters):
                graph, record["form"] = folded, "re-parametrised"
        record |= {"parameters": graph.parameters, "macs": graph.macs("fvcore"), "by": _by_group(graph)}
        if not row.same_macs(record["macs"]):
            record["fvcore"] = fvcore_counts(row, record["form"] == "re-parametrised")
            record["plain"] = _in_plain_operations(row, request, record["form"] == "re-parametrised")
    except ForetellError as error:
        record["error"] = " ".join(str(error).split())
    record["seconds"] = round(time.perf_counter() - started, 2)
    return record


def _reparametrised(row: Row, request: Options) -> Graph | None:
    """The graph of the network with its parallel branches folded; None where that cannot be built without weights."""
    try:
        return _captured(row, request, reparametrised=True)
    except ForetellError:
        return None


def _in_plain_operations(row: Row, request: Options, reparametrised: bool) -> int:
    """Our count with attention in plain operations, as the tables were made, instead of one fused kernel."""
    with _attention_in_plain_operations():
        return _captured(row, request, reparametrised).macs("fvcore")


def _captured(row: Row, request: Options, reparametrised: bool) -> Graph:
    from foretell.workload.capture import capture_module, example_tensor

    module = on_meta(lambda: _built(row, reparametrised))
    image = example_tensor((1, 3, row.image_size, row.image_size), "float32")
    return capture_module(module, (image,), options=request, name=f"timm:{row.model}")


def _built(row: Row, reparametrised: bool) -> nn.Module:
    from timm.utils.model import reparameterize_model

    module = timm_module(row.model, row.image_size).eval()
    return reparameterize_model(module) if reparametrised else module


# --- the same network by fvcore itself --------------------------------------------------------------------------

# What fvcore and we count, in the same three groups.
_FVCORE_GROUPS = {
    "convolutions": ("conv",),
    "products": ("linear", "addmm", "mm", "bmm", "matmul", "einsum"),
}
_OUR_GROUPS = {
    "convolution": "convolutions",
    **dict.fromkeys(("matmul", "batched_matmul", "grouped_matmul", "attention", "recurrent"), "products"),
}
# Operations fvcore has no rule for, though products or convolutions run under them.
_LEFT_OUT = re.compile(r"conv|attention|mm$|mv$|dot$|lstm|gru|rnn|Function")


def _by_group(graph: Graph) -> dict[str, int]:
    by = {"convolutions": 0, "products": 0, "the rest": sum(op.norm_macs for op in graph.ops)}
    for op in graph.ops:
        if op.macs:
            by[_OUR_GROUPS[op.kind]] += op.macs
    return by


def fvcore_counts(row: Row, reparametrised: bool) -> dict[str, Any]:
    """fvcore's count of the row's network, run with attention in plain operations as the tables were.

    Plain data: ``total``, ``by`` group, and ``left_out``, the operations it has no rule for that do such arithmetic;
    or ``error``, the reason why there is none.
    """
    try:
        from fvcore.nn import FlopCountAnalysis
    except ImportError:
        return {"error": "fvcore is not installed"}
    import torch

    with _attention_in_plain_operations(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            with torch.device("meta"):
                weights_bytes = 4 * sum(p.numel() for p in timm_module(row.model, row.image_size).parameters())
        except Exception:  # not every constructor runs there; those that do not are small
            weights_bytes = 0
        if weights_bytes > LARGEST_FVCORE_BYTES:
            return {"error": f"not run: its weights take {weights_bytes / 1e9:.0f} GB"}
        try:
            module = _built(row, reparametrised)
            image = torch.zeros(1, 3, row.image_size, row.image_size)
            analysis = FlopCountAnalysis(module, image)
            analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
            operators = {name: int(count) for name, count in analysis.by_operator().items()}
        except Exception as error:  # another's code on any network: whatever goes wrong is the answer
            return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
        left_out = {name: n for name, n in analysis.unsupported_ops().items() if _LEFT_OUT.search(name)}
    by = {group: sum(operators.get(name, 0) for name in names) for group, names in _FVCORE_GROUPS.items()}
    total = sum(operators.values())
    by["the rest"] = total - sum(by.values())
    return {"total": total, "by": by, "left_out": left_out}


@contextmanager
def _attention_in_plain_operations() -> Iterator[None]:
    from timm.layers import set_fused_attn, use_fused_attn

    before = use_fused_attn()
    set_fused_attn(False)
    try:
        yield
    finally:
        set_fused_attn(bool(before))


# --- judging ----------------------------------------------------------------------------------------------------


def causes(row: Row, record: dict[str, Any], rows: Iterable[Row] = ()) -> list[str]:
    """Why a row misses, one sentence a quantity; empty where it does not.

    `rows` are the other rows of the tables: one with the same figures may be the network that was measured.
    """
    if "error" in record:
        return [f"not captured: {record['error']}"]
    found = []
    if not row.same_parameters(record["parameters"]):
        found.append(
            f"parameters: timm {importlib.metadata.version('timm')} builds {record['parameters'] / 1e6:.2f} M, "
            f"the table has {row.parameters_m:.2f} M: the architecture is not the one measured"
        )
        figures = (row.image_size, row.parameters_m, row.gmacs)
        same = [r.model for r in rows if (r.image_size, r.parameters_m, r.gmacs) == figures and r.model != row.model]
        if same:
            found[-1] += f" (the tables have the same figures for {', '.join(same)})"
    if not row.same_macs(record["macs"]):
        found.append(_mac_cause(row, record))
    return found


def _mac_cause(row: Row, record: dict[str, Any]) -> str:
    theirs, ours, plain = record["fvcore"], record["macs"], record["plain"]
    if row.same_macs(plain):
        return (
            f"multiply-adds: {plain / 1e9:.2f} G with attention in plain operations, as the tables were made: "
            "in fused form it multiplies more"
        )
    if "error" in theirs:
        return f"multiply-adds: unexplained ({theirs['error']})"
    if row.same_macs(theirs["total"]):
        gaps = [
            f"{group} {record['by'][group] / 1e9:.2f} G, fvcore {theirs['by'][group] / 1e9:.2f} G"
            for group in record["by"]
            if abs(record["by"][group] - theirs["by"][group]) > 1e-3 * ours
        ]
        unseen = ", ".join(f"{name} ×{n}" for name, n in sorted(theirs["left_out"].items()))
        reason = f"fvcore has no rule for {unseen}" if unseen else "fvcore's own rules differ"
        return f"multiply-adds: {reason} ({'; '.join(gaps) or 'rounding'})"
    if abs(theirs["total"] - ours) <= MAC_TOLERANCE * ours:
        return (
            f"multiply-adds: fvcore run here on timm {importlib.metadata.version('timm')} gives "
            f"{theirs['total'] / 1e9:.2f} G as we do: the network is not the one measured"
        )
    return f"multiply-adds: unexplained: fvcore run here gives {theirs['total'] / 1e9:.2f} G"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rows with their records, in the rows' order."""

    rows: tuple[tuple[Row, dict[str, Any]], ...]

    @property
    def same_parameters(self) -> int:
        """Rows with the table's parameters."""
        return sum("error" not in r and row.same_parameters(r["parameters"]) for row, r in self.rows)

    @property
    def same_macs(self) -> int:
        """Rows with the table's multiply-adds."""
        return sum("error" not in r and row.same_macs(r["macs"]) for row, r in self.rows)

    @property
    def passes(self) -> bool:
        """Whether both bars are met."""
        n = len(self.rows)
        return n > 0 and self.same_parameters >= PARAMETER_BAR * n and self.same_macs >= MAC_BAR * n


# --- running ----------------------------------------------------------------------------------------------------


def run(rows: Sequence[Row], jobs: int = 1, home: Path | None = None) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Each row with its record, in order; known records are read from `home`, new ones written there as they come."""
    known: dict[str, dict[str, Any]] = {}
    path = None
    if home is not None:
        path = home / f"parity-timm-{_fingerprint()}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        known = _read_records(path)
    missing = [row for row in rows if repr(row) not in known]
    with _measured(missing, jobs) as made:
        for row in rows:
            record = known.get(repr(row))
            if record is None:
                record = next(made)
                if path is not None:
                    with path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"row": repr(row), **record}) + "\n")
            yield row, record


@contextmanager
def _measured(rows: Sequence[Row], jobs: int) -> Iterator[Iterator[dict[str, Any]]]:
    if jobs == 1 or len(rows) < 2:
        yield map(measure, rows)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_one_thread) as pool:
        try:
            yield pool.map(measure, rows)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _read_records(path: Path) -> dict[str, dict[str, Any]]:
    records = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
                records[record.pop("row")] = record
            except (ValueError, KeyError):
                continue  # a line cut short by an interruption
    return records


def _fingerprint() -> str:
    """Changes with the code that captures and compares, and the libraries."""
    request = f"{cache.key('timm', Options(), ('torch', 'timm'))} {Path(__file__).read_text(encoding='utf-8')}"
    return hashlib.sha256(request.encode()).hexdigest()[:16]


def report(outcome: Outcome, rows: Sequence[Row]) -> list[Any]:
    """The table of misses, the rows that match re-parametrised, and the two bars, as rich renderables.

    `rows` are all rows of the tables, compared or not.
    """
    from rich.table import Table
    from rich.text import Text

    misses = Table(title="misses", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for title in ("model", "size", "params M", "table", "GMAC", "table", "error", "cause"):
        misses.add_column(title, justify="left" if title in ("model", "cause") else "right", no_wrap=title == "model")
    folded = []
    for row, record in outcome.rows:
        if record["form"] == "re-parametrised":
            folded.append(f"{row.model}@{row.image_size}")
        reasons = causes(row, record, rows)
        if not reasons:
            continue
        numbers = ["–"] * 2
        difference = "–"
        if "error" not in record:
            numbers = [f"{record['parameters'] / 1e6:.2f}", f"{record['macs'] / 1e9:.2f}"]
            difference = f"{record['macs'] / 1e9 / row.gmacs - 1:+.1%}" if row.gmacs else "–"
        misses.add_row(
            row.model,
            str(row.image_size),
            numbers[0],
            f"{row.parameters_m:.2f}",
            numbers[1],
            f"{row.gmacs:.2f}",
            difference,
            "; ".join(reasons),
        )
    bars = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "equal", "rows", "share", "bar", ""):
        bars.add_column(title, justify="right" if title else "left")
    n = max(len(outcome.rows), 1)
    for name, equal, bar in (
        ("parameters, after rounding", outcome.same_parameters, PARAMETER_BAR),
        ("multiply-adds (fvcore), within 1 % or rounding", outcome.same_macs, MAC_BAR),
    ):
        verdict = Text("met", "green") if equal >= bar * n else Text("missed", "bold red")
        bars.add_row(name, str(equal), str(len(outcome.rows)), f"{equal / n:.2%}", f"{bar:.1%}", verdict)
    parts: list[Any] = [misses] if misses.row_count else []
    if folded:
        parts.append(Text(f"compared re-parametrised: {', '.join(folded)}"))
    return [*parts, bars]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit code."""
    parser = argparse.ArgumentParser(description="Compare parameters and multiply-adds with timm's tables.")
    parser.add_argument("--data", help="folder that holds timm/ (default: $FORETELL_DATA, else ../shared/data)")
    parser.add_argument("--limit", type=int, help="compare only this many rows, always the same ones")
    parser.add_argument("--jobs", type=int, default=1, help="processes to use (default: 1)")
    given = parser.parse_args(arguments)
    for name in ("limit", "jobs"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            parser.error(f"--{name} must be at least 1")

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(width=None if sys.stdout.isatty() else 200)
    try:
        folder = data_folder(given.data) / "timm"
        known = read_rows(newest_tables(folder))
        if not known:
            raise InputError("holds no inference tables", str(folder), "set FORETELL_DATA or pass --data DIR")
    except InputError as error:
        console.print(str(error), style="red")
        return 2
    logging.getLogger("fvcore").setLevel(logging.ERROR)
    rows = sample(known, given.limit)
    done: list[tuple[Row, dict[str, Any]]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("captures", total=len(rows))
        try:
            for row, record in run(rows, given.jobs, cache.folder()):
                done.append((row, record))
                progress.update(task, advance=1, description=row.model)
        except KeyboardInterrupt:
            pass
    outcome = Outcome(tuple(done))
    for part in report(outcome, known):
        console.print(part)
    if len(done) < len(rows):
        console.print(f"stopped after {len(done)} of {len(rows)} rows: run it again to go on")
        return 130
    return 0 if outcome.passes else 1


if __name__ == "__main__":
    sys.exit(main())
