"""Three runs of vLLM 0.19 on RTX PRO 6000 that LLMServingSim is judged by (casys-kaist/LLMServingSim, MIT).

300 requests of ShareGPT with pinned lengths come at ten sessions a second. Times of each are on one clock: queued,
first scheduled, first token, last token. TTFT is the first token's less the queued time, mostly queueing; TPOT spreads
the rest over the other tokens. `vllm_meta.json` says how each was run; token ids are removed, so no prefix is shared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell.accuracy.serving.models import model
from foretell.accuracy.serving.profiled import Profiled
from foretell.accuracy.serving.row import devices, lines
from foretell.errors import InputError
from foretell.hardware.cluster import Cluster
from foretell.simulate.serving import Batch, Requests, ServingPlan
from foretell.simulate.serving.iteration import Iterations, constants
from foretell.simulate.serving.iteration.constants import host_of
from foretell.workload.llm import LLMConfig

__all__ = ["Run", "profiled", "runs"]

Floats = npt.NDArray[np.float64]

GPU = "rtx-pro-6000-server"
#: The link between its cards, as the authors set it for these runs (bench/examples/configs: 16 GB/s, 20 µs), so that
#: figures of the runs on two cards are not blind to them.
LINK_BYTES_PER_S, LINK_S = 16e9, 20e-6
NAMES = ("Llama-3.1-8B", "Qwen3-30B-A3B-Instruct-2507", "Qwen3-32B")


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run: requests as they came, and what each user saw, (requests,); `profile` is its kernels' folder."""

    label: str
    config: LLMConfig
    plan: ServingPlan
    cluster: Cluster
    requests: Requests
    ttft_s: Floats
    tpot_s: Floats
    finished_s: Floats
    profile: Path


def runs(folder: Path) -> list[Run]:
    """The three runs. Raises InputError where a file is missing or malformed."""
    return [_run(folder / "llmservingsim", name) for name in NAMES]


def _run(folder: Path, name: str) -> Run:
    place = folder / f"RTXPRO6000__{name}"
    meta = _settings(place / "vllm_meta.json")
    shape = model(str(meta["model"]))
    if shape is None:
        raise InputError(f"no configuration of {meta['model']} is known", str(place))
    plan = plan_of(meta)
    table = [
        (
            line.number("queued_ts"),
            line.count("input_toks"),
            line.count("output_toks"),
            line.number("first_token_ts"),
            line.number("last_token_ts"),
        )
        for line in lines(place / "vllm_requests.csv")
    ]
    table.sort(key=lambda row: row[0])
    queued, inputs, outputs, first, last = np.array(table).T
    requests = Requests.of(queued - queued[0], inputs.astype(int), outputs.astype(int), about={"source": name})
    return Run(
        label=name,
        config=shape.config,
        plan=plan,
        cluster=devices(plan.devices, GPU),
        requests=requests,
        ttft_s=first - queued,
        tpot_s=(last - first) / np.maximum(outputs - 1.0, 1.0),
        finished_s=last - queued[0],
        profile=folder / "kernel_profile" / "RTXPRO6000" / str(meta["model"]) / "bf16" / f"tp{plan.tp}",
    )


def plan_of(meta: Mapping[str, Any]) -> ServingPlan:
    """The plan of a run's settings."""
    kwargs = meta.get("engine_kwargs")
    if not isinstance(kwargs, dict) or kwargs.get("dtype") != "bfloat16" or kwargs.get("kv_cache_dtype") != "auto":
        raise InputError("engine_kwargs are not of a bf16 engine", "vllm_meta.json", "use the files as published")
    tp, dp = int(kwargs["tensor_parallel_size"]), int(kwargs["data_parallel_size"])
    return ServingPlan(
        engine="vllm",
        version=str(meta["vllm_version"]),
        tp=tp,
        dp=dp,
        ep=tp * dp if kwargs["enable_expert_parallel"] else 1,
        max_num_seqs=int(kwargs["max_num_seqs"]),
        max_num_batched_tokens=int(kwargs["max_num_batched_tokens"]),
    )


def messages_s(config: LLMConfig, plan: ServingPlan, batch: Batch) -> Floats:
    """Seconds of messages in iterations of one rank, over the link of the authors' machine.

    A layer adds up its output over the `tp` ranks twice, by a reduce-scatter and an all-gather of p − 1 steps each.
    Ranks that share experts gather all tokens before them and scatter the sums after, in p − 1 steps each. The two
    directions of the link share what it carries, so what counts of ranks that have different numbers of tokens is
    their mean.
    """
    tokens = batch.rank_tokens
    row = 2.0 * config.hidden
    seconds = np.zeros(len(batch))
    if plan.tp > 1:
        sums = 2.0 * config.layers - (config.layers if plan.ep > 1 else 0.0)
        seconds += sums * 2.0 * (plan.tp - 1) * (tokens * row / plan.tp / LINK_BYTES_PER_S + LINK_S)
    if plan.ep > plan.tp:
        seconds += config.layers * 2.0 * (plan.ep - 1) * (tokens * row / plan.tp / LINK_BYTES_PER_S + LINK_S)
    return seconds


def host_s(plan: ServingPlan, batch: Batch) -> Floats:
    """Seconds of the host in iterations that nothing hides, by the shipped constants of the plan's engine."""
    return constants().exposed_s(host_of(plan), batch.decode_seqs + batch.prefill_seqs)


def profiled(run: Run) -> Profiled:
    """Its iterations, from its kernel profile and link.

    What the host takes, and the room of the cache, are as the product's own model has them: fitted on other tables.
    """
    own = Iterations.of(run.config, run.plan, run.cluster)

    def besides(batch: Batch) -> Floats:
        return host_s(run.plan, batch) + messages_s(run.config, run.plan, batch)

    return Profiled.of(
        run.config,
        run.plan,
        run.profile,
        kv_capacity_tokens=own.kv_capacity_tokens,
        kv_bytes_per_token=own.kv_bytes_per_token,
        besides=besides,
    )


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8")[:65536])
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read it: {error}", str(path), "use the files as published") from error
    if not isinstance(found, dict) or not {"model", "vllm_version", "engine_kwargs"} <= set(found):
        raise InputError("lacks model, vllm_version or engine_kwargs", str(path), "use the files as published")
    return found
