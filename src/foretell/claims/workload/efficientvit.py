"""EfficientViT: Memory Efficient Vision Transformer with Cascaded Group Attention."""

from __future__ import annotations

from foretell.claims.architectures import counts, folded_speed, measured_faster, not_tried, timm_model
from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import Gain

SYSTEM = "efficientvit"
DEVICE = "v100-sxm2-16gb"
BATCH = 2048


def _source(place: str) -> Source:
    return Source(
        "Liu, Peng, Zheng, Yang, Hu, Yuan: EfficientViT: Memory Efficient Vision Transformer with Cascaded Group"
        " Attention",
        2023,
        "CVPR",
        place,
    )


def _faster(ours: str, theirs: str, size: int) -> Obtained:
    a = folded_speed(ours, DEVICE, BATCH, 224, precision="amp")
    b = folded_speed(theirs, DEVICE, BATCH // 8 if size > 224 else BATCH, size, precision="amp")
    return Obtained(f"{a / b:.2f}× as fast ({a:.0f} against {b:.0f} images/s)", a / b - 1, {ours: a, theirs: b})


_GPU = f"V100, mixed precision, batch {BATCH}, batch norms folded in both"
_CPU = "one core of a CPU, batch 16, fp32, batch norms folded in both; the paper's an Intel Xeon E5-2690 v4"

CLAIMS = (
    Claim(
        id="efficientvit/gpu-mobilenetv3",
        system=SYSTEM,
        title="EfficientViT-M5 runs faster on a GPU than MobileNetV3-Large, with higher accuracy",
        source=_source("abstract and table 2"),
        metric="throughput gain (share)",
        claimed=Claimed("40.4 % higher (10,621 images/s)", 0.404),
        setting=f"{_GPU}, 224×224",
        rule=Gain(),
        how="modelled",
        run=lambda: _faster("efficientvit_m5", "mobilenetv3_large_100", 224),
        tolerance=0.1,
    ),
    Claim(
        id="efficientvit/cpu-mobilenetv3",
        system=SYSTEM,
        title="EfficientViT-M5 runs faster on a CPU than MobileNetV3-Large",
        source=_source("abstract and table 2"),
        metric="throughput gain (share)",
        claimed=Claimed("45.2 % higher", 0.452),
        setting=f"{_CPU}, 224×224",
        rule=Gain(),
        how="measured here",
        run=lambda: measured_faster(
            timm_model("efficientvit_m5", True), timm_model("mobilenetv3_large_100", True), (224, 224), batch=16
        ),
        note="M5 does 2.4 times the multiply-adds; how much a core makes of them depends on its library and threads.",
    ),
    Claim(
        id="efficientvit/gpu-mobilevit",
        system=SYSTEM,
        title="EfficientViT-M2 runs faster on a GPU than MobileViT-XXS, with higher accuracy",
        source=_source("abstract and table 2"),
        metric="throughput gain (share)",
        claimed=Claimed("5.8× faster", 4.8),
        setting=f"{_GPU} (MobileViT {BATCH // 8}), 224×224 against 256×256",
        rule=Gain(),
        how="modelled",
        run=lambda: _faster("efficientvit_m2", "mobilevit_xxs", 256),
        tolerance=0.1,
    ),
    Claim(
        id="efficientvit/cpu-mobilevit",
        system=SYSTEM,
        title="EfficientViT-M2 runs faster on a CPU than MobileViT-XXS",
        source=_source("abstract and table 2"),
        metric="throughput gain (share)",
        claimed=Claimed("3.7× faster", 2.7),
        setting=f"{_CPU}, 224×224 against 256×256",
        rule=Gain(),
        how="measured here",
        run=lambda: measured_faster(
            timm_model("efficientvit_m2", True), timm_model("mobilevit_xxs", True), (224, 256), batch=16
        ),
    ),
    Claim(
        id="efficientvit/onnx-mobilevit",
        system=SYSTEM,
        title="EfficientViT-M2 runs faster as an ONNX model than MobileViT-XXS",
        source=_source("abstract and table 2"),
        metric="throughput gain (share)",
        claimed=Claimed("7.4× faster", 6.4),
        setting="ONNX Runtime, CPU",
        rule=Gain(),
        note="Needs ONNX Runtime, which this package does not depend on.",
    ),
    *counts(
        SYSTEM,
        _source("table 2"),
        {
            "timm:efficientvit_m0": ("EfficientViT-M0", 2.3e6, 79e6),
            "timm:efficientvit_m2": ("EfficientViT-M2", 4.2e6, 201e6),
            "timm:efficientvit_m5": ("EfficientViT-M5", 12.4e6, 522e6),
        },
        tolerance=(0.022, 0.01),  # the last printed digit of 2.3 M is 2 % of it
        cheap=("timm:efficientvit_m0",),
    ),
    not_tried(
        SYSTEM,
        "imagenet-top1",
        "Top-1 accuracy of EfficientViT-M5",
        _source("table 2"),
        "ImageNet top-1 (share)",
        Claimed("77.1 %", 0.771),
        "ImageNet, 224×224, 300 epochs",
    ),
)
