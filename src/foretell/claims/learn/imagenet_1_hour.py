"""Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import AtMost, Equal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from foretell.graph import Graph
    from foretell.simulate.collectives import Fabric

SYSTEM = "imagenet-1-hour"
MODEL, DEVICE, PER_GPU = "torchvision:resnet50", "p100-sxm2-16gb", 32
#: 32 of the authors' servers: 8 GPUs joined as in a DGX-1, one 50 Gbit Ethernet port (section 4).
CLUSTER = "32x dgx-1p over 1x ethernet-50"
IMAGES, EPOCHS, BATCH = 1_281_167, 90, 8192


def all_reduce_time(fabric: Fabric, nbytes: float) -> float:
    """Seconds of the authors' all-reduce over all servers of `fabric`.

    Buffers are reduced onto one GPU of each server, summed between servers by recursive halving and doubling (in round
    i each sends 1/2^i of the buffer to one other, and as much on the way back), and broadcast within each server. A
    reduction takes what a broadcast does. The number of servers is a power of two.
    """
    inside = 2 * float(fabric.time_s("broadcast", nbytes, fabric.local))
    rounds = (fabric.ranks // fabric.local).bit_length() - 1
    parts = [nbytes / 2**i for i in range(1, rounds + 1)]
    between = 2 * sum(float(fabric.time_s("send_recv", part, 2, fabric.local, concurrent=False)) for part in parts)
    return inside + between


def step_time(graph: Graph, op_time_s: Sequence[float], all_reduce: Callable[[float], float]) -> float:
    """Seconds of a synchronous step whose gradients are all-reduced as soon as they are there.

    Op by op of the backward pass, one all-reduce for the gradients it completes; they queue for the network while the
    device computes on. The optimiser waits for both. `op_time_s` is parallel to `graph.ops`; `all_reduce` gives the
    seconds of some bytes.
    """
    wanted = {tensor for op in graph.ops if op.phase == "optimizer" for tensor in op.inputs}
    clock = network = after = 0.0
    for op, took in zip(graph.ops, op_time_s, strict=True):
        if op.phase == "optimizer":
            after += took
            continue
        clock += took
        nbytes = sum(graph.tensors[i].nbytes for i in op.outputs if i in wanted) if op.phase == "backward" else 0
        if nbytes:
            network = max(network, clock) + all_reduce(float(nbytes))
    return max(clock, network) + after


def _steps() -> dict[str, float]:
    """Seconds of a step on one GPU, on 8 and on 256."""
    from foretell import capture, predict
    from foretell.hardware import cluster
    from foretell.simulate.collectives import Fabric

    graph = capture(MODEL, train=True, batch=PER_GPU)
    times = [float(took) for took in predict(graph, on=DEVICE).ops.time_s]
    fabric = Fabric.of(cluster(CLUSTER))
    return {
        "step_1_gpu_s": step_time(graph, times, lambda nbytes: 0.0),
        "step_8_gpus_s": step_time(graph, times, lambda nbytes: float(fabric.time_s("all_reduce", nbytes, 8))),
        "step_256_gpus_s": step_time(graph, times, lambda nbytes: all_reduce_time(fabric, nbytes)),
        "all_reduce_256_gpus_s": all_reduce_time(fabric, float(graph.parameter_bytes)),
    }


def _scaling() -> Obtained:
    steps = _steps()
    efficiency = steps["step_8_gpus_s"] / steps["step_256_gpus_s"]
    text = f"{efficiency:.1%} ({steps['step_8_gpus_s'] * 1e3:.0f} to {steps['step_256_gpus_s'] * 1e3:.0f} ms a step)"
    return Obtained(text, efficiency, steps)


def _hours() -> Obtained:
    steps = _steps()
    hours = EPOCHS * (IMAGES / BATCH) * steps["step_256_gpus_s"] / 3600
    images = BATCH / steps["step_256_gpus_s"]
    return Obtained(f"{hours:.2f} h ({images:,.0f} images/s)", hours, steps | {"images_per_s": images})


#: Digits: 16 workers of 8 samples. A base rate for which scaling matters, and one for which warm-up does.
_RATE, _HIGH_RATE = 0.05, 0.25
_TASK = {"per_worker": 8, "epochs": 15}
_SEEDS = 3


def _accuracy() -> Obtained:
    """What a batch 16 times larger loses on digits, and what it loses more with a rule left out."""
    from statistics import fmean

    from foretell.learn.digits import digits, learn

    data = digits()
    rows: dict[str, dict[str, Any]] = {
        "small": {"workers": 1, "base_rate": _RATE},
        "large": {"workers": 16, "base_rate": _RATE},
        "large_without_scaling": {"workers": 16, "base_rate": _RATE, "scale": False},
        "large_at_high_rate": {"workers": 16, "base_rate": _HIGH_RATE},
        "large_at_high_rate_without_warmup": {"workers": 16, "base_rate": _HIGH_RATE, "warmup_epochs": 0.0},
    }
    found = {
        name: fmean(learn(data, seed=seed, **_TASK, **row) for seed in range(_SEEDS))  # type: ignore[arg-type]
        for name, row in rows.items()
    }
    lost = 100 * (found["small"] - found["large"])
    text = (
        f"{lost:.2f} points ({found['small']:.1%} → {found['large']:.1%}); without scaling "
        f"{found['large_without_scaling']:.1%}; at a base rate of {_HIGH_RATE} {found['large_at_high_rate']:.1%}, "
        f"without warm-up {found['large_at_high_rate_without_warmup']:.1%}"
    )
    return Obtained(text, lost, {f"accuracy_{name}": value for name, value in found.items()})


def _source(place: str) -> Source:
    title = "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour"
    return Source(f"Goyal, Dollár, Girshick et al.: {title}", 2017, "arXiv 1706.02677", place)


_MODELLED = "ResNet-50, 32 images a GPU, fp32; 32 servers of 8 Tesla P100 with NVLink, 50 Gbit Ethernet between them"

CLAIMS = (
    Claim(
        id=f"{SYSTEM}/scaling-8-to-256",
        system=SYSTEM,
        title="Training scales from 8 to 256 GPUs with an efficiency of about 90 %",
        source=_source("abstract"),
        metric="step time on 8 GPUs over that on 256",
        claimed=Claimed("~90 %", 0.90),
        setting=_MODELLED,
        rule=Equal(0.05),
        how="modelled",
        run=_scaling,
        note=(
            "Gradients go layer by layer, beside the backward pass: reduced within a server, all-reduced between "
            "servers, and back. Not in the model: stragglers (a step waits for the slowest of 256 workers), data "
            "loading, and what the reduction takes from the GPU and the host. No measurements of NVLink 1 in a mesh: "
            "the efficiency of its links is that of NVLink 2."
        ),
    ),
    Claim(
        id=f"{SYSTEM}/one-hour",
        system=SYSTEM,
        title="ResNet-50 trains in one hour on 256 GPUs with a minibatch of 8192",
        source=_source("abstract"),
        metric="hours of 90 epochs of ImageNet",
        claimed=Claimed("one hour", 1.0),
        setting=f"{_MODELLED}; 1,281,167 images",
        rule=Equal(0.10),
        how="modelled",
        run=_hours,
        note=(
            "An hour for 90 epochs is 256 ms a step, or 230 ms on 8 GPUs at 90 %: the authors' own step is 1.6 times "
            "as long as is predicted here of PyTorch's kernels on a P100. Stragglers and data loading are not in the "
            "model."
        ),
    ),
    Claim(
        id=f"{SYSTEM}/no-loss-on-digits",
        system=SYSTEM,
        title="With the rules, large minibatches cost no accuracy: the mechanism on a small task",
        source=_source("abstract: no loss of accuracy up to 8192 images"),
        metric="accuracy lost by the larger batch (points)",
        claimed=Claimed("no loss; held here to one point", 1.0),
        setting=(
            "another setting: 8×8 digits and a residual network of three blocks; batch 128 as 16 workers of 8, against "
            "batch 8; 15 epochs, mean of 3 seeds (the paper: ResNet-50 on ImageNet, 8192 against 256)"
        ),
        rule=AtMost(),
        how="measured here",
        run=_accuracy,
        note=(
            "One point is our bound: 539 test digits cannot tell less. Scaling is worth most at a low base rate, "
            "warm-up at a high one."
        ),
    ),
    Claim(
        id=f"{SYSTEM}/no-loss-on-imagenet",
        system=SYSTEM,
        title="No loss of accuracy with minibatches of up to 8192 images on ImageNet",
        source=_source("abstract"),
        metric="top-1 error (share)",
        claimed=Claimed("no loss up to 8192 images"),
        setting="ResNet-50 on ImageNet, 256 GPUs",
        rule=AtMost(),
        note="Takes ImageNet and some 256 GPU-hours; the rules themselves are in foretell.learn.large_batch.",
    ),
)
