"""VoVNet: An Energy and GPU-Computation Efficient Backbone Network for Real-Time Object Detection."""

from __future__ import annotations

from foretell.claims.architectures import faster, less_energy, not_tried
from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import Direction, Gain

SYSTEM = "vovnet"
DEVICE = "titan-x-pascal"


def _source(place: str) -> Source:
    return Source(
        "Lee, Hwang, Lee, Bae, Park: An Energy and GPU-Computation Efficient Backbone Network for Real-Time Object"
        " Detection",
        2019,
        "CVPR workshops",
        place,
    )


def _traffic() -> Obtained:
    """Elements that convolutions move for a multiply-add: how many times DenseNet-201's VoVNet-39's are, less one."""
    from foretell.api import capture
    from foretell.graph.traffic import convolution_io_elements

    moved = {}
    for workload in ("zoo:vovnet39", "torchvision:densenet201"):
        graph = capture(workload, image_size=224)
        moved[workload] = convolution_io_elements(graph) / graph.macs()
    ours, theirs = moved.values()
    return Obtained(
        f"{theirs / ours:.1f}× less ({1e3 * ours:.2f} against {1e3 * theirs:.2f} elements a thousand multiply-adds)",
        theirs / ours - 1,
        moved,
    )


# Inference times of the authors' implementation (stigma0617/VoVNet.pytorch): Titan X Pascal, PyTorch 1.0, 224×224.
_PAIRS = (
    ("vovnet39", "torchvision:densenet201", "DenseNet-201", 10, 39),
    ("vovnet57", "torchvision:densenet161", "DenseNet-161", 13, 27),
    ("vovnet39", "torchvision:resnet50", "ResNet-50", 10, 12),
    ("vovnet57", "torchvision:resnet101", "ResNet-101", 13, 20),
)
_HOST = (
    "At batch 1 the time is the host's launching of kernels, of which DenseNet and ResNet have many more than their"
    " work asks for."
)

CLAIMS = (
    Claim(
        id="vovnet/detector-speed",
        system=SYSTEM,
        title="Detectors on VoVNet run faster than on DenseNet",
        source=_source("abstract"),
        metric="throughput gain (share)",
        claimed=Claimed("2× faster", 1.0),
        setting="the paper: DSOD, RefineDet, Mask R-CNN on a Titan X; ours the backbones (VoVNet-39, DenseNet-201) at"
        " 320×320, batch 1, fp32",
        rule=Gain(),
        how="modelled",
        run=lambda: faster("zoo:vovnet39", "torchvision:densenet201", DEVICE, image_size=320),
        note="The detectors' heads are not modelled: they are the same in both and draw the ratio towards one.",
        tolerance=0.1,
    ),
    Claim(
        id="vovnet/detector-energy",
        system=SYSTEM,
        title="Detectors on VoVNet take less energy than on DenseNet",
        source=_source("abstract"),
        metric="images an equal energy serves, less one (share)",
        claimed=Claimed("1.6× to 4.1× less", 0.6),
        setting="as for speed; the lower figure is the one to reach",
        rule=Gain(),
        how="modelled",
        run=lambda: less_energy("zoo:vovnet39", "torchvision:densenet201", DEVICE, image_size=320),
        tolerance=0.1,
    ),
    *(
        Claim(
            id=f"vovnet/time-{ours}-{theirs.partition(':')[2]}",
            system=SYSTEM,
            title=f"VoVNet-{ours[-2:]} takes less time than {title}, with higher accuracy",
            source=_source("the authors' implementation, table of ImageNet results"),
            metric="throughput gain (share)",
            claimed=Claimed(f"{a} against {b} ms", b / a - 1),
            setting="Titan X Pascal, PyTorch 1.0, 224×224, fp32; batch is not stated, ours 1",
            rule=Gain(),
            how="modelled",
            run=lambda ours=ours, theirs=theirs: faster(f"zoo:{ours}", theirs, DEVICE, image_size=224),  # type: ignore[misc]
            note=_HOST,
            tolerance=0.1,
        )
        for ours, theirs, title, a, b in _PAIRS
    ),
    Claim(
        id="vovnet/memory-access",
        system=SYSTEM,
        title="Aggregating once moves less memory for its work than dense connections",
        source=_source("abstract"),
        metric="memory access a multiply-add: DenseNet's over VoVNet's, less one (share)",
        claimed=Claimed("dense connections lead to heavy memory access cost"),
        setting="VoVNet-39 and DenseNet-201, 224×224; inputs and outputs of convolutions",
        rule=Direction(),
        how="measured here",
        run=_traffic,
        cheap=True,
    ),
    not_tried(
        SYSTEM,
        "coco-small-objects",
        "Small objects are detected better than on DenseNet and ResNet",
        _source("abstract"),
        "COCO average precision of small objects (share)",
        Claimed("significantly improved"),
        "COCO",
    ),
)
