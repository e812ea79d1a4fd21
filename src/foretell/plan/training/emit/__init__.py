"""Configuration files of training frameworks: a plan written as one, and read from one.

    text = emit("megatron", config, plan, cluster)
    found = read("pretrain.sh")        # or a torchtitan .toml, or a DeepSpeed .json
    plan = found.training_plan(global_batch=1024, seq_len=8192)

A format is one module with `write(config, plan, cluster)`, `read(text, where)` and `unsaid(config, plan)`: the fields
of a plan that it has no words for. `write` says them in comments, so nothing is lost unseen. Reading runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from foretell.documents import read_text
from foretell.errors import InputError, unknown
from foretell.hardware.cluster import Cluster
from foretell.plan.training.emit import deepspeed, megatron, torchtitan
from foretell.plan.training.emit.found import MOST_BYTES, Found, idle
from foretell.simulate.training.plan import TrainingPlan
from foretell.units import printable
from foretell.workload.llm.config import LLMConfig

__all__ = ["FORMATS", "Format", "Found", "emit", "idle", "read"]


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of configuration file: the endings it is told by, and how it is written and read."""

    name: str
    title: str
    endings: tuple[str, ...]
    write: Callable[[LLMConfig, TrainingPlan, Cluster], str]
    read: Callable[[str, str], Found]
    unsaid: Callable[[LLMConfig, TrainingPlan], dict[str, str]]


def _registry(*formats: Format) -> Mapping[str, Format]:
    found: dict[str, Format] = {}
    endings: set[str] = set()
    for item in formats:
        if item.name in found or endings.intersection(item.endings):
            raise ValueError(f"format {item.name!r} or one of its endings is registered twice")
        found[item.name] = item
        endings.update(item.endings)
    return MappingProxyType(found)


#: Every format by name.
FORMATS: Mapping[str, Format] = _registry(
    Format(
        "megatron", "Megatron-LM options", (".txt", ".sh", ".args", ".yaml", ".yml"),
        megatron.write, megatron.read, megatron.unsaid,
    ),
    Format("torchtitan", "torchtitan TOML", (".toml",), torchtitan.write, torchtitan.read, torchtitan.unsaid),
    Format("deepspeed", "DeepSpeed JSON", (".json",), deepspeed.write, deepspeed.read, deepspeed.unsaid),
)  # fmt: skip


def emit(name: str, config: LLMConfig, plan: TrainingPlan, cluster: Cluster) -> str:
    """The plan as a file of the framework called `name`.

    Raises UnknownNameError for another name, InfeasibleError where the framework would refuse the plan.
    """
    if name not in FORMATS:
        raise unknown("format of configuration", name, FORMATS)
    return FORMATS[name].write(config, plan, cluster)


def read(path: str | Path) -> Found:
    """What a configuration file says; its ending tells its format, and else its content.

    Raises InputError where it is too large, malformed, or contradicts itself.
    """
    path = Path(path)
    text = read_text(path, "configuration of a training run", MOST_BYTES)
    where = path.name[:80]
    ending = path.suffix.casefold()
    name = next((item.name for item in FORMATS.values() if ending in item.endings), None) or _kind(text, where)
    found = FORMATS[name].read(text, where)
    return replace(found, notes=tuple(printable(note) for note in found.notes))


def _kind(text: str, where: str) -> str:
    start = text.lstrip()
    if start.startswith("{"):
        return "deepspeed"
    if any(line.strip() in ("[training]", "[parallelism]", "[model]") for line in text.splitlines()):
        return "torchtitan"
    if "--" in text:
        return "megatron"
    raise InputError(
        "is no configuration that is known here", where,
        "give options of Megatron-LM (.txt, .sh, .yaml), a torchtitan .toml or a DeepSpeed .json",
    )  # fmt: skip
