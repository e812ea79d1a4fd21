"""Fit how fast experts' kernels are on AIConfigurator's MoE tables: ``python benchmarks/serving_experts.py [--write]``.

A call of these tables (ai-dynamo/aiconfigurator, Apache-2.0, ``kernels/*__moe.csv.gz``) is all a rank does for its
experts of one layer but choosing them: sorting, both products, the activation between, the weighted sum. It is
predicted as the engine's iterations have it (`sizes.together`). Fitted, one generation of devices after the other:

    experts.half, experts.fp8, experts.fp4    share of the rate that products reach by themselves
    experts.memory                            the same of the bandwidth, from products in 16 bits
    experts.memory.fp4                        that of FlashInfer's kernels for NVFP4

Engines run FlashInfer's and TensorRT-LLM's kernels for fp8 too on Blackwell, where the table has Triton's only (a share
of 0.4): they are taken to be as good as those for NVFP4.

Left out: int4 and MXFP4, whose times at one token are those of weights in 16 bits; more than 32 ranks; fp8 with a scale
for 128 × 128 weights, which engines run in kernels of their own (``experts.fp8.ENGINE``, benchmarks/serving_fit.py).
Tables with evenly chosen experts are taken where there are some; where a few experts get most tokens (A100's), only
those in which one rank holds all experts.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from foretell.accuracy.slices import data_folder
from foretell.hardware import device
from foretell.simulate import serving
from foretell.simulate.serving import ServingPlan
from foretell.simulate.serving.iteration import constants, sizes
from foretell.simulate.serving.iteration.kernels import PARTS, Costs
from foretell.simulate.training.constants import generation
from foretell.workload import llm

Floats = npt.NDArray[np.float64]

CALIBRATION = Path(serving.__file__).with_name("calibration.json")
TABLES = {
    "a100_sxm__vllm-0.14.0__moe.csv.gz": "a100-sxm4-80gb",
    "h100_sxm__vllm-0.19.0__moe.csv.gz": "h100-sxm",
    "b200_sxm__vllm-0.19.0__moe.csv.gz": "b200-sxm",
}
#: The table's type, the format of weights, and what of the experts' constants it is.
FORMATS = {"bfloat16": ("bf16", "half"), "fp8": ("fp8", "fp8"), "nvfp4": ("nvfp4", "fp4")}
MOST_RANKS = 32
_SIZES = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")


@dataclass(frozen=True)
class Calls:
    """Calls of one shape: `tokens` and `seconds` are columns (calls,)."""

    shape: tuple[int, ...]
    tokens: Floats
    seconds: Floats

    def predicted(self, costs: Costs, number_format: str) -> Floats:
        """Seconds of each call."""
        hidden, inter, top_k, experts, tp, ep = self.shape
        moe = llm.MoE(experts, top_k, inter)
        config = costs.config.replace(hidden=hidden, moe=moe)
        plan = ServingPlan(tp=tp * ep, ep=ep, weight_dtype=number_format)
        kernels = sizes.together(config, plan, self.tokens, 0.0)
        kernels.messages.clear()
        return np.asarray(costs.of(kernels, len(self.tokens))[PARTS.index("experts")])


def read(path: Path, number_type: str) -> list[Calls]:
    """The calls of a table in one type."""
    found: dict[tuple[int, ...], list[tuple[float, float]]] = {}
    with gzip.open(path, "rt", encoding="utf-8", newline="") as text:
        lines = [line for line in csv.DictReader(text) if line["moe_dtype"] == number_type]
    even = [line for line in lines if line["distribution"] == "balanced"]
    for line in even or lines:
        shape = tuple(int(line[name]) for name in _SIZES)
        ranks = shape[4] * shape[5]
        if ranks <= (MOST_RANKS if even else 8) and (even or shape[5] == 1):
            found.setdefault(shape, []).append((float(line["num_tokens"]), float(line["latency"]) / 1e3))
    return [Calls(shape, *np.array(sorted(calls)).T) for shape, calls in found.items()]


def fit(calls: list[Calls], name: str, kind: str, number_format: str, start: dict[str, float]) -> dict[str, float]:
    """The constants of a kind on a device that suit its calls."""
    how = generation(device(name))
    memory = {"half": [f"experts.memory.{how}"], "fp4": [f"experts.memory.fp4.{how}"]}
    names = [f"experts.{kind}.{how}", *memory.get(kind, [])]
    config = llm.config("qwen3-30b-a3b")
    measured = np.log(np.concatenate([one.seconds for one in calls]))

    def errors(z: Floats) -> Floats:
        using = constants().replace({**start, **dict(zip(names, np.exp(z), strict=True))})
        costs = Costs(device(name), None, using, config, "trtllm")  # whose constant for fp8 is set to one
        predicted = np.concatenate([one.predicted(costs, number_format) for one in calls])
        return np.asarray(np.log(predicted) - measured)

    found = least_squares(errors, np.log([0.8] * len(names)), bounds=(np.log(0.1), np.log(1.18)), loss="soft_l1",
                          f_scale=0.1, diff_step=0.02)  # fmt: skip
    left = np.abs(np.expm1(errors(found.x)))
    values = {n: round(float(v), 3) for n, v in zip(names, np.exp(found.x), strict=True)}
    said = f"median {np.median(left):5.1%}  mean {left.mean():5.1%}"
    print(f"{name:16}{kind:6}{len(measured):7,} calls  {said}  {values}")
    return values


def main() -> None:
    """Fit, and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    folder = data_folder(None) / "aiconfigurator-serving" / "kernels"
    found: dict[str, float] = {"experts.fp8.trtllm": 1.0}
    for table, name in TABLES.items():
        for number_type, (number_format, kind) in FORMATS.items():
            if calls := read(folder / table, number_type):
                found |= fit(calls, name, kind, number_format, found)
    del found["experts.fp8.trtllm"]
    for name in ("experts.{}.tensor_memory", "experts.memory.{}.tensor_memory"):
        found[name.format("fp8")] = found[name.format("fp4")]
    if options.write:
        data = json.loads(CALIBRATION.read_text(encoding="utf-8"))
        data["constants"] |= found
        CALIBRATION.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"wrote {CALIBRATION.name}")


if __name__ == "__main__":
    main()
