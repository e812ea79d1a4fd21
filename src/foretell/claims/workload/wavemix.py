"""WaveMix: A Resource-efficient Neural Network for Image Analysis."""

from __future__ import annotations

import statistics

from foretell.claims.architectures import counts, estimate, not_tried
from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import AtMost, Direction, Equal

SYSTEM = "wavemix"


def _source(place: str) -> Source:
    return Source(
        "Jeevan, Viswanathan, Anandu, Sethi: WaveMix: A Resource-efficient Neural Network for Image Analysis",
        2022,
        "arXiv 2205.14375",
        place,
    )


def _lossless() -> Obtained:
    """The largest error of the inverse transform of random images, relative to the largest value."""
    import torch

    from foretell.workload.zoo.wavemix import HaarTransform

    torch.manual_seed(0)
    x = torch.randn(4, 16, 64, 64)
    transform = HaarTransform(16)
    error = float((transform.inverse(*transform(x)) - x).abs().max() / x.abs().max())
    return Obtained(f"{error:.1e} of the largest value, float32, no parameters", error)


def _small(width: int, depth: int, channels: int, upsample: str) -> Obtained:
    import torch

    from foretell.workload.zoo.wavemix import wavemix_classifier

    with torch.device("meta"):
        model = wavemix_classifier(width, depth, num_classes=10, channels=channels, stride=1, upsample=upsample)
    found = sum(p.numel() for p in model.parameters())
    return Obtained(f"{found:,}", float(found))


# Of 21 to 31 M parameters (WaveMix-192/16: 28 M): convolutional, transformer, and other token mixers.
_RIVALS = ("resnet50", "convnext_tiny", "deit_small_patch16_224", "poolformer_s36", "convmixer_768_32")
_BATCH = 32


def _memory() -> Obtained:
    """GPU memory a training step saves against the median rival of as many parameters (share)."""
    settings = {"batch": _BATCH, "image_size": 224, "train": True}
    used = {
        workload: float(estimate(workload, "a100-sxm4-80gb", **settings).memory.peak_bytes)
        for workload in ("zoo:wavemix_192_16", *(f"timm:{name}" for name in _RIVALS))
    }
    ours, *theirs = used.values()
    typical = statistics.median(theirs)
    return Obtained(
        f"{ours / typical - 1:+.0%} ({ours / 1e9:.1f} against {typical / 1e9:.1f} GB, the median of {len(theirs)})",
        1 - ours / typical,
        used,
    )


CLAIMS = (
    Claim(
        id="wavemix/less-memory",
        system=SYSTEM,
        title="Training takes less GPU memory than that of other networks of as many parameters",
        source=_source("abstract"),
        metric="memory saved against the median rival (share)",
        claimed=Claimed("requires lesser GPU RAM when controlled for the number of parameters"),
        setting=f"WaveMix-192/16 of 3 levels against five of 21 to 31 M parameters; 224×224, batch {_BATCH}, fp32, SGD",
        rule=Direction(),
        how="modelled",
        run=_memory,
        note="Its ImageNet stem of two 3×3 convolutions keeps the full resolution, and its blocks a quarter of it"
        " throughout, where the others halve theirs from stage to stage.",
    ),
    Claim(
        id="wavemix/lossless",
        system=SYSTEM,
        title="The wavelet transform reorganises without loss and without parameters",
        source=_source("abstract"),
        metric="error of the inverse (share of the largest value)",
        claimed=Claimed("lossless (held here to 1e-6 in float32)", 1e-6),
        setting="random values, one level of the Haar transform",
        rule=AtMost(),
        how="measured here",
        run=_lossless,
        cheap=True,
        tolerance=10.0,  # rounding differs from machine to machine; the rule is what counts
    ),
    *counts(
        SYSTEM,
        _source("table 1"),
        {
            "zoo:wavemix_256_16_seg4": ("the Cityscapes network (82.7 mIoU)", 63e6, None),
            "zoo:wavemix_192_16": ("WaveMix-192/16 of 3 levels (Places-365, ImageNet)", 28e6, None),
        },
        tolerance=(0.01, 0.05),
        cheap=("zoo:wavemix_192_16",),
    ),
    *(
        Claim(
            id=f"wavemix/parameters-lite-{width}-{depth}",
            system=SYSTEM,
            title=f"Parameters of WaveMix-Lite-{width}/{depth}",
            source=_source("the authors' implementation, table of parameter efficiency"),
            metric="parameters",
            claimed=Claimed(f"{published:,} ({what})", float(published)),
            setting="10 classes",
            rule=Equal(0.0),
            how="measured here",
            run=lambda w=width, d=depth, c=channels, u=upsample: _small(w, d, c, u),  # type: ignore[misc]
            cheap=True,
        )
        for width, depth, channels, upsample, published, what in (
            (8, 10, 1, "nearest", 3566, "99 % on MNIST"),
            (8, 5, 1, "deconvolution", 7156, "90 % on Fashion MNIST"),
            (32, 7, 3, "nearest", 37058, "80 % on CIFAR-10"),
            (64, 6, 3, "deconvolution", 520106, "90 % on CIFAR-10"),
        )
    ),
    not_tried(
        SYSTEM,
        "cityscapes",
        "Segmentation of Cityscapes",
        _source("abstract and table 1"),
        "mIoU (share)",
        Claimed("82.7 %", 0.827),
        "Cityscapes validation set, single scale",
    ),
    not_tried(
        SYSTEM,
        "places365",
        "Classification of Places-365, EMNIST and iNAT-mini",
        _source("abstract and table 1"),
        "Places-365 top-1 (share)",
        Claimed("56.45 %", 0.5645),
        "Places-365",
    ),
)
