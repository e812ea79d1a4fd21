"""Profiling LoRA/QLoRA Fine-Tuning Efficiency on Consumer GPUs: An RTX 4060 Case Study."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import Direction, Gain

SYSTEM = "lora-8gb-profiling"
MODEL = "llm:qwen2.5-1.5b"
DEVICE = "rtx-4060"
LORA = "rank=16"


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration of the sweep. `quantize` is None for half-precision base weights.

    `energy_j_per_10k_tokens` is the board's power limit times the time, as the study estimates it.
    """

    quantize: str | None
    batch: int
    seq_len: int
    optimizer: str
    precision: str
    checkpointing: bool
    tokens_per_s: float
    s_per_10k_tokens: float
    peak_bytes: int
    fits: bool
    energy_j_per_10k_tokens: float


def sweep(
    *,
    model: str = MODEL,
    device: str = DEVICE,
    lora: str = LORA,
    quantize: Sequence[str | None] = (None, "nf4"),
    batches: Sequence[int] = (1, 2, 4),
    seq_lens: Sequence[int] = (512, 1024, 2048),
    optimizers: Sequence[str] = ("adamw", "paged-adamw"),
    precisions: Sequence[str] = ("fp16", "bf16"),
    checkpointing: Sequence[bool] = (False, True),
    power_limit_w: float | None = None,
) -> Iterator[Point]:
    """Every combination of the settings, priced: those that do not fit too, with `Point.fits` False.

    `power_limit_w` is the board's (its TDP). Raises UnknownNameError and InputError as `predict` does, and InputError
    for a device whose power or memory is unknown.
    """
    from foretell import predict
    from foretell.errors import InputError
    from foretell.hardware import device as named

    gpu = named(device)
    limit = power_limit_w or gpu.tdp_w
    if limit is None or gpu.memory_bytes is None:
        raise InputError("power limit or memory is unknown", gpu.name, "give power_limit_w, or add it to a device file")
    for q, batch, seq_len, optimizer, precision, again in itertools.product(
        quantize, batches, seq_lens, optimizers, precisions, checkpointing
    ):
        found = predict(
            model, on=gpu, train=True, lora=lora, quantize=q, batch=batch, seq_len=seq_len, optimizer=optimizer,
            precision=precision, checkpointing=again, power_limit_w=power_limit_w,
        )  # fmt: skip
        rate = found.items["tokens"] / found.time_s
        yield Point(
            quantize=q,
            batch=batch,
            seq_len=seq_len,
            optimizer=optimizer,
            precision=precision,
            checkpointing=again,
            tokens_per_s=rate,
            s_per_10k_tokens=1e4 / rate,
            peak_bytes=found.memory.peak_bytes,
            fits=bool(found.memory.fits),
            energy_j_per_10k_tokens=limit * 1e4 / rate,
        )


def fastest(points: Sequence[Point]) -> Point:
    """The feasible point of most tokens a second."""
    return max((point for point in points if point.fits), key=lambda point: point.tokens_per_s)


def _paged() -> Obtained:
    points = list(sweep(precisions=("fp16",)))
    best = {name: fastest([p for p in points if p.optimizer == name]) for name in ("adamw", "paged-adamw")}
    plain, paged = best["adamw"], best["paged-adamw"]
    gain = paged.tokens_per_s / plain.tokens_per_s - 1
    return Obtained(
        f"{gain:+.1%} ({paged.tokens_per_s:,.0f} vs {plain.tokens_per_s:,.0f} tok/s)",
        gain,
        {
            "adamw_tokens_per_s": plain.tokens_per_s,
            "paged_tokens_per_s": paged.tokens_per_s,
            "adamw_peak_gib": plain.peak_bytes / 2**30,
            "paged_peak_gib": paged.peak_bytes / 2**30,
            "feasible_points": float(sum(p.fits for p in points)),
            "points": float(len(points)),
        },
    )


def _half_formats() -> Obtained:
    points = list(sweep(optimizers=("paged-adamw",)))
    best = {name: fastest([p for p in points if p.precision == name]) for name in ("fp16", "bf16")}
    rates = {name: point.tokens_per_s for name, point in best.items()}
    gain = rates["fp16"] / rates["bf16"] - 1
    text = f"{gain:+.1%} ({rates['fp16']:,.0f} tok/s in fp16, {rates['bf16']:,.0f} in bf16)"
    return Obtained(text, gain, {f"{name}_tokens_per_s": rate for name, rate in rates.items()})


def _longest() -> Obtained:
    """The longest sequence, in steps of 256 tokens, that a batch of one may have."""
    from foretell import capture
    from foretell.cost.memory import peak_memory
    from foretell.hardware import device

    gpu = device(DEVICE)

    def fits(quantize: str | None, checkpointing: bool, tokens: int) -> bool:
        graph = capture(
            MODEL, train=True, lora=LORA, quantize=quantize, seq_len=tokens, optimizer="paged-adamw",
            precision="fp16", checkpointing=checkpointing,
        )  # fmt: skip
        return bool(peak_memory(graph, gpu).fits)

    longest: dict[str, float] = {}
    for quantize, checkpointing in itertools.product((None, "nf4"), (False, True)):
        tokens = 0
        while fits(quantize, checkpointing, tokens + 256):
            tokens += 256
        longest[f"{quantize or 'fp16'}{'_checkpointing' if checkpointing else ''}"] = float(tokens)
    best = max(longest.values())
    return Obtained(f"{best:,.0f} tokens", best, longest)


def _source(place: str) -> Source:
    title = "Profiling LoRA/QLoRA Fine-Tuning Efficiency on Consumer GPUs: An RTX 4060 Case Study"
    return Source(f"Avinash: {title}", 2025, "arXiv 2509.12229", place)


_SETTING = "Qwen2.5-1.5B on an RTX 4060 8 GB; ours: rank 16 on q_proj and v_proj, fp16 or NF4 base, full sequences"

CLAIMS = (
    Claim(
        id=f"{SYSTEM}/paged-optimizer",
        system=SYSTEM,
        title="A paged optimiser raises throughput",
        source=_source("abstract"),
        metric="throughput gain (share)",
        claimed=Claimed("up to +25 % (628 vs 500 tok/s)", 628 / 500 - 1),
        setting=f"{_SETTING}; the fastest feasible of batch 1, 2, 4 and 512, 1024, 2048 tokens in fp16",
        rule=Gain(),
        how="modelled",
        run=_paged,
        note=(
            "Adam's state of such adapters is 17 MiB, and bitsandbytes pages tensors from 100,000 values on: none of "
            "these. Paging so frees nothing here, and what is gained is one kernel a parameter instead of PyTorch's "
            "multi-tensor ops. We predict 4 to 5 times the published tokens a second: padding, data loading and the "
            "loop of the trainer are not in ours, and the abstract does not give batch, rank or base precision."
        ),
    ),
    Claim(
        id=f"{SYSTEM}/bf16-slower",
        system=SYSTEM,
        title="bf16 is less efficient than fp16",
        source=_source("abstract"),
        metric="throughput of fp16 over bf16, less one (share)",
        claimed=Claimed("bf16 degrades efficiency relative to fp16"),
        setting=f"{_SETTING}; paged AdamW",
        rule=Direction(),
        how="modelled",
        run=_half_formats,
        note=(
            "The card multiplies both at the same rate and both take two bytes a value, so the model prices them "
            "alike. What slows bf16 down in the study is not in its abstract."
        ),
    ),
    Claim(
        id=f"{SYSTEM}/sequence-length",
        system=SYSTEM,
        title="Sequences of 2048 tokens are feasible in 8 GB",
        source=_source("abstract"),
        metric="tokens of the longest sequence that fits",
        claimed=Claimed("up to 2048 tokens", 2048.0),
        setting=f"{_SETTING}; batch 1, with and without checkpointing",
        rule=Gain(),
        how="modelled",
        run=_longest,
        note=(
            "Only with checkpointing: without it 1024 tokens fit beside fp16 weights and 1536 beside NF4. Then logits "
            "over 151,936 words, in half and in fp32, take most of the room."
        ),
        cheap=True,
    ),
)
