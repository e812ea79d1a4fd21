"""Files damaged in hundreds of ways, always the same: each is refused by name, or answered with finite numbers."""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretell.calibrate.tables import from_table
from foretell.cost import calibration, estimate
from foretell.cost.scales import SCHEMA
from foretell.errors import ForetellError
from foretell.graph import Graph, Storage, Tensor, make_op
from foretell.hardware import device
from foretell.hardware.loader import load_device

# What a hand, a script or a bad disk puts in a value's place.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**18, 10**40, 10**400, 0.0, -0.5, 0.5, 1e-300, 1e30, 1e308,
    math.inf, -math.inf, math.nan, "", "x", "²", "1e999", "float32", "../x", "\x00", [], [0], [1, 2], ["x"], [[]],
    {}, {"a": 1},
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything in a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield (*path, key)
        yield from places(part, (*path, key))


def damaged(document: Any, chance: random.Random) -> Any:
    """A copy with one place, or two, changed, left out, or doubled."""
    changed = deepcopy(document)
    for _ in range(chance.choice((1, 1, 1, 2))):
        *path, key = chance.choice(list(places(changed)))
        parent = changed
        for step in path:
            parent = parent[step]
        how = chance.random()
        if how < 0.8:
            parent[key] = deepcopy(chance.choice(VALUES))
        elif how < 0.9:
            del parent[key]
        elif isinstance(parent, list):
            parent.append(deepcopy(parent[key]))
        else:
            parent[f"{key}x"] = deepcopy(parent[key])
    return changed


def spoilt(text: str, chance: random.Random) -> str:
    """A text cut short, or with a few characters changed."""
    if chance.random() < 0.3:
        return text[: chance.randrange(len(text))]
    letters = list(text)
    for _ in range(chance.randrange(1, 4)):
        letters[chance.randrange(len(letters))] = chance.choice('"[]{},:=.-90eE\n\t\x00²ü')
    return "".join(letters)


def step() -> Graph:
    """A convolution, its norm, a pooling, a softmax and a product."""
    shapes = ((2, 8, 16, 16), (12, 2, 3, 3), (2, 12, 14, 14), (12,), (2, 12, 7, 7), (2, 588), (588, 5), (2, 5))
    tensors = tuple(Tensor(shape, "float32", i) for i, shape in enumerate(shapes))
    convolution = {"stride": (1, 1), "dilation": (1, 1), "groups": 4, "transposed": False}
    ops = (
        make_op("aten.convolution.default", tensors, (0, 1), (2,), attrs=convolution),
        make_op("aten.native_batch_norm.default", tensors, (2, 3, 3), (2, 3, 3), attrs={"training": True}),
        make_op("aten.max_pool2d_with_indices.default", tensors, (2,), (4,), attrs={"window": (2, 2)}),
        make_op("aten._softmax.default", tensors, (5,), (5,), attrs={"dim": -1}),
        make_op("aten.mm.default", tensors, (5, 6), (7,)),
    )
    storages = tuple(Storage(t.nbytes, "temporary", min(3, i) - 1, 4) for i, t in enumerate(tensors))
    return Graph("g", "inference", "fp32", ops, tensors, storages, 3156, 0, {"images": 2}, (0,), (7,))


def finite(found: Any) -> None:
    """Nothing in an estimate is infinite, none, or negative."""
    low, high = found.time_interval_s
    assert 0 <= low <= found.time_s <= high < math.inf
    assert np.isfinite(found.ops.time_s).all()
    json.dumps(found.to_dict(), allow_nan=False)


def graph_json(path: Path, chance: random.Random) -> None:
    text = json.dumps(damaged(step().to_dict(), chance))
    path.write_text(spoilt(text, chance) if chance.random() < 0.2 else text)
    graph = Graph.from_json(path)
    for name, model, runtime in (("a100-sxm4-40gb", "learned", "eager"), ("epyc-7763", "cpu", "compiled")):
        finite(estimate(graph, device(name), model=model, runtime=runtime))


SHIPPED = calibration.load("cpu")
PROCESSOR = {
    "schema": calibration.SCHEMA,
    "model": "cpu",
    "constants": dict(SHIPPED.constants),
    "intervals": {name: list(pair) for name, pair in SHIPPED.intervals.items()},
    "provenance": {"machine": {"device": "A machine"}},
}
SCALES = {
    "schema": SCHEMA,
    "device": "t4",
    "model": "roofline",
    "factors": {"matmul": [0.5, 1.1, 2.0, 7], "convolution": [0.9, 0.8, 1.2, 70]},
    "provenance": {"source": "a table", "rows": 77},
}


def processor_calibration(path: Path, chance: random.Random) -> None:
    text = json.dumps(damaged(PROCESSOR, chance))
    path.write_text(spoilt(text, chance) if chance.random() < 0.2 else text)
    finite(estimate(step(), device("epyc-7763"), model="cpu", calibration=path))


def scales(path: Path, chance: random.Random) -> None:
    text = json.dumps(damaged(SCALES, chance))
    path.write_text(spoilt(text, chance) if chance.random() < 0.2 else text)
    finite(estimate(step(), device("t4"), model="roofline", calibration=path))


SHEET = """title = "My GPU"
vendor = "NVIDIA"
kind = "gpu"
architecture = "Ampere"
compute_capability = "8.6"
multiprocessors = [10, "sheet"]
base_clock = ["1 GHz", "sheet"]
boost_clock = ["1.5 GHz", "sheet"]
l2 = ["4 MiB", "sheet"]
memory = ["16 GiB", "sheet"]
memory_bandwidth = ["200 GB/s", "sheet"]
tdp = ["70 W", "sheet"]
price_per_hour = ["0.5 USD/h", "sheet"]
[peaks]
"fp16.tensor" = ["18 TFLOP/s", "sheet"]
"fp32.vector" = ["9 TFLOP/s", "sheet"]
[sources]
sheet = "A data sheet, 2026"
"""


def data_sheet(path: Path, chance: random.Random) -> None:
    lines = SHEET.splitlines()
    at = chance.randrange(len(lines))
    how = chance.random()
    if how < 0.6 and "=" in lines[at]:
        value = chance.choice(("0", "-1", "10", '"x"', "[]", "[1, 2]", "1e308", "inf", "nan", "true", "{a = 1}",
                               *(f'["{v} {u}", "sheet"]' for v in ("0", "1e-9", "1e30", "9" * 400, "-1", "inf", "nan")
                                 for u in ("GHz", "GB/s", "GiB", "W", "TFLOP/s", "USD/h")),
                               *(f'[{v}, "sheet"]' for v in ("0", "-3", "9" * 30, "1.5", "nan"))))  # fmt: skip
        lines[at] = f"{lines[at].partition('=')[0]}= {value}"
    elif how < 0.8:
        del lines[at]
    elif how < 0.9:
        lines.insert(chance.randrange(len(lines)), lines[at])
    text = "\n".join(lines)
    path = path.with_name("my-gpu.toml")
    path.write_text(spoilt(text, chance) if how >= 0.9 else text)
    found = load_device(path)
    assert (found.base_clock_hz or 0) <= (found.boost_clock_hz or math.inf)
    assert max((found.memory_bytes or 1, found.tdp_w or 1, *found.peaks.values())) < 1e23
    finite(estimate(step(), found))


TABLE = [
    ["kind", "batch", "m", "n", "k", "in_channels", "out_channels", "height", "width", "kernel", "stride", "groups",
     "dtype", "time_s", "device"],
    ["matmul", "", "1024", "1024", "1024", "", "", "", "", "", "", "", "float16", "1e-4", "t4"],
    ["convolution", "8", "", "", "", "64", "64", "56", "56", "3", "1", "1", "float32", "1e-3", "t4"],
]  # fmt: skip


def table(path: Path, chance: random.Random) -> None:
    rows = damaged(TABLE, chance)
    buffer = io.StringIO()
    csv.writer(buffer).writerows(row if isinstance(row, list) else [row] for row in rows)
    text = buffer.getvalue()
    path.write_text(spoilt(text, chance) if chance.random() < 0.3 else text)
    found = from_table(path, device("t4"), "roofline")
    assert all(0 < v < math.inf for f in found.factors.values() for v in (f.low, f.mid, f.high))


@pytest.mark.parametrize(
    ("damage", "cases"),
    [(graph_json, 250), (processor_calibration, 150), (scales, 300), (data_sheet, 300), (table, 400)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_damaged_file_is_refused_by_name_or_answered(
    damage: Callable[[Path, random.Random], None], cases: int, tmp_path: Path
) -> None:
    chance = random.Random(damage.__name__)
    refused, nameless = 0, []
    for case in range(cases):
        path = tmp_path / "damaged.file"
        try:
            damage(path, chance)
        except ForetellError as error:
            refused += 1
            nameless += [] if "damaged.file" in str(error) or "my-gpu" in str(error) else [str(error)]
        except Exception as error:
            kept = next(p for p in (path, path.with_name("my-gpu.toml")) if p.exists())
            raise AssertionError(f"case {case}: {type(error).__name__}: {error}\n{kept.read_text()[:20000]}") from error
    assert not nameless
    assert cases / 4 < refused < 0.97 * cases  # both ways were taken
