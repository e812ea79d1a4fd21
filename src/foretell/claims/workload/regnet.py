"""RegNet: Designing Network Design Spaces."""

from __future__ import annotations

from typing import Any

from foretell.claims.architectures import faster, not_tried
from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import AtMost, Direction, Gain

SYSTEM = "regnet"
V100 = "v100-sxm2-16gb"


def _source(place: str) -> Source:
    return Source("Radosavovic, Kosaraju, Girshick, He, Dollár: Designing Network Design Spaces", 2020, "CVPR", place)


# Inference times (ms) of 64 images on one V100 (16 GB), as facebookresearch/pycls publishes them for the paper's
# models and its baselines (model zoo; PyTorch 1.6, CUDA 9.2): workload, image size, time.
PYCLS_MS: tuple[tuple[str, int, float], ...] = (
    *(
        (f"timm:regnet{kind}_{name}", 224, ms)
        for kind, row in (
            ("x", (10, 15, 17, 21, 33, 57, 69, 92, 94, 137, 168, 318)),
            ("y", (11, 19, 19, 22, 39, 67, 68, 104, 113, 150, 189, 319)),
        )
        for name, ms in zip(
            ("002", "004", "006", "008", "016", "032", "040", "064", "080", "120", "160", "320"), row, strict=True
        )
    ),
    ("timm:resnet50", 224, 53),
    ("timm:resnet101", 224, 90),
    ("timm:resnet152", 224, 130),
    ("timm:resnext50_32x4d", 224, 78),
    ("timm:resnext101_32x4d", 224, 137),
    ("timm:efficientnet_b0", 224, 34),
    ("timm:efficientnet_b1", 240, 52),
    ("timm:efficientnet_b2", 260, 68),
    ("timm:efficientnet_b3", 300, 114),
    ("timm:efficientnet_b4", 380, 240),
    ("timm:efficientnet_b5", 456, 504),
)


def _activations(graph: Any) -> int:
    """Elements that all convolutions put out: the paper's section 3.5."""
    return sum(
        graph.tensors[op.outputs[0]].elements * op.repeat
        for op in graph.ops
        if op.kind == "convolution" and op.phase == "forward"
    )


def _activations_predict() -> Obtained:
    """How much better published times follow our activations than our multiply-adds (Pearson's r)."""
    import statistics

    from foretell.api import capture

    graphs = [capture(workload, image_size=size) for workload, size, _ in PYCLS_MS]
    times = [ms for *_, ms in PYCLS_MS]
    by_activations = statistics.correlation(times, [float(_activations(g)) for g in graphs])
    by_macs = statistics.correlation(times, [float(g.macs()) for g in graphs])
    return Obtained(
        f"r = {by_activations:.3f} with activations, {by_macs:.3f} with multiply-adds ({len(times)} networks)",
        by_activations - by_macs,
        {"r_activations": by_activations, "r_macs": by_macs},
    )


# The paper's tables of stage depths and widths (figures 15 and 16), RegNetX.
_STAGES = {
    "x-200mf": ((24, 1), (56, 1), (152, 4), (368, 7)),
    "x-400mf": ((32, 1), (64, 2), (160, 7), (384, 12)),
    "x-600mf": ((48, 1), (96, 3), (240, 5), (528, 7)),
    "x-800mf": ((64, 1), (128, 3), (288, 7), (672, 5)),
    "x-1.6gf": ((72, 2), (168, 4), (408, 10), (912, 2)),
    "x-3.2gf": ((96, 2), (192, 6), (432, 15), (1008, 2)),
    "x-4.0gf": ((80, 2), (240, 5), (560, 14), (1360, 2)),
    "x-6.4gf": ((168, 2), (392, 4), (784, 10), (1624, 1)),
    "x-8.0gf": ((80, 2), (240, 5), (720, 15), (1920, 1)),
    "x-12gf": ((224, 2), (448, 5), (896, 11), (2240, 1)),
    "x-16gf": ((256, 2), (512, 6), (896, 13), (2048, 1)),
    "x-32gf": ((336, 2), (672, 7), (1344, 13), (2520, 1)),
}


def _stages() -> Obtained:
    """The largest difference of a generated stage's width or depth from the printed one (share)."""
    from foretell.workload.zoo.regnet import PUBLISHED

    worst = 0.0
    for name, printed in _STAGES.items():
        made = [(s.width, s.depth) for s in PUBLISHED[name].stages()]
        worst = max(worst, abs(len(made) - len(printed)))
        for ours, theirs in zip(made, printed, strict=False):
            worst = max(worst, *(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)))
    return Obtained(f"{worst:.0%} off in {sum(map(len, _STAGES.values()))} stages of {len(_STAGES)} networks", worst)


# Parameters (M) and multiply-adds (G) of pycls's model zoo.
_COUNTS = {
    "x-200mf": (2.7, 0.2),
    "x-800mf": (7.3, 0.8),
    "x-4.0gf": (22.1, 4.0),
    "x-8.0gf": (39.6, 8.0),
    "x-32gf": (107.8, 31.7),
    "y-800mf": (6.3, 0.8),
    "y-4.0gf": (20.6, 4.0),
    "y-8.0gf": (39.2, 8.0),
    "y-16gf": (83.6, 15.9),
}


def _off(which: int) -> Obtained:
    """The largest difference of a count from the printed one, in units of the last printed digit."""
    import torch

    from foretell.api import capture
    from foretell.workload.zoo.regnet import PUBLISHED, regnet

    off = {}
    for name, printed in _COUNTS.items():
        with torch.device("meta"):
            module = regnet(PUBLISHED[name]).eval()
            graph = capture(module, torch.empty(1, 3, 224, 224))
        found = graph.parameters / 1e6 if which == 0 else graph.macs() / 1e9
        off[name] = abs(found - printed[which]) / 0.1
    worst = max(off, key=lambda name: off[name])
    return Obtained(f"at most {off[worst]:.2f} of the last printed digit ({worst})", off[worst], off)


CLAIMS = (
    Claim(
        id="regnet/speed-efficientnet-b5",
        system=SYSTEM,
        title="RegNetX-8.0GF runs faster than EfficientNet-B5, with lower error",
        source=_source("abstract; facebookresearch/pycls, model zoo"),
        metric="throughput gain (share)",
        claimed=Claimed("up to 5× faster (94 against 504 ms for 64 images)", 4.0),
        setting="V100 (16 GB), batch 64, fp32; 224×224 against 456×456",
        rule=Gain(),
        how="modelled",
        run=lambda: faster(
            ("timm:regnetx_080", {"image_size": 224}), ("timm:efficientnet_b5", {"image_size": 456}), V100, batch=64
        ),
        note="Ours are 117 and 361 ms. The published ones are of PyTorch 1.6 on CUDA 9.2, the model of later releases,"
        " whose depthwise kernels EfficientNet gains by.",
        tolerance=0.1,
    ),
    Claim(
        id="regnet/activations-predict-time",
        system=SYSTEM,
        title="Inference time on a GPU follows activations more than multiply-adds",
        source=_source("section 3.5, figure 12"),
        metric="correlation with time: activations' less that of multiply-adds",
        claimed=Claimed("activations can heavily affect runtime on memory-bound accelerators"),
        setting="pycls's published times (V100, 64 images); activations and multiply-adds from our graphs",
        rule=Direction(),
        how="public data",
        run=_activations_predict,
    ),
    Claim(
        id="regnet/quantised-linear-widths",
        system=SYSTEM,
        title="Six numbers and a quantised linear function give every stage of the published networks",
        source=_source("equations 2 to 4, figure 15"),
        metric="largest difference of a stage's width or depth (share)",
        claimed=Claimed("exactly", 0.0),
        setting="the twelve RegNetX",
        rule=AtMost(),
        how="measured here",
        run=_stages,
        cheap=True,
    ),
    Claim(
        id="regnet/parameters",
        system=SYSTEM,
        title="Parameters of the published networks",
        source=_source("facebookresearch/pycls, model zoo"),
        metric="largest difference (in the last printed digit)",
        claimed=Claimed("printed to 0.1 M", 0.5),
        setting=f"{len(_COUNTS)} RegNetX and RegNetY, generated from their six numbers; 1000 classes",
        rule=AtMost(),
        how="measured here",
        run=lambda: _off(0),
    ),
    Claim(
        id="regnet/macs",
        system=SYSTEM,
        title="Multiply-adds of the published networks",
        source=_source("facebookresearch/pycls, model zoo"),
        metric="largest difference (in the last printed digit)",
        claimed=Claimed("printed to 0.1 G", 0.5),
        setting=f"{len(_COUNTS)} RegNetX and RegNetY, generated from their six numbers; 224×224",
        rule=AtMost(),
        how="measured here",
        run=lambda: _off(1),
    ),
    not_tried(
        SYSTEM,
        "better-space",
        "A larger share of RegNets than of AnyNets is good",
        _source("section 3, figures 5 to 9"),
        "share of a population below an error (share)",
        Claimed("each step of the design keeps or raises it"),
        "ImageNet, 500 networks of 360 to 400 M multiply-adds a space, 10 epochs each",
    ),
    not_tried(
        SYSTEM,
        "imagenet-top1",
        "Top-1 error below EfficientNet's under the same training settings",
        _source("abstract; facebookresearch/pycls, model zoo"),
        "ImageNet top-1 (share)",
        Claimed("79.3 % (RegNetX-8.0GF) against 78.5 % (EfficientNet-B5)", 0.793),
        "ImageNet, 100 epochs",
    ),
)
