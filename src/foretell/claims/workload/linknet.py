"""LinkNet: Exploiting Encoder Representations for Efficient Semantic Segmentation."""

from __future__ import annotations

from foretell.claims.architectures import estimate, fewer, macs, not_tried, parameters
from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import Direction, Equal

SYSTEM = "linknet"


def _source(place: str) -> Source:
    return Source(
        "Chaurasia, Culurciello: LinkNet: Exploiting Encoder Representations for Efficient Semantic Segmentation",
        2017,
        "VCIP",
        place,
    )


def _frames(device: str) -> Obtained:
    found = estimate("zoo:linknet", device, inputs={"x": ((1, 3, 720, 1280), "float32")})
    return Obtained(
        f"{found.throughput_per_s:.3g} frames/s ({found.time_s * 1e3:.3g} ms)",
        found.throughput_per_s,
        {"s": found.time_s, "mfu": found.mfu or 0.0},
    )


CLAIMS = (
    Claim(
        id="linknet/parameters",
        system=SYSTEM,
        title="Parameters",
        source=_source("abstract"),
        metric="parameters",
        claimed=Claimed("11.5 M", 11.5e6),
        setting="20 classes",
        rule=Equal(0.005),
        how="measured here",
        run=lambda: parameters("zoo:linknet"),
        cheap=True,
    ),
    Claim(
        id="linknet/flops",
        system=SYSTEM,
        title="Operations an image",
        source=_source("abstract"),
        metric="floating-point operations (two a multiply-add)",
        claimed=Claimed("21.2 GFLOPs", 21.2e9),
        setting="3×640×360, 20 classes",
        rule=Equal(0.05),
        how="measured here",
        run=lambda: macs("zoo:linknet", flops=2),
        note="Convolutions and transposed convolutions, by what reaches their outputs; the paper's way is not said.",
        cheap=True,
    ),
    Claim(
        id="linknet/frames-titan-x",
        system=SYSTEM,
        title="Frames a second at 1280×720 on a Titan X",
        source=_source("the authors' project page"),
        metric="frames a second",
        claimed=Claimed("19", 19.0),
        setting="Titan X (Maxwell), Torch7, batch 1, fp32",
        rule=Equal(0.15),
        how="modelled",
        run=lambda: _frames("titan-x-maxwell"),
        note="The authors' 52 ms are a fifth of the card's peak at our count of operations. The model is of today's"
        " PyTorch; which layers Torch7 of 2017 ran slower is not published.",
        tolerance=0.1,
    ),
    Claim(
        id="linknet/adding-saves-work",
        system=SYSTEM,
        title="Adding the encoder's features costs less than joining them",
        source=_source("abstract: no significant increase in number of parameters"),
        metric="parameters saved (share)",
        claimed=Claimed("fewer parameters in the decoder"),
        setting="the same decoder with joins, as U-Net has them",
        rule=Direction(),
        how="measured here",
        run=lambda: fewer(parameters, "zoo:linknet", "zoo:linknet_joined"),
        note="The decoder's 1×1 convolutions are small: joining would add 8 % to its work, but few parameters.",
        cheap=True,
    ),
    not_tried(
        SYSTEM,
        "camvid-iou",
        "State of the art on CamVid",
        _source("abstract"),
        "CamVid IoU (share)",
        Claimed("state of the art"),
        "CamVid, 768×576",
    ),
)
