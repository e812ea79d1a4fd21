"""EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks."""

from __future__ import annotations

from foretell.claims.architectures import counts, fewer, macs, measured_faster, not_tried, parameters, timm_model
from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import Equal, Gain

SYSTEM = "efficientnet"


def _source(place: str) -> Source:
    return Source(
        "Tan, Le: EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", 2019, "ICML", place
    )


_GPIPE_PARAMETERS = 557e6  # Huang et al., GPipe, NeurIPS 2019: AmoebaNet-B (18, 512)


def _smaller() -> Obtained:
    found = parameters("timm:efficientnet_b7").value
    return Obtained(
        f"{_GPIPE_PARAMETERS / found:.2f}× ({found / 1e6:.1f} against 557 M)", _GPIPE_PARAMETERS / found, {"b7": found}
    )


def _scaled_resnet50() -> Obtained:
    """Multiply-adds of ResNet-50 scaled by the compound coefficient 2, about four times the work."""
    import torch

    from foretell.api import capture
    from foretell.workload.zoo.design import Scaling, compound
    from foretell.workload.zoo.efficientnet import image_size, scaled_resnet50

    found = []
    for scaling in (Scaling(), compound(2)):
        side = image_size(scaling)
        with torch.device("meta"):
            found.append(capture(scaled_resnet50(scaling).eval(), torch.empty(1, 3, side, side)).macs())
    ratio = found[1] / found[0]
    return Obtained(
        f"{found[1] / 1e9:.1f} G, {ratio:.2f}× the baseline's {found[0] / 1e9:.1f} G",
        float(found[1]),
        {"baseline": float(found[0]), "ratio": ratio},
    )


CLAIMS = (
    Claim(
        id="efficientnet/smaller-than-gpipe",
        system=SYSTEM,
        title="EfficientNet-B7 is smaller than GPipe's AmoebaNet, with higher accuracy",
        source=_source("abstract and table 2"),
        metric="ratio of parameters",
        claimed=Claimed("8.4× smaller (66 against 557 M)", 8.4),
        setting="557 M as GPipe publishes it",
        rule=Equal(0.01),
        how="measured here",
        run=_smaller,
        cheap=True,
    ),
    Claim(
        id="efficientnet/faster-than-gpipe",
        system=SYSTEM,
        title="EfficientNet-B7 runs faster than GPipe's AmoebaNet",
        source=_source("abstract and table 4"),
        metric="speed-up on a CPU, less one",
        claimed=Claimed("6.1× faster (3.1 against 19.0 s)", 5.1),
        setting="one core of a Xeon E5-2690, batch 1, fp32",
        rule=Gain(),
        note="AmoebaNet-B (18, 512) is of no library, and its multiply-adds are not published; see the pair of B1.",
    ),
    Claim(
        id="efficientnet/faster-than-resnet152",
        system=SYSTEM,
        title="EfficientNet-B1 runs faster than ResNet-152 at higher accuracy",
        source=_source("table 4"),
        metric="speed-up on a CPU, less one",
        claimed=Claimed("5.7× faster (0.098 against 0.554 s)", 4.7),
        setting="one core of a CPU, batch 1, fp32, 240×240 against 224×224; the paper's a Xeon E5-2690",
        rule=Gain(),
        how="measured here",
        run=lambda: measured_faster(timm_model("efficientnet_b1"), timm_model("resnet152"), (240, 224)),
    ),
    Claim(
        id="efficientnet/b0-parameters-resnet50",
        system=SYSTEM,
        title="EfficientNet-B0 has fewer parameters than ResNet-50",
        source=_source("table 2"),
        metric="ratio of parameters",
        claimed=Claimed("4.9× fewer (5.3 against 26 M)", 4.9),
        setting="1000 classes",
        rule=Equal(0.02),
        how="measured here",
        run=lambda: _ratio(fewer(parameters, "timm:efficientnet_b0", "timm:resnet50")),
        cheap=True,
    ),
    Claim(
        id="efficientnet/b0-macs-resnet50",
        system=SYSTEM,
        title="EfficientNet-B0 does less work than ResNet-50",
        source=_source("table 2"),
        metric="ratio of multiply-adds",
        claimed=Claimed("11× fewer (0.39 against 4.1 G)", 11.0),
        setting="224×224",
        rule=Equal(0.05),
        how="measured here",
        run=lambda: _ratio(fewer(macs, "timm:efficientnet_b0", "timm:resnet50")),
        cheap=True,
    ),
    Claim(
        id="efficientnet/compound-resnet50",
        system=SYSTEM,
        title="Work of ResNet-50 after compound scaling",
        source=_source("table 3"),
        metric="multiply-adds an image",
        claimed=Claimed("16.7 G", 16.7e9),
        setting="coefficient 2 with the constants of EfficientNet (the paper does not print ResNet-50's): 296×296",
        rule=Equal(0.05),
        how="measured here",
        run=_scaled_resnet50,
    ),
    *counts(
        SYSTEM,
        _source("table 2"),
        {
            "timm:efficientnet_b0": ("EfficientNet-B0", 5.3e6, 0.39e9),
            "timm:efficientnet_b3": ("EfficientNet-B3", 12e6, 1.8e9),
            "timm:efficientnet_b5": ("EfficientNet-B5", 30e6, 9.9e9),
            "timm:efficientnet_b7": ("EfficientNet-B7", 66e6, 37e9),
        },
        tolerance=(0.02, 0.04),
        image_sizes={"timm:efficientnet_b3": 300, "timm:efficientnet_b5": 456, "timm:efficientnet_b7": 600},
        cheap=("timm:efficientnet_b0",),
        note="The paper's figures are up to 5 % below the convolutions' own from B4 on; it does not say how it counts.",
    ),
    not_tried(
        SYSTEM,
        "imagenet-top1",
        "Top-1 accuracy of EfficientNet-B7",
        _source("abstract and table 2"),
        "ImageNet top-1 (share)",
        Claimed("84.3 %", 0.843),
        "ImageNet, 600×600",
    ),
    not_tried(
        SYSTEM,
        "transfer",
        "EfficientNets transfer with an order of magnitude fewer parameters",
        _source("abstract and table 5"),
        "CIFAR-100 accuracy (share)",
        Claimed("91.7 % on CIFAR-100, 98.8 % on Flowers", 0.917),
        "fine-tuned from ImageNet",
    ),
)


def _ratio(saved: Obtained) -> Obtained:
    ratio = 1 / (1 - saved.value)
    return Obtained(f"{ratio:.2f}× fewer", ratio, saved.details)
