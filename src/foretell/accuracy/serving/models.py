"""Shapes of the models that tables of serving name, by every name they are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from foretell.hardware.catalogue import fold
from foretell.workload.llm import LLMConfig, catalogue, config

__all__ = ["Model", "model"]


@dataclass(frozen=True, slots=True)
class Model:
    """A shape, the one format its weights are published in (empty: served in several), and what it leaves out."""

    config: LLMConfig
    weights: str = ""
    approximate: str = ""


#: Models trained further, or published in another format, whose shape is that of a known one.
SAME: Mapping[str, str] = MappingProxyType(
    {
        "DeepSeek-R1": "deepseek-v3",
        "DeepSeek-R1-0528": "deepseek-v3",
        "DeepSeek-V3-0324": "deepseek-v3",
        "DeepSeek-V3.1": "deepseek-v3",
        "Qwen3-Coder-30B-A3B": "qwen3-30b-a3b",
        "LLaMA v2 7B": "llama-2-7b",
        "LLaMA v2 13B": "llama-2-13b",
        "LLaMA v2 70B": "llama-2-70b",
        "LLaMA v3 8B": "llama-3-8b",
        "LLaMA v3 70B": "llama-3-70b",
        "LLaMA v3.1 8B": "llama-3.1-8b",
        "LLaMA v3.1 70B": "llama-3.1-70b",
        "LLaMA v3.1 405B": "llama-3.1-405b",
        "Mistral 7B": "mistral-7b-v0.3",
        "Llama-4-Scout-17B-16E": "llama-4-scout",
        "Llama-4-Maverick-17B-128E": "llama-4-maverick",
        "MiniMax-M2": "minimax-m2.5",
        "MiniMax-M2.1": "minimax-m2.5",
    }
)
#: What names end in that has no part in the shape.
ENDINGS = ("Instruct", "Thinking", "it", "FP8", "NVFP4", "FP4", "MXFP4", "2507", "BF16")
#: Weights published in one format, which a table's own word for it ("fp4", "fp8") does not change.
WEIGHTS: Mapping[str, str] = MappingProxyType({"gpt-oss-120b": "mxfp4", "gpt-oss-20b": "mxfp4"})
#: Approximations of the catalogue's configurations, said there in full.
APPROXIMATE: Mapping[str, str] = MappingProxyType(
    {
        "glm-5": "attends to all tokens: its sparse attention picks 2,048",
        "qwen3.5-397b-a17b": "linear attention as a window",
        "llama-4-scout": "chunks of attention as a window",
        "llama-4-maverick": "chunks of attention as a window",
    }
)


def model(name: str) -> Model | None:
    """The model of a published name (an owner before a slash does not matter), None where no shape is known.

    >>> model("meta-llama/Llama-3.1-70B-Instruct").config.name, model("openai/gpt-oss-20b").weights
    ('llama-3.1-70b', 'mxfp4')
    """
    known = _known()
    key = fold(_short(name))
    if key not in known:
        return None
    found = known[key]
    return Model(config(found), WEIGHTS.get(found, ""), APPROXIMATE.get(found, ""))


def _short(name: str) -> str:
    """Without owner and endings."""
    short = name.rpartition("/")[2].strip()
    while True:
        head, dash, tail = short.rpartition("-")
        if not dash or tail not in ENDINGS:
            return short
        short = head


@cache
def _known() -> Mapping[str, str]:
    names = {fold(name): name for name in catalogue()}
    return names | {fold(name): shape for name, shape in SAME.items() if shape in catalogue()}
