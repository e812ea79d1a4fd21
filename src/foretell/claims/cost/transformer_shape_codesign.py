"""Co-designed transformer shapes: how much faster shapes train that suit the GPU."""

from __future__ import annotations

from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import Direction, Gain

SYSTEM = "transformer-shape-codesign"
SOURCE = Source(
    "Anthony, Hatef, Narayanan, Biderman, Bekman, Yin, Shafi, Subramoni, Panda: The Case for Co-Designing Model"
    " Architectures with Hardware",
    2024,
    "ICPP",
    "abstract",
)
DEVICE = "a100-sxm4-40gb"


def unoptimised() -> tuple[str, ...]:
    """Dense transformers of the catalogue whose heads are no multiple of 64 wide."""
    from foretell.workload import llm

    configs = {name: llm.config(name) for name in llm.catalogue()}
    return tuple(n for n, c in configs.items() if c.moe is None and c.mla is None and c.head_dim % 64)


def _gain(attention: str) -> tuple[dict[str, float | str], float, str]:
    """Best gains by model, the largest of them, and what it is made of."""
    from foretell.advise.transformer import Setting, shapes
    from foretell.hardware import device
    from foretell.workload import llm

    details: dict[str, float | str] = {}
    best, how = 0.0, "no shape is better"
    for name in unoptimised():
        found = shapes(llm.config(name), device(DEVICE), Setting(attention=attention), count=1)
        gain = found.better[0].gain if found.better else 0.0
        details[f"{name}, {attention}"] = round(gain, 4)
        if gain > best:
            changes = found.better[0].changes
            best = gain
            how = f"{name}: " + ", ".join(f"{k.replace('_', ' ')} {a} → {b}" for k, (a, b) in changes.items())
    return details, best, how


def _throughput() -> Obtained:
    apart, best, how = _gain("products")
    fused, fused_best, _ = _gain("fused")
    details: dict[str, float | str] = {**apart, **fused, "shape": how}
    return Obtained(f"up to {best:.1%} higher ({fused_best:.1%} with fused attention)", best, details)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="transformer-shape-codesign/throughput",
        system=SYSTEM,
        title="Training throughput of efficient shapes over unoptimised ones of similar parameter count",
        source=SOURCE,
        metric="rise of training throughput, as a share",
        claimed=Claimed("up to 39 % higher", 0.39),
        setting="transformers on GPUs, against models with a similar number of parameters and unoptimised shapes",
        rule=Gain(),
        how="modelled",
        run=_throughput,
        note="best shape within 2 % of the parameters of each dense transformer in the catalogue whose heads are no"
        " multiple of 64 wide, predicted on an A100 40 GB: bf16, 4 sequences of 2,048 tokens, attention as two"
        " products and a softmax as the paper analyses it; the cost model does not price misaligned rows",
    ),
    Claim(
        id="transformer-shape-codesign/accuracy",
        system=SYSTEM,
        title="Accuracy of efficient shapes",
        source=SOURCE,
        metric="change of accuracy",
        claimed=Claimed("accuracy is preserved"),
        setting="models with a similar number of parameters",
        rule=Direction(),
        note="needs training at scale",
    ),
)
