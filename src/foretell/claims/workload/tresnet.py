"""TResNet: High Performance GPU-Dedicated Architecture."""

from __future__ import annotations

from foretell.claims.architectures import counts, not_tried, ratio_of_speeds
from foretell.claims.claim import Claim, Claimed, Source
from foretell.claims.rules import Equal

SYSTEM = "tresnet"
DEVICE = "v100-sxm2-16gb"


def _source(place: str) -> Source:
    return Source(
        "Ridnik, Lawen, Noy, Ben Baruch, Sharir, Friedman: TResNet: High Performance GPU-Dedicated Architecture",
        2021,
        "WACV",
        place,
    )


_PLAIN_NORM = (
    "timm's TResNet normalises and activates in two steps and keeps both tensors; the paper's does it in place, so"
    " that larger batches fit and less is moved."
)

CLAIMS = (
    *(
        Claim(
            id=f"tresnet/{phase}-{ours.replace('_', '-')}-{theirs.replace('_', '-')}",
            system=SYSTEM,
            title=f"{phase.capitalize()} throughput: {title}",
            source=_source("the authors' implementation, main article results"),
            metric="ratio of throughputs",
            claimed=Claimed(f"{a} against {b} images/s", a / b),
            setting=f"V100, mixed precision, channels last, batch {batch} in both; the paper takes 90 % of the largest",
            rule=Equal(0.1),
            how="modelled",
            run=lambda o=ours, t=theirs, p=phase, n=batch, s=sizes: ratio_of_speeds(  # type: ignore[misc]
                (f"timm:{o}", {"image_size": s[0]}),
                (f"timm:{t}", {"image_size": s[1]}),
                DEVICE,
                batch=n,
                train=p == "training",
                precision="amp",
                layout="nhwc",
            ),
            note=_PLAIN_NORM,
            tolerance=0.1,
        )
        for phase, ours, theirs, title, a, b, batch, sizes in (
            ("inference", "tresnet_m", "resnet50", "TResNet-M as fast as ResNet-50", 2930, 2830, 256, (224, 224)),
            ("training", "tresnet_m", "resnet50", "TResNet-M nearly as fast as ResNet-50", 730, 805, 128, (224, 224)),
            ("inference", "tresnet_l", "tresnet_m", "TResNet-L against TResNet-M", 1390, 2930, 256, (224, 224)),
            ("inference", "tresnet_xl", "tresnet_m", "TResNet-XL against TResNet-M", 1060, 2930, 256, (224, 224)),
            ("training", "tresnet_m", "efficientnet_b1", "TResNet-M above EfficientNet-B1", 730, 440, 128, (224, 240)),
        )
    ),
    *counts(
        SYSTEM,
        _source("the authors' implementation, main article results"),
        {"timm:tresnet_m": ("TResNet-M", None, 5.5e9)},
        tolerance=(0.01, 0.05),
        cheap=("timm:tresnet_m",),
    ),
    Claim(
        id="tresnet/largest-batch",
        system=SYSTEM,
        title="TResNet-M trains with larger batches than ResNet-50",
        source=_source("the authors' implementation, main article results"),
        metric="largest batch",
        claimed=Claimed("512 against 288", 512.0),
        setting="V100 (16 GB), mixed precision",
        rule=Equal(0.1),
        note="Rests on in-place activated batch norm, which timm's TResNet no longer has.",
    ),
    not_tried(
        SYSTEM,
        "imagenet-top1",
        "Top-1 accuracy of TResNet-M",
        _source("abstract"),
        "ImageNet top-1 (share)",
        Claimed("80.8 %", 0.808),
        "ImageNet, 224×224",
    ),
    not_tried(
        SYSTEM,
        "transfer",
        "Transfer to other data sets",
        _source("abstract"),
        "Stanford Cars accuracy (share)",
        Claimed("96.0 % on Stanford Cars, 99.0 % on CIFAR-10, 91.5 % on CIFAR-100, 99.1 % on Oxford Flowers", 0.96),
        "fine-tuned from ImageNet",
    ),
)
