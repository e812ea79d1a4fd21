"""A serving plan as the command that launches it, for vLLM and SGLang, and back.

Options are those of ``vllm serve`` (0.12 and later: vllm/engine/arg_utils.py, vllm/config) and of
``python -m sglang.launch_server`` (0.5: docs/advanced_features/server_arguments.md). `read` takes what `emit` writes,
and what a user writes with the same options, and refuses an option it does not know: a plan that is read must be the
one that would run.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foretell.errors import InputError, unknown
from foretell.simulate.serving import ServingPlan

__all__ = ["FORMATS", "Launch", "emit", "launches", "read"]

FORMATS = ("vllm", "sglang")
#: What the engines count host memory in: vLLM in GiB of all tensor and pipeline ranks
#: (`CacheConfig.kv_offloading_size`), SGLang in GB of one rank (docs/advanced_features/hicache_design.md). A plan's
#: bytes are of one rank.
_GIB, _GB = 2**30, 10**9
#: Formats that an engine makes of 16-bit weights as it loads them. Others it finds in the checkpoint, and refuses or
#: slows down where an option names another method than the checkpoint's.
_MADE_ON_LOADING = ("fp8",)
#: Methods to name all the same: SGLang's own kernels for a checkpoint with a scale a channel and activations scaled by
#: the token, which it else leaves to others' (docs/advanced_features/quantization.md).
_METHODS: Mapping[str, Mapping[str, str]] = {"vllm": {}, "sglang": {"int8": "w8a8_int8"}}
_FROM_CHECKPOINT = re.compile(r"weights in (\w+) from a checkpoint")
#: Policies of a plan's router, as the routers of the engines name the nearest of theirs.
_POLICIES = {"round-robin": "round_robin", "least-loaded": "power_of_two", "prefix-aware": "cache_aware",
             "two-choices": "power_of_two"}  # fmt: skip
#: Options that say where a server listens, what it loads, or how it logs: they change no plan.
_IGNORED = {
    "vllm": ("--host", "--port", "--served-model-name", "--trust-remote-code", "--seed", "--tokenizer"),
    "sglang": ("--host", "--port", "--served-model-name", "--trust-remote-code", "--random-seed", "--tokenizer-path",
               "--disaggregation-transfer-backend", "--disaggregation-bootstrap-port"),
}  # fmt: skip
_FLAGS = ("--trust-remote-code",)


@dataclass(frozen=True, slots=True)
class Launch:
    """One server to start `count` times: its ``role`` (``both``, ``prefill`` or ``decode``) and its arguments."""

    role: str
    count: int
    arguments: tuple[str, ...]

    @property
    def command(self) -> str:
        """For a shell, one option a line."""
        lines: list[list[str]] = []
        for word in self.arguments:
            if word.startswith("--"):
                lines.append([word])
            elif (lines and lines[-1][0].startswith("--") and len(lines[-1]) == 1) or lines:
                lines[-1].append(word)
            else:
                lines.append([word])
        return " \\\n  ".join(shlex.join(line) for line in lines)


def _dtype(plan: ServingPlan, engine: str) -> list[str]:
    if plan.weight_dtype in ("bf16", "fp16"):
        return ["--dtype", {"bf16": "bfloat16", "fp16": "float16"}[plan.weight_dtype]]
    half = ["--dtype", "float16"] if plan.kv_dtype == "fp16" else []
    method = plan.weight_dtype if plan.weight_dtype in _MADE_ON_LOADING else _METHODS[engine].get(plan.weight_dtype)
    return [*half, "--quantization", method] if method else half


def _kv_dtype(plan: ServingPlan, engine: str) -> list[str]:
    if plan.kv_dtype in ("bf16", "fp16"):
        return []  # auto: that of the activations
    if plan.kv_dtype != "fp8":
        raise InputError(f"has no KV cache in {plan.kv_dtype}", f"--emit {engine}", "take bf16 or fp8")
    return ["--kv-cache-dtype", "fp8" if engine == "vllm" else "fp8_e4m3"]


def _vllm(plan: ServingPlan, model: str, role: str) -> list[str]:
    if plan.ep not in (1, plan.tp * plan.dp):
        every = plan.tp * plan.dp
        raise InputError(f"spreads experts over tp · dp, not ep {plan.ep}", "--emit vllm", f"take ep {every}")
    if plan.preemption != "recompute":
        raise InputError(f"preempts by recomputing, not by {plan.preemption}", "--emit vllm", "take recompute")
    if plan.host_kv_bytes % _GIB:
        raise InputError("takes whole GiB of host memory", "--emit vllm", "give a multiple of 1 GiB")
    if not plan.chunked_prefill and plan.max_model_len > plan.max_num_batched_tokens:
        raise InputError(
            f"refuses requests of {plan.max_model_len} tokens in iterations of {plan.max_num_batched_tokens} without"
            " chunked prefill", "--emit vllm", "take more batched tokens, a shorter max_model_len, or chunked prefill",
        )  # fmt: skip
    said = ["vllm", "serve", model, "--tensor-parallel-size", str(plan.tp), "--pipeline-parallel-size", str(plan.pp)]
    if plan.dp > 1:
        said += ["--data-parallel-size", str(plan.dp)]
    if plan.ep > 1:
        said.append("--enable-expert-parallel")
    said += [*_dtype(plan, "vllm"), *_kv_dtype(plan, "vllm")]
    said += [
        "--max-num-batched-tokens", str(plan.max_num_batched_tokens), "--max-num-seqs", str(plan.max_num_seqs),
        "--block-size", str(plan.block_size), "--gpu-memory-utilization", f"{plan.gpu_memory_percent / 100:.4g}",
    ]  # fmt: skip
    if plan.max_model_len:
        said += ["--max-model-len", str(plan.max_model_len)]
    said.append("--enable-chunked-prefill" if plan.chunked_prefill else "--no-enable-chunked-prefill")
    said.append("--enable-prefix-caching" if plan.prefix_cache else "--no-enable-prefix-caching")
    if not plan.cuda_graph:
        said.append("--enforce-eager")
    if plan.host_kv_bytes:
        size = plan.host_kv_bytes // _GIB * plan.tp * plan.pp
        said += ["--kv-offloading-backend", "native", "--kv-offloading-size", str(size)]
    if role != "both":
        name = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        said += ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": name})]
    return said


def _sglang(plan: ServingPlan, model: str, role: str) -> list[str]:
    if plan.preemption != "recompute":
        raise InputError(f"retracts requests to recompute them, not by {plan.preemption}", "--emit sglang",
                         "take recompute")  # fmt: skip
    if plan.host_kv_bytes % _GB:
        raise InputError("takes whole GB of host memory", "--emit sglang", "give a multiple of 1 GB")
    # SGLang's tp is all the devices of one stage, among which dp ranks share attention.
    said = ["python", "-m", "sglang.launch_server", "--model-path", model, "--tp-size", str(plan.tp * plan.dp)]
    said += ["--pp-size", str(plan.pp)]
    if plan.dp > 1:
        said += ["--dp-size", str(plan.dp), "--enable-dp-attention"]
    if plan.ep > 1:
        said += ["--ep-size", str(plan.ep)]
    said += [*_dtype(plan, "sglang"), *_kv_dtype(plan, "sglang")]
    # The engine divides chunk and batch among dp ranks; the plan's are of one rank.
    chunk = plan.max_num_batched_tokens * plan.dp if plan.chunked_prefill else -1
    said += ["--chunked-prefill-size", str(chunk)]
    if not plan.chunked_prefill:
        said += ["--max-prefill-tokens", str(plan.max_num_batched_tokens)]
    said += [
        "--max-running-requests", str(plan.max_num_seqs * plan.dp), "--page-size", str(plan.block_size),
        "--mem-fraction-static", f"{plan.gpu_memory_percent / 100:.4g}",
    ]  # fmt: skip
    if plan.max_model_len:
        said += ["--context-length", str(plan.max_model_len)]
    if not plan.prefix_cache:
        said.append("--disable-radix-cache")
    if not plan.cuda_graph:
        said.append("--disable-cuda-graph")
    if plan.host_kv_bytes:
        said += ["--enable-hierarchical-cache", "--hicache-size", str(plan.host_kv_bytes // _GB)]
    if role != "both":
        said += ["--disaggregation-mode", role]
    return said


def launches(format: str, plan: ServingPlan, model: str) -> tuple[Launch, ...]:
    """The servers of a plan: one kind, or prefill and decode servers. Raises InputError where the engine cannot do
    it.
    """
    if format not in FORMATS:
        raise unknown("format to emit", format, FORMATS)
    write: Callable[[ServingPlan, str, str], list[str]] = _vllm if format == "vllm" else _sglang
    if not plan.prefill_replicas:
        return (Launch("both", plan.replicas, tuple(write(plan, model, "both"))),)
    return (
        Launch("prefill", plan.prefill_replicas, tuple(write(plan, model, "prefill"))),
        Launch("decode", plan.decode_replicas, tuple(write(plan, model, "decode"))),
    )


def emit(format: str, plan: ServingPlan, model: str, where: str = "", nodes: int = 1) -> str:
    """The plan as a shell script: the command of each kind of server, in comments how often it is started and on what
    (`where`, of `nodes` machines for one server), and the router before them.
    """
    parts = []
    for one in launches(format, plan, model):
        role = "" if one.role == "both" else f" for {one.role}"
        servers = "server" if one.count == 1 else "servers"
        on = f", each on {where}" if where else ""
        lines = [f"# {one.count} {servers}{role}{on}"]
        if plan.weight_dtype not in ("bf16", "fp16", *_MADE_ON_LOADING):
            lines.append(f"# weights in {plan.weight_dtype} from a checkpoint that has them so")
        if not plan.prefix_cache:
            lines.append("# without a prefix cache, as planned: with it, prompts that share a beginning take less")
        if nodes > 1:
            lines += [f"# {line}" for line in _on_nodes(format, plan, nodes)]
        parts.append("\n".join([*lines, one.command]) + "\n")
    if plan.replicas > 1:
        parts.append("\n".join(f"# {line}" for line in _router(format, plan)) + "\n")
    return "\n".join(parts)


def _on_nodes(format: str, plan: ServingPlan, nodes: int) -> list[str]:
    """What is added to the command on each of several machines, whose names only the user knows."""
    if format == "sglang":
        return [f"on machine K of {nodes}, from 0: --nnodes {nodes} --node-rank K --dist-init-addr HEAD:PORT"]
    if plan.dp > 1 and plan.dp % nodes == 0:
        mine = plan.dp // nodes
        return [
            f"on each of {nodes} machines: --data-parallel-size-local {mine} --data-parallel-address HEAD",
            f"on all but the first also: --headless --data-parallel-start-rank K, which is {mine}"
            + (f", {2 * mine}, …" if nodes > 2 else ""),
        ]
    return [
        f"on machine K of {nodes}, from 0: --nnodes {nodes} --node-rank K --master-addr HEAD",
        "on all but the first also: --headless",
    ]


def _router(format: str, plan: ServingPlan) -> list[str]:
    """The command of the router before several servers, whose addresses only the user knows."""
    policy = _POLICIES[plan.router]
    start = "vllm-router" if format == "vllm" else "python -m sglang_router.launch_router"
    if not plan.prefill_replicas:
        return ["before them:", f"{start} --policy {policy} --worker-urls URL URL …"]
    apart = "--vllm-pd-disaggregation" if format == "vllm" else "--pd-disaggregation"
    said = ["before them, with the address of each server:", f"{start} {apart} --prefill URL … --decode URL …"]
    if format == "vllm":
        said.append("VLLM_NIXL_SIDE_CHANNEL_HOST is each server's own address, and servers of one machine have"
                    " VLLM_NIXL_SIDE_CHANNEL_PORT apart")  # fmt: skip
    return said


def read(format: str, text: str) -> tuple[ServingPlan, str]:
    """The plan and the model of a script that `emit` wrote. Raises InputError for what is no such script."""
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if len(text) > 1_000_000:
        raise InputError("is too long", format)
    found: list[tuple[int, str, ServingPlan, str]] = []
    count, weights = 1, ""
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("#"):
            words = line[1:].split()
            if words and words[0].isdecimal() and len(words[0]) < 7:
                count = int(words[0])
            if (said := _FROM_CHECKPOINT.search(line)) is not None:
                weights = said[1]
        elif line.strip():
            try:
                words = shlex.split(line)
            except ValueError as error:
                raise InputError(f"is no shell command: {error}", format) from None
            role, plan, model = _command(format, words)
            if weights:
                plan = plan.replace(weight_dtype=weights)
            found.append((count, role, plan, model))
            count, weights = 1, ""
    if not found:
        raise InputError("holds no command", format, "give what --emit wrote")
    roles = [role for _, role, _, _ in found]
    if roles == ["both"]:
        return found[0][2].replace(replicas=found[0][0]), found[0][3]
    if sorted(roles) != ["decode", "prefill"] or found[0][2:] != found[1][2:]:
        raise InputError("is neither one server nor a prefill and a decode server of the same settings", format)
    by = {role: number for number, role, _, _ in found}
    apart = {"prefill_replicas": by["prefill"], "decode_replicas": by["decode"], "replicas": sum(by.values())}
    return found[0][2].replace(**apart), found[0][3]


def _command(format: str, words: list[str]) -> tuple[str, ServingPlan, str]:
    start = ["vllm", "serve"] if format == "vllm" else ["python", "-m", "sglang.launch_server"]
    if words[: len(start)] != start:
        raise InputError(f"does not begin with {shlex.join(start)!r}", format)
    rest = words[len(start) :]
    model = ""
    if format == "vllm":
        if not rest or rest[0].startswith("--"):
            raise InputError("names no model", format)
        model, rest = rest[0], rest[1:]
    options: dict[str, str] = {}
    at = 0
    flags = {*_VLLM_FLAGS, *_SGLANG_FLAGS, *_FLAGS}
    while at < len(rest):
        name, has, value = rest[at].partition("=")
        if not name.startswith("--"):
            raise InputError(f"{rest[at][:60]!r} is no option", format)
        at += 1
        if not has and name not in flags:
            if at >= len(rest):
                raise InputError(f"{name} has no value", format)
            value = rest[at]
            at += 1
        if name not in _IGNORED[format]:
            options[name] = value
    made: dict[str, Any] = {"engine": format}
    role = (_from_vllm if format == "vllm" else _from_sglang)(options, made)
    if format == "sglang":
        model = options.pop("--model-path", "")
        if not model:
            raise InputError("names no model", format, "give --model-path")
    if options:
        known = {*_VLLM, *_VLLM_FLAGS} if format == "vllm" else {*_SGLANG, *_SGLANG_FLAGS}
        raise unknown(f"option of {format}", next(iter(options)), known)
    return role, ServingPlan(**made), model


_VLLM: Mapping[str, str] = {
    "--tensor-parallel-size": "tp", "--pipeline-parallel-size": "pp", "--data-parallel-size": "dp",
    "--max-num-batched-tokens": "max_num_batched_tokens", "--max-num-seqs": "max_num_seqs",
    "--block-size": "block_size", "--max-model-len": "max_model_len",
}  # fmt: skip
_VLLM_FLAGS: Mapping[str, tuple[str, bool]] = {
    "--enable-chunked-prefill": ("chunked_prefill", True), "--no-enable-chunked-prefill": ("chunked_prefill", False),
    "--enable-prefix-caching": ("prefix_cache", True), "--no-enable-prefix-caching": ("prefix_cache", False),
    "--enforce-eager": ("cuda_graph", False), "--enable-expert-parallel": ("ep", True),
}  # fmt: skip
_SGLANG: Mapping[str, str] = {
    "--tp-size": "tp", "--pp-size": "pp", "--dp-size": "dp", "--ep-size": "ep",
    "--max-running-requests": "max_num_seqs", "--page-size": "block_size", "--context-length": "max_model_len",
}  # fmt: skip
_SGLANG_FLAGS: Mapping[str, tuple[str, bool]] = {
    "--disable-radix-cache": ("prefix_cache", False), "--disable-cuda-graph": ("cuda_graph", False),
    "--enable-dp-attention": ("dp", True), "--enable-hierarchical-cache": ("host_kv_bytes", True),
}  # fmt: skip
#: Methods that say a format by themselves; others (compressed-tensors, modelopt, quark) come in several.
_QUANTIZATION = {
    "fp8": "fp8", "w8a8_fp8": "fp8", "w8a8_int8": "int8", "awq": "int4", "awq_marlin": "int4", "gptq": "int4",
    "gptq_marlin": "int4", "mxfp4": "mxfp4", "gpt_oss_mxfp4": "mxfp4", "modelopt_fp4": "nvfp4",
}  # fmt: skip


def _whole(name: str, text: str) -> int:
    if not text.lstrip("-").isdecimal() or len(text) > 15:
        raise InputError(f"{text[:40]!r} is no whole number", name)
    return int(text)


def _shared(options: dict[str, str], made: dict[str, Any], memory: str) -> None:
    """What both engines name alike."""
    dtype = options.pop("--dtype", "bfloat16")
    names = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "auto": "bf16"}
    if dtype not in names:
        raise unknown("--dtype", dtype, names)
    made["weight_dtype"] = made["kv_dtype"] = names[dtype]
    if (kind := options.pop("--quantization", None)) is not None:
        if kind not in _QUANTIZATION:
            raise unknown("--quantization", kind, _QUANTIZATION)
        made["weight_dtype"] = _QUANTIZATION[kind]
    if (kv := options.pop("--kv-cache-dtype", "auto")) != "auto":
        if kv not in ("fp8", "fp8_e4m3"):
            raise unknown("--kv-cache-dtype", kv, ("auto", "fp8", "fp8_e4m3"))
        made["kv_dtype"] = "fp8"
    if (share := options.pop(memory, None)) is not None:
        try:
            made["gpu_memory_percent"] = round(100.0 * float(share), 4)
        except (ValueError, OverflowError):
            raise InputError(f"{share[:40]!r} is no share", memory, "give e.g. 0.9") from None


def _from_vllm(options: dict[str, str], made: dict[str, Any]) -> str:
    made |= {name: _whole(option, options.pop(option)) for option, name in _VLLM.items() if option in options}
    for option, (name, value) in _VLLM_FLAGS.items():
        if option in options:
            del options[option]
            made[name] = value
    if made.pop("ep", False):
        made["ep"] = made.get("tp", 1) * made.get("dp", 1)
    _shared(options, made, "--gpu-memory-utilization")
    if (size := options.pop("--kv-offloading-size", None)) is not None:
        # The option counts all ranks of a replica, the plan one of them.
        made["host_kv_bytes"] = _whole("--kv-offloading-size", size) * _GIB // (made.get("tp", 1) * made.get("pp", 1))
    if (backend := options.pop("--kv-offloading-backend", "native")) != "native":
        raise unknown("--kv-offloading-backend", backend, ("native",))
    config = options.pop("--kv-transfer-config", None)
    if config is None:
        return "both"
    try:
        role = json.loads(config)["kv_role"]
        return {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}[role]
    except (ValueError, KeyError, TypeError):
        raise InputError("has no kv_role", "--kv-transfer-config", 'give e.g. {"kv_role": "kv_producer"}') from None


def _from_sglang(options: dict[str, str], made: dict[str, Any]) -> str:
    made["prefix_cache"] = True  # its radix cache is on unless disabled
    made |= {name: _whole(option, options.pop(option)) for option, name in _SGLANG.items() if option in options}
    for option, (name, value) in _SGLANG_FLAGS.items():
        if option in options:
            del options[option]
            if name not in ("dp", "host_kv_bytes"):
                made[name] = value
    dp = made.get("dp", 1)
    for name in ("tp", "max_num_seqs"):
        if name in made and dp > 1:
            if made[name] % dp:
                raise InputError(f"{name} {made[name]} cannot be divided by dp {dp}", "sglang")
            made[name] //= dp
    chunk = _whole("--chunked-prefill-size", options.pop("--chunked-prefill-size", "8192"))
    made["chunked_prefill"] = chunk > 0
    if chunk > 0:
        made["max_num_batched_tokens"] = max(1, chunk // dp)
    if (most := options.pop("--max-prefill-tokens", None)) is not None and chunk <= 0:
        made["max_num_batched_tokens"] = _whole("--max-prefill-tokens", most)
    _shared(options, made, "--mem-fraction-static")
    if (size := options.pop("--hicache-size", None)) is not None:
        made["host_kv_bytes"] = _whole("--hicache-size", size) * _GB
    return options.pop("--disaggregation-mode", "both").replace("null", "both")
