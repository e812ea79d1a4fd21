"""EfficientMod: Efficient Modulation for Vision Networks."""

from __future__ import annotations

from foretell.claims.architectures import counts, faster, not_tried, ratio_of_speeds
from foretell.claims.claim import Claim, Claimed, Source
from foretell.claims.rules import Equal, Gain

SYSTEM = "efficientmod"
DEVICE = "p100-pcie-16gb"


def _source(place: str) -> Source:
    return Source("Ma, Dai, Yang, Xiao, Chen, Fu, Yuan: Efficient Modulation for Vision Networks", 2024, "ICLR", place)


CLAIMS = (
    Claim(
        id="efficientmod/faster-than-efficientformerv2",
        system=SYSTEM,
        title="EfficientMod-s runs faster than EfficientFormerV2-S2, with higher accuracy",
        source=_source("abstract and table 2"),
        metric="speed gain (share)",
        claimed=Claimed("25 % faster on GPU", 0.25),
        setting="P100, 224×224, fp32; batch is not in the abstract, ours 1",
        rule=Gain(),
        how="modelled",
        run=lambda: faster("zoo:efficientmod_s", "timm:efficientformerv2_s2", DEVICE),
        tolerance=0.1,
    ),
    Claim(
        id="efficientmod/as-fast-as-mobilevitv2",
        system=SYSTEM,
        title="EfficientMod-s takes as long as MobileViTv2-1.0, 2.9 points less accurate",
        source=_source("abstract and table 2"),
        metric="ratio of speeds",
        claimed=Claimed("the same GPU latency", 1.0),
        setting="P100, 224×224 against 256×256, fp32, batch 1",
        rule=Equal(0.1),
        how="modelled",
        run=lambda: ratio_of_speeds("zoo:efficientmod_s", "timm:mobilevitv2_100", DEVICE),
        note="At batch 1 the host's launches decide, of which EfficientMod-s has twice as many. At batch 32 and 128 the"
        " model gives 0.99.",
        tolerance=0.1,
    ),
    *counts(
        SYSTEM,
        _source("table 2"),
        {
            "zoo:efficientmod_xxs": ("EfficientMod-xxs", 4.7e6, 0.6e9),
            "zoo:efficientmod_xs": ("EfficientMod-xs", 6.6e6, 0.8e9),
            "zoo:efficientmod_s": ("EfficientMod-s", 12.9e6, 1.4e9),
        },
        tolerance=(0.01, 0.05),
        cheap=("zoo:efficientmod_xxs", "zoo:efficientmod_s"),
    ),
    not_tried(
        SYSTEM,
        "imagenet-top1",
        "Top-1 accuracy of EfficientMod-s, 0.6 above EfficientFormerV2-S2",
        _source("abstract and table 2"),
        "ImageNet top-1 (share)",
        Claimed("81.9 % distilled (81.0 % without)", 0.819),
        "ImageNet",
    ),
    not_tried(
        SYSTEM,
        "ade20k",
        "Segmentation above EfficientFormerV2-S",
        _source("abstract"),
        "ADE20K mIoU gain (points)",
        Claimed("+3.6", 3.6),
        "ADE20K, Semantic FPN",
    ),
)
