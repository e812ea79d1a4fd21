"""How long an answer takes, after imports: each case in fresh processes, first call, no cache; median of five.

Wall-clock seconds and the process's own CPU seconds are both printed: on an idle machine they agree. Exits 1 when a
median wall time or a peak of memory is over its bar.

    python benchmarks/speed.py [CASE …] [--runs N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

LLAMA_3_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}

_RESNET = """
import timm, torch, torch._subclasses.fake_tensor, foretell.cost, foretell.workload.capture
def case():
    foretell.predict("timm:resnet50", on="a100-sxm4-80gb", batch=64, {settings})
"""

# name → (set-up and `case`, seconds allowed, bytes allowed)
CASES: dict[str, tuple[str, float, float | None]] = {
    "resnet50 inference": (_RESNET.format(settings=""), 0.5, None),
    "resnet50 training": (_RESNET.format(settings="train=True"), 1.5, None),
    "Llama-3-70B training through transformers": (
        f"""
import torch, foretell
from foretell.workload.hf import capture_config
from foretell.workload.options import options
from transformers.models.llama import modeling_llama
def case():
    capture_config({LLAMA_3_70B!r}, options(train=True, batch=1, seq_len=8192, precision="bf16", optimizer="adamw"))
""",
        20.0,
        1.5e9,
    ),
    "Llama-3.1-405B decode, parametric": (
        """
from foretell.workload import llm
config = llm.config("llama-3.1-405b")
llm.graph(llm.config("llama-3.1-8b"), phase="decode", batch=1, context=16).table()
def case():
    llm.graph(config, phase="decode", batch=64, context=8192).table()
""",
        5e-3,
        None,
    ),
    "resnet50 on every device": (
        """
import torch, foretell, foretell.cost
from foretell.hardware import device, devices
graph = foretell.capture("timm:resnet50", batch=8, precision="fp16")
def case():
    from foretell.errors import ForetellError
    for name in devices():
        try:
            foretell.predict(graph, on=device(name))
        except ForetellError:
            pass  # a data sheet that lacks a figure
""",
        1.0,
        None,
    ),
    "100,000 ops by the kernel model": (
        """
import torch, foretell
from foretell.cost import Settings, lower, models
from foretell.cost.program import Program
from foretell.graph import OpTable
from foretell.hardware import device
tables = [foretell.capture(f"timm:{name}", batch=b, precision="amp").table()
          for name in ("resnet50", "vit_base_patch16_224", "efficientnet_b0") for b in (8, 16)]
total = sum(len(t) for t in tables)
program = Program.of(OpTable.concatenate(tables * (100_000 // total + 1)))
assert len(program) >= 100_000
model, gpu = models()["kernel"], device("rtx-4090")
model.op_times(Program.of(tables[0]), gpu, Settings())
def case():
    model.op_times(program, gpu, Settings())
""",
        0.5,
        None,
    ),
    "resnet50 by the learned model, costing alone": (
        """
import torch, foretell
from foretell.cost import Settings, lower, models
from foretell.hardware import device
program = lower(foretell.capture("timm:resnet50", batch=8, precision="amp"))
other = lower(foretell.capture("timm:resnet18", batch=8, precision="amp"))
model, gpu = models()["learned"], device("rtx-4090")
model.op_times(other, gpu, Settings())  # calibrations are read once
def case():
    model.op_times(program, gpu, Settings())
""",
        20e-3,
        None,
    ),
}

_RUNNER = """
import json, resource, time
{case}
wall, cpu = time.perf_counter(), time.process_time()
case()
taken = time.perf_counter() - wall, time.process_time() - cpu
print(json.dumps([*taken, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


def measure(code: str, runs: int) -> tuple[float, float, float]:
    """Median wall and CPU seconds, and the largest resident size, over fresh processes."""
    rows = []
    for _ in range(runs):
        result = subprocess.run(
            [sys.executable, "-c", _RUNNER.format(case=code)],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"FORETELL_CACHE": "off"},
        )
        rows.append(json.loads(result.stdout.splitlines()[-1]))
    wall, cpu, size = zip(*rows, strict=True)
    return statistics.median(wall), statistics.median(cpu), max(size)


def main() -> int:
    """Print every case against its bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="parts of case names; all by default")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    missed = False
    for name, (code, allowed_s, allowed_bytes) in CASES.items():
        if arguments.cases and not any(part in name for part in arguments.cases):
            continue
        wall, cpu, size = measure(code, arguments.runs)
        over = wall > allowed_s or (allowed_bytes is not None and size > allowed_bytes)
        missed = missed or over
        print(
            f"{name:42s} {wall:8.4f} s wall {cpu:8.4f} s CPU  bar {allowed_s:g} s  {size / 1e9:.2f} GB"
            f"{'' if allowed_bytes is None else f'  bar {allowed_bytes / 1e9:g} GB'}{'  OVER' if over else ''}",
            flush=True,
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
