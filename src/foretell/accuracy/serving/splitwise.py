"""Splitwise's profile of vLLM on DGX-A100 and DGX-H100 (Mutinifni/splitwise-sim, MIT, ``data/perf_model.csv``).

Llama-2-70B and BLOOM-176B in fp16: a batch of equal prompts is processed at once (`prompt_time`), then each of
`token_size` tokens takes `token_time` on average. Five repeats or more of each setting are one row, their median. The
vLLM of 2023 launches every kernel from the host, so that tensor parallelism over four and over eight devices is
equally slow.

Times of prompts are judged for one prompt of at most 4,096 tokens; a batch of prompts took several iterations.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from foretell.accuracy.serving.models import model
from foretell.accuracy.serving.row import LeftOut, Line, Row, devices, lines
from foretell.simulate.serving import ServingPlan

TABLE = "perf_model.csv"
MACHINES = {"a100-80gb": "a100-sxm4-80gb", "h100-80gb": "h100-sxm"}
VERSION = "0.2"
#: One prompt of more tokens than this took longer than its kernels explain.
LONGEST = 4096


def read(folder: Path) -> list[Row | LeftOut]:
    """One row a setting of an uncapped machine."""
    found: dict[tuple[str, ...], list[Line]] = {}
    columns = ("model", "hardware", "tensor_parallel", "batch_size", "prompt_size", "token_size")
    for line in lines(folder / "splitwise" / TABLE):
        found.setdefault(tuple(line.text(column) for column in columns), []).append(line)
    return [_row(repeats) for repeats in found.values()]


def _row(repeats: list[Line]) -> Row | LeftOut:
    line = repeats[0]
    name, hardware, tp = line.text("model"), line.text("hardware"), line.count("tensor_parallel")
    batch, isl, osl = line.count("batch_size"), line.count("prompt_size"), line.count("token_size")
    label = f"{name} on {tp}x {hardware}, {batch} of {isl}/{osl}"
    if hardware not in MACHINES:
        return LeftOut(label, f"{hardware}: its power is capped")
    shape = model(name)
    if shape is None:
        return LeftOut(label, f"no configuration of {name} is known")
    plan = ServingPlan(
        engine="vllm",
        version=VERSION,
        tp=tp,
        weight_dtype="fp16",
        kv_dtype="fp16",
        max_num_batched_tokens=max(2560, batch * isl),
        chunked_prefill=False,
        cuda_graph=False,
    )
    alone = batch == 1 and isl <= LONGEST
    return Row(
        source="splitwise",
        label=label,
        config=shape.config,
        plan=plan,
        cluster=devices(tp, MACHINES[hardware]),
        load="batch",
        amount=float(batch),
        isl=float(isl),
        osl=float(osl),
        family=name,
        tpot_s=statistics.median(r.number("token_time") for r in repeats) / 1e3,
        ttft_s=statistics.median(r.number("prompt_time") for r in repeats) / 1e3 if alone else 0.0,
        split="fit",
    )
