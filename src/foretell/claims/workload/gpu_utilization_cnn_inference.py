"""A Study on the Intersection of GPU Utilization and CNN Inference."""

from __future__ import annotations

import csv
import gzip
import statistics
from collections.abc import Iterable

from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.data import measurements
from foretell.claims.rules import Direction

SYSTEM = "gpu-utilization-cnn-inference"
BATCH = 64
# Networks of plain or grouped convolutions, and such as are built on depthwise ones.
_PLAIN = ("resnet18", "resnet50", "resnet101", "wide_resnet50_2", "vgg16")
_DEPTHWISE = ("mobilenet_v2", "mobilenet_v3_large", "mnasnet1_0", "efficientnet_b0", "shufflenet_v2_x1_0")
_OTHERS = ("alexnet", "squeezenet1_1", "densenet121", "googlenet", "resnext50_32x4d")
# The same as families of timm, by how their names begin.
_TIMM_PLAIN = ("resnet", "wide_resnet", "resnext", "vgg", "repvgg")
_TIMM_DEPTHWISE = ("mobilenet", "efficientnet", "tf_efficientnet", "mnasnet", "mixnet", "fbnet", "ghostnet", "lcnet")
_TIMM_OTHERS = (
    "densenet",
    "regnet",
    "dla",
    "hrnet",
    "dpn",
    "inception",
    "xception",
    "convnext",
    "darknet",
    "cspresnet",
)


def _source(place: str) -> Source:
    return Source(
        "Kosaian, Phanishayee: A Study on the Intersection of GPU Utilization and CNN Inference", 2022, "arXiv", place
    )


def _modelled(names: Iterable[str]) -> dict[str, float]:
    """Predicted utilization of torchvision's networks: FLOP/s of an inference over the device's peak."""
    from foretell.api import predict

    found = {}
    for name in names:
        estimate = predict(f"torchvision:{name}", on="v100-sxm2-16gb", batch=BATCH, precision="amp")
        found[name] = float(estimate.mfu)
    return found


def _measured() -> dict[str, float]:
    """Measured utilization of timm's convolutional networks on an RTX 4090."""
    from foretell.hardware import device

    peak = device("rtx-4090").peak("fp16", "tensor")
    assert peak is not None
    path = measurements("timm", "benchmark-infer-amp-nhwc-pt240-cu124-rtx4090.csv")
    found = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if not row["model"].startswith((*_TIMM_PLAIN, *_TIMM_DEPTHWISE, *_TIMM_OTHERS)) or not row["infer_gmacs"]:
                continue
            rate = 2e9 * float(row["infer_gmacs"]) * float(row["infer_samples_per_sec"])
            found[f"{row['model']} {row['infer_img_size']}"] = rate / peak
    return found


def _headroom(found: dict[str, float]) -> Obtained:
    """What is left of the peak by the median network."""
    typical = statistics.median(found.values())
    least, most = min(found.values()), max(found.values())
    return Obtained(
        f"{1 - typical:.0%} of peak unused by the median of {len(found)} networks ({least:.1%} to {most:.0%} used)",
        1 - typical,
        {"median": typical, "least": least, "most": most, "networks": len(found)},
    )


def _depthwise(plain: Iterable[float], depthwise: Iterable[float]) -> Obtained:
    """How far above the depthwise networks the plain ones are."""
    above, below = statistics.median(plain), statistics.median(depthwise)
    return Obtained(
        f"{above / below:.1f}× (median {above:.0%} against {below:.1%} of peak)",
        above / below - 1,
        {"plain": above, "depthwise": below},
    )


def _depthwise_measured() -> Obtained:
    found = _measured()
    return _depthwise(
        (value for name, value in found.items() if name.startswith(_TIMM_PLAIN)),
        (value for name, value in found.items() if name.startswith(_TIMM_DEPTHWISE)),
    )


def _depthwise_modelled() -> Obtained:
    return _depthwise(_modelled(_PLAIN).values(), _modelled(_DEPTHWISE).values())


def macs_nasbench201(arch: str) -> int:
    """Multiply-adds of a NAS-Bench-201 network on a 32×32 image.

    Three stages of five cells; a 1×1 convolution costs positions × channels² = 262,144 in each of them. The rest is
    the stem, two residual blocks between stages and the classifier (Dong and Yang 2020, section 2 and figure 1).

    >>> edges = "|{0}~0|+|{0}~0|{0}~1|+|{0}~0|{0}~1|{0}~2|"
    >>> round(macs_nasbench201(edges.format("nor_conv_3x3")) / 1e6, 1)  # their largest: 220.1 M
    220.1
    """
    cell = 9 * arch.count("nor_conv_3x3") + arch.count("nor_conv_1x1")
    block = 256 * (9 * 16 * 32 + 9 * 32 * 32 + 16 * 32)
    return 15 * 262_144 * cell + 1024 * 9 * 3 * 16 + 2 * block + 64 * 10


def _nas() -> tuple[list[tuple[int, ...]], list[float], list[float]]:
    """Of every NAS-Bench-201 network with a convolution: counts of its operations, its work, seconds a batch of 256."""
    kinds = ("nor_conv_3x3", "nor_conv_1x1", "avg_pool_3x3", "skip_connect")
    counts, work, seconds = [], [], []
    path = measurements("help-nas", "nasbench201_gpu_latency_ms.csv.gz")
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if "conv" in row["arch"]:
                counts.append(tuple(row["arch"].count(kind) for kind in kinds))
                work.append(2.0 * 256 * macs_nasbench201(row["arch"]))
                seconds.append(float(row["titan_rtx_256"]) * 1e-3)
    return counts, work, seconds


def _nas_spread() -> Obtained:
    """How utilization varies within one search space."""
    from foretell.hardware import device

    peak = device("titan-rtx").peak("fp32", "vector")
    assert peak is not None
    _, work, seconds = _nas()
    used = sorted(w / s / peak for w, s in zip(work, seconds, strict=True))
    low, high = used[len(used) // 10], used[-len(used) // 10]
    return Obtained(
        f"{high / low:.1f}× between the tenths ({low:.1%} to {high:.1%} of peak, {len(used):,} networks)",
        high / low - 1,
        {"low": low, "median": used[len(used) // 2], "high": high},
    )


def _nas_latency() -> Obtained:
    """Time as work over utilization × peak, utilization from every twentieth network of the same operations."""
    counts, work, seconds = _nas()
    rates = [w / s for w, s in zip(work, seconds, strict=True)]
    sampled = range(0, len(work), 20)
    by_kind: dict[tuple[int, ...], list[float]] = {}
    for i in sampled:
        by_kind.setdefault(counts[i], []).append(rates[i])
    everything = statistics.median(rates[i] for i in sampled)
    plain, informed = [], []
    for i in set(range(len(work))) - set(sampled):
        own = by_kind.get(counts[i])
        plain.append(abs(work[i] / everything / seconds[i] - 1))
        informed.append(abs(work[i] / (statistics.median(own) if own else everything) / seconds[i] - 1))
    before, after = statistics.median(plain), statistics.median(informed)
    return Obtained(
        f"median error {after:.1%}, against {before:.0%} with one utilization for all (5 % of the space measured)",
        1 - after / before,
        {"error_one_utilization": before, "error_by_operations": after},
    )


CLAIMS = (
    Claim(
        id=f"{SYSTEM}/headroom-modelled",
        system=SYSTEM,
        title="Common CNNs leave much of a GPU unused",
        source=_source("abstract"),
        metric="share of peak unused, median network",
        claimed=Claimed("there is room to improve"),
        setting=f"15 torchvision networks, V100, batch {BATCH}, amp",
        rule=Direction(),
        how="modelled",
        run=lambda: _headroom(_modelled((*_PLAIN, *_DEPTHWISE, *_OTHERS))),
        note="Predicted by the roofline with its fitted efficiencies, which were not fitted on this GPU.",
    ),
    Claim(
        id=f"{SYSTEM}/headroom-measured",
        system=SYSTEM,
        title="Common CNNs leave much of a GPU unused",
        source=_source("abstract"),
        metric="share of peak unused, median network",
        claimed=Claimed("there is room to improve"),
        setting="timm's convolutional networks, RTX 4090, amp, channels last, the batches of its benchmark",
        rule=Direction(),
        how="public data",
        run=lambda: _headroom(_measured()),
        note="timm's own throughputs; the peak is that of fp16 with fp32 accumulation.",
    ),
    Claim(
        id=f"{SYSTEM}/depthwise-modelled",
        system=SYSTEM,
        title="Networks of depthwise convolutions use far less of a GPU than ResNets",
        source=_source("survey of CNNs"),
        metric="utilization gain of plain over depthwise (share)",
        claimed=Claimed("lower utilization where arithmetic intensity is lower"),
        setting=f"five torchvision networks of each kind, V100, batch {BATCH}, amp",
        rule=Direction(),
        how="modelled",
        run=_depthwise_modelled,
    ),
    Claim(
        id=f"{SYSTEM}/depthwise-measured",
        system=SYSTEM,
        title="Networks of depthwise convolutions use far less of a GPU than ResNets",
        source=_source("survey of CNNs"),
        metric="utilization gain of plain over depthwise (share)",
        claimed=Claimed("lower utilization where arithmetic intensity is lower"),
        setting="families of timm, RTX 4090, amp, channels last",
        rule=Direction(),
        how="public data",
        run=_depthwise_measured,
    ),
    Claim(
        id=f"{SYSTEM}/nas-spread",
        system=SYSTEM,
        title="Utilization differs between networks of one search space",
        source=_source("abstract; its search-space section"),
        metric="utilization of the best tenth over the worst tenth, less one",
        claimed=Claimed("investigated; no number in the abstract"),
        setting="all NAS-Bench-201 networks with a convolution, Titan RTX, batch 256, fp32 (HELP's latencies)",
        rule=Direction(),
        how="public data",
        run=_nas_spread,
        note="The search space is ours to choose: the paper's is not in the abstract.",
    ),
    Claim(
        id=f"{SYSTEM}/nas-latency",
        system=SYSTEM,
        title="Knowing utilization gives latency without measuring every network of a search space",
        source=_source("abstract: could accelerate NAS itself"),
        metric="reduction of the median error (share)",
        claimed=Claimed("could potentially be used to accelerate NAS"),
        setting="NAS-Bench-201, Titan RTX, batch 256; utilization of 5 % of the networks by their operations",
        rule=Direction(),
        how="public data",
        run=_nas_latency,
    ),
)
