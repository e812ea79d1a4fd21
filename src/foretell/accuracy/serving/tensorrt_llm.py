"""TensorRT-LLM's published maximum throughput (NVIDIA/TensorRT-LLM, Apache-2.0, ``perf-overview.md``).

Versions 0.14 (engines) and 1.0 (PyTorch) of ``trtllm-bench throughput``: all requests of one length are there at the
start, in-flight batching, output tokens per second of all devices together. As the documents say, 8-bit weights come
with an 8-bit KV cache, and a batch holds 4,096 sequences and 8,192 tokens at most. Of the memory that is free 95 % is
for the cache in 1.0, as its commands say, and 90 % in 0.14, whose commands leave the setting alone. Prompts are never
cut into chunks in 0.14, and no sequence is evicted: it starts when there is room for all its tokens.
"""

from __future__ import annotations

from pathlib import Path

from foretell.accuracy.serving.models import model
from foretell.accuracy.serving.row import LeftOut, Line, Row, devices, lines
from foretell.simulate.serving import ServingPlan

TABLE = "perf_overview_max_throughput.csv"
GPUS = {
    "H100": "h100-sxm",
    "H100 80GB HBM3": "h100-sxm",
    "H200": "h200-sxm",
    "H200 141GB HBM3": "h200-sxm",
    "B200": "b200-sxm",
    "GB200": "gb200",
    "RTX6000Pro": "rtx-pro-6000-server",
    "RTX 6000 Pro Blackwell SE": "rtx-pro-6000-server",
    "A100-SXM4-80GB": "a100-sxm4-80gb",
    "A100-PCIE-80GB": "a100-pcie-80gb",
    "L40S": "l40s",
}
PRECISIONS = {"FP16": ("fp16", "fp16"), "BF16": ("bf16", "bf16"), "FP8": ("fp8", "fp8"), "FP4": ("nvfp4", "fp8")}
SEQUENCES, TOKENS = 4096, 8192


def read(folder: Path) -> list[Row | LeftOut]:
    """Every line whose degrees fill its devices, of a model whose shape is known."""
    return [_row(line) for line in lines(folder / "tensorrt-llm" / TABLE)]


def _row(line: Line) -> Row | LeftOut:
    name, version, gpus = line.text("model"), line.text("trtllm_version"), line.count("num_gpus")
    tp, pp = line.count("tp"), line.count("pp")
    isl, osl = line.count("input_len"), line.count("output_len")
    label = f"{version} {name} {line.text('precision')} on {gpus}x {line.text('gpu')} tp{tp} pp{pp} {isl}/{osl}"
    shape = model(name)
    if shape is None:
        return LeftOut(label, f"no configuration of {name} is known")
    if tp * pp != gpus:
        return LeftOut(label, f"{tp} × {pp} ranks on {gpus} devices")
    weights, cache = line.choice("precision", PRECISIONS)
    old = version.startswith("v0.")
    plan = ServingPlan(
        engine="trtllm",
        version=version.removeprefix("v"),
        tp=tp,
        pp=pp,
        weight_dtype=shape.weights or weights,
        kv_dtype=cache,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=max(TOKENS, isl),
        chunked_prefill=not old,
        gpu_memory_percent=90 if old else 95,
    )
    return Row(
        source="tensorrt-llm",
        label=label,
        config=shape.config,
        plan=plan,
        cluster=devices(gpus, line.choice("gpu", GPUS)),
        load="requests",
        amount=float(line.count("num_requests")),
        isl=float(isl),
        osl=float(osl),
        family=name,
        tokens_per_s=line.number("output_tokens_per_s_total"),
        split="fit",
        approximate=shape.approximate,
    )
