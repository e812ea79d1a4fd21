"""AIConfigurator's measurements of whole engines (ai-dynamo/aiconfigurator, Apache-2.0, ``silicon_sample.csv``).

TensorRT-LLM, vLLM and SGLang on Hopper and Blackwell, largely the public runs of InferenceMAX; a closed loop of
`concurrency=` requests, as `silicon_data_source` says (eight rows without it: `batch_size` a rank). Only aggregated
rows: those of disaggregated prefill and decode do not state both sides' load.

Three defects make a line no row: its layout contradicts its id or itself (``tp8_ep8`` multiplied to 64 devices), it
is impossible (at eight times the concurrency of another line of its layout or more, tokens take no longer), or it
repeats the figures of a line before it.

What the table leaves open, and how it is taken:

* a blank precision is bf16; fp4 is the format of the weights as published, else nvfp4; int4 of the weights only;
* without `attention_dp_size`, ranks that share experts (``moe_tp × moe_ep``) beyond `tp_size` are data-parallel;
* the KV cache is fp8 where TensorRT-LLM serves fp8 or fp4 weights, as its checkpoints say, else bf16;
* a version that is a build's name (``gpt-oss-dev``) is the engine's default;
* as many sequences may run as there are requests, and 8,192 tokens in one iteration;
* InferenceMAX draws lengths evenly from 80 to 100 % of the stated ones (``--random-range-ratio 0.8``, its README), and
  its tables are named by a date or a model. Those of other tables are taken to be fixed;
* a table in which prompts come so fast that they alone would take 60 % of the devices' dense peak, beside decoding, is
  taken to find them in its prefix cache (one does, vLLM's of Llama-3.1-8B-FP8 with 83 %; the next has 44 %).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from foretell.accuracy.serving.models import Model, model
from foretell.accuracy.serving.row import LeftOut, Line, Row, devices, lines
from foretell.errors import InputError
from foretell.simulate.serving import ServingPlan

TABLE = "silicon_sample.csv.gz"
SYSTEMS = {
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200-sxm",
    "b200_sxm": "b200-sxm",
    "b300_sxm": "b300-sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "gb200_sxm": "gb200",
    "gb300_sxm": "gb300",
    "a100_sxm": "a100-sxm4-80gb",
    "l40s": "l40s",
}
PRECISIONS = {"": "bf16", "fp8": "fp8", "fp4": "nvfp4", "int4": "int4"}
ENGINES = {"trtllm": "trtllm", "vllm": "vllm", "sglang": "sglang"}
#: Devices of one machine; racks have more.
MACHINE, RACK = 8, 72

_LOAD = re.compile(r"concurrency=(\d{1,7})\b")
_INFERENCEMAX = re.compile(r"db-dump/|source_file=(\d{4}-\d{2}-\d{2}|[\w.-]+-gap-analysis)\.csv")
_SHORTEST = 0.8
#: More of the dense peak than prompts can take beside decoding.
_MOST_OF_PEAK = 0.6
_DEGREE = re.compile(r"_tp(\d{1,4})(?:_\d+)?_ep")


def read(folder: Path) -> list[Row | LeftOut]:
    """Every aggregated line without the three defects, of a model whose shape is known."""
    found: list[Row | LeftOut] = []
    seen: set[tuple[str, ...]] = set()
    tables: dict[str, str] = {}
    for line in lines(folder / "aiconfigurator-serving" / TABLE):
        label = line.text("id")
        if line.text("mode") != "agg":
            found.append(LeftOut(label, "prefill and decode apart"))
            continue
        figures = tuple(line.text(c) for c in ("system", "isl", "osl", "silicon_ttft_ms", "silicon_tpot_ms"))
        shape = model(line.text("model_path"))
        if shape is None:
            found.append(LeftOut(label, f"no configuration of {line.text('model_path')} is known"))
        elif contradicted(line):
            found.append(LeftOut(label, "layout contradicts its id"))
        elif figures in seen:
            found.append(LeftOut(label, "repeats another line"))
        else:
            seen.add(figures)
            found.append(_row(line, shape))
            tables[label] = line.text("silicon_data_source").partition(";")[0]
    found = _with_caches(found, tables)
    impossible = {id(row) for row in _impossible([item for item in found if isinstance(item, Row)])}
    return [
        LeftOut(item.label, "impossible: no slower at eight times the load") if id(item) in impossible else item
        for item in found
    ]


def degrees(line: Line) -> tuple[int, int, int]:
    """Tensor-, data- and expert-parallel ranks of a line."""
    tp = line.count("tp_size")
    expert_ranks = _whole(line, "moe_tp_size") * _whole(line, "moe_ep_size")
    dp = line.count("attention_dp_size", missing=0) or max(1, expert_ranks // tp)
    return tp, dp, _whole(line, "moe_ep_size")


def contradicted(line: Line) -> bool:
    """Whether the degrees contradict the id, or where it states none, a machine's size."""
    tp, dp, ep = degrees(line)
    stated = _DEGREE.search(line.text("id"))
    if stated is None:
        return tp * dp > (RACK if line.text("system").startswith("gb") else MACHINE)
    written = line.count("attention_dp_size", missing=0) or 1
    return tp * written != int(stated[1]) or (ep > 1 and (tp * dp) % ep != 0)


def concurrency(line: Line, dp: int) -> int:
    """Requests in the system."""
    stated = _LOAD.search(line.text("silicon_data_source"))
    return int(stated[1]) if stated else line.count("batch_size") * dp


def _row(line: Line, shape: Model) -> Row:
    tp, dp, ep = degrees(line)
    engine = line.choice("backend", ENGINES)
    weights = line.choice("precision", PRECISIONS)
    requests = concurrency(line, dp)
    if weights != "bf16" and shape.weights:
        weights = shape.weights
    plan = ServingPlan(
        engine=engine,
        version=_numbered(line.text("backend_version")),
        tp=tp,
        pp=line.count("pp_size"),
        dp=dp,
        ep=ep,
        weight_dtype=weights,
        kv_dtype="fp8" if engine == "trtllm" and weights in ("fp8", "nvfp4") else "bf16",
        max_num_seqs=max(256, requests),
    )
    return Row(
        source="silicon-sample",
        label=line.text("id"),
        config=shape.config,
        plan=plan,
        cluster=devices(plan.devices, line.choice("system", SYSTEMS)),
        load="concurrency",
        amount=float(requests),
        isl=float(line.count("isl")),
        osl=float(line.count("osl")),
        shortest=_SHORTEST if _INFERENCEMAX.match(line.text("silicon_data_source")) else 1.0,
        family=line.text("model_path").rpartition("/")[2],
        ttft_s=line.number("silicon_ttft_ms") / 1e3,
        tpot_s=line.number("silicon_tpot_ms") / 1e3,
        split="fit",
        approximate=shape.approximate,
    )


def _numbered(version: str) -> str:
    """A version; names of builds (``gpt-oss-dev``) say none."""
    return version if re.match(r"v?\d", version) else ""


def _with_caches(found: list[Row | LeftOut], tables: Mapping[str, str]) -> list[Row | LeftOut]:
    """The same, prompts cached but for their last block in the tables that need it."""
    served = {
        tables[item.label] for item in found if isinstance(item, Row) and peak_share(item) > _MOST_OF_PEAK
    }  # fmt: skip
    return [
        replace(item, cached_isl=max(0.0, item.isl - item.plan.block_size))
        if isinstance(item, Row) and tables[item.label] in served
        else item
        for item in found
    ]


def peak_share(row: Row) -> float:
    """What share of the devices' dense peak prompts would take, processed anew at the rate they come."""
    peaks = row.cluster.groups[0][1].device.peaks
    peak = peaks.get(f"{row.precision}.tensor", peaks["bf16.tensor"])
    weights = row.config.active_parameters - 2 * row.config.vocab * row.config.hidden
    cycle = row.ttft_s + (row.mean_osl - 1.0) * row.tpot_s
    return row.amount * row.mean_isl * 2.0 * weights / cycle / (row.gpus * peak)


def _impossible(rows: list[Row]) -> Iterator[Row]:
    """Rows whose tokens take no longer (within 2 %) than at the next load of at most an eighth in the same layout."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        p = row.plan
        key = (row.gpu, row.config.name, p.engine, p.weight_dtype, p.tp, p.dp, p.ep, row.isl, row.osl)
        groups.setdefault(key, []).append(row)
    for group in groups.values():
        for row in group:
            below = [other for other in group if 8 * other.amount <= row.amount]
            next_below = max(below, key=lambda other: other.amount, default=None)
            if next_below is not None and row.tpot_s < 1.02 * next_below.tpot_s:
                yield row


def _whole(line: Line, column: str) -> int:
    """A degree; 0 and nothing are 1: the model has no experts."""
    text = line.text(column)
    if not text.isdecimal() and text:
        raise InputError(f"{column} is {text[:40]!r}, want a count", line.where, "use the table as published")
    return max(1, int(text or 1))
