"""The ML.ENERGY benchmark's measurements of vLLM on H100 and B200 (ml-energy/leaderboard; no licence: only evaluated).

Each line is a steady state: `avg_batch_size` sequences run on average, under a cap of `max_num_seqs`. Lines about
images and video are left out, and models with state-space layers, whose shapes have no configuration.

How it is read, after the benchmark's own settings (ml-energy/benchmark, ``configs/vllm``):

* the server has all `num_gpus` in tensor parallelism; `expert_parallel` says that experts lie whole on these same
  ranks (``enable-expert-parallel``), not that attention is data-parallel: one engine keeps to `max_num_seqs`, and the
  batch over the gap between tokens gives the throughput of all devices;
* 8,192 tokens an iteration; the KV cache has the type of the model;
* lengths of answers are given as histograms: a token is decoded in a sequence drawn by its length, so a decoding
  sequence has Σn² / 2Σn tokens of its own behind it on average;
* lengths of prompts are not given: `PROMPTS` has about what the sets of requests have.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretell.accuracy.serving.models import Model, model
from foretell.accuracy.serving.row import LeftOut, Line, Row, devices, lines, unpacked_json
from foretell.errors import InputError
from foretell.simulate.serving import ServingPlan

TABLE, HISTOGRAMS = "llm_serving_throughput_energy.csv.gz", "output_length_histograms.json.gz"
GPUS = {"H100": "h100-sxm", "B200": "b200-sxm"}
PRECISIONS = {"bfloat16": "bf16", "fp8": "fp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}
#: Tokens of a prompt, by task: chats of the arena with earlier turns, questions with four answers, code around a gap.
PROMPTS = {"lm-arena-chat": 400, "gpqa": 300, "sourcegraph-fim": 2000}


def read(folder: Path) -> list[Row | LeftOut]:
    """Every line about text, of a model whose layers are all attention."""
    place = folder / "ml-energy"
    histograms = unpacked_json(place / HISTOGRAMS)
    return [_read(line, histograms) for line in lines(place / TABLE)]


def _read(line: Line, histograms: Mapping[str, Any]) -> Row | LeftOut:
    name, task = line.text("model_id"), line.text("task")
    label = f"{name} {task} {line.text('gpu_model')}x{line.text('num_gpus')} cap {line.text('max_num_seqs')}"
    label += f", {line.number('avg_batch_size'):.6g} running"
    if task not in PROMPTS:
        return LeftOut(label, f"{task}: not text")
    if "Mamba" in line.text("architecture"):
        return LeftOut(label, "not all layers are attention")
    shape = model(name)
    if shape is None:
        return LeftOut(label, f"no configuration of {name} is known")
    return _row(line, label, shape, histograms)


def _row(line: Line, label: str, shape: Model, histograms: Mapping[str, Any]) -> Row:
    gpus, cap = line.count("num_gpus"), line.count("max_num_seqs")
    place = f"{line.text('gpu_model')}x{gpus}"
    key = f"{line.text('model_id')}|{line.text('task')}|{place}|max_num_seqs={cap}"
    weights = line.choice("weight_precision", PRECISIONS)
    mean = line.number("avg_output_len")
    plan = ServingPlan(
        engine="vllm",
        version="0.11",
        tp=gpus,
        ep=line.count("expert_parallel"),
        weight_dtype=shape.weights or weights,
        max_num_seqs=cap,
    )
    isl = float(PROMPTS[line.text("task")])
    return Row(
        source="ml-energy",
        label=label,
        config=shape.config,
        plan=plan,
        cluster=devices(gpus, line.choice("gpu_model", GPUS)),
        load="batch",
        amount=line.number("avg_batch_size"),
        isl=isl,
        osl=mean,
        context=isl + behind(histograms.get(key), mean, key),
        family=line.text("model_id").rpartition("/")[2],
        itl_s=line.number("median_itl_ms") / 1e3,
        tokens_per_s=line.number("output_throughput_tokens_per_sec"),
        power_w=line.number("avg_power_watts"),
        approximate=shape.approximate,
    )


def behind(histogram: Any, mean: float, where: str) -> float:
    """Tokens of the answer that a decoding sequence has behind it on average: Σn² / 2Σn of their lengths.

    Without a histogram all are of `mean` length.

    >>> behind({"bins": [0, 2, 4], "counts": [1, 1]}, 2.0, "here")  # lengths 1 and 3
    1.25
    """
    if histogram is None:
        return mean / 2.0
    try:
        bins, counts = [float(b) for b in histogram["bins"]], [float(c) for c in histogram["counts"]]
        middles = [(a + b) / 2.0 for a, b in itertools.pairwise(bins)]
        square = sum(c * n * n for c, n in zip(counts, middles, strict=True))
        total = sum(c * n for c, n in zip(counts, middles, strict=True))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError("its histogram has no bins and counts", where, "use the table as published") from error
    return square / (2.0 * total) if total > 0 else mean / 2.0
