"""LowFormer: Hardware Efficient Design for Convolutional Transformer Backbones."""

from __future__ import annotations

import statistics

from foretell.claims.architectures import counts, estimate, folded_speed, not_tried
from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import Direction, Equal

SYSTEM = "lowformer"
BATCH = 200


def _source(place: str) -> Source:
    return Source(
        "Nottebaum, Dunnhofer, Micheloni: LowFormer: Hardware Efficient Design for Convolutional Transformer Backbones",
        2025,
        "WACV",
        place,
    )


def _throughput(name: str) -> Obtained:
    found = folded_speed(name, "a40", BATCH, 224, precision="tf32")
    return Obtained(f"{found:.0f} images/s", found)


# Networks of timm within half a point of LowFormer-B1's 79.9 % as their authors report it, or up to 0.6 below.
_RIVALS = ("repvit_m1_1", "mobileone_s4", "efficientvit_b1", "edgenext_small", "fastvit_t12", "resnet50")


def _faster_than_rivals() -> Obtained:
    ours = estimate("timm:lowformer_b1", "a40", batch=BATCH, image_size=224, precision="tf32").throughput_per_s
    theirs = {
        name: estimate(f"timm:{name}", "a40", batch=BATCH, image_size=224, precision="tf32").throughput_per_s
        for name in _RIVALS
    }
    typical = statistics.median(theirs.values())
    return Obtained(
        f"{ours / typical:.2f}× the median of {len(theirs)} ({ours:.0f} against {typical:.0f} images/s; the fastest"
        f" {max(theirs.values()):.0f})",
        ours / typical - 1,
        {"lowformer_b1": ours, **theirs},
    )


CLAIMS = (
    Claim(
        id="lowformer/faster-than-rivals",
        system=SYSTEM,
        title="LowFormer-B1 runs faster than backbones of similar accuracy",
        source=_source("abstract and table 1"),
        metric="throughput gain over the median rival (share)",
        claimed=Claimed("a remarkable speed-up at similar or better accuracy"),
        setting=f"A40, batch {BATCH}, 224×224, TF32 convolutions; the rivals are timm's of 79 to 80.4 % top-1",
        rule=Direction(),
        how="modelled",
        run=_faster_than_rivals,
    ),
    *(
        Claim(
            id=f"lowformer/throughput-{name.partition('_')[2]}",
            system=SYSTEM,
            title=f"Throughput of {title}",
            source=_source("table 1; the authors' implementation, model zoo"),
            metric="images a second",
            claimed=Claimed(f"{published}", float(published)),
            setting=f"A40, batch {BATCH}, 224×224, TorchScript; ours with batch norms folded, TF32 convolutions, eager",
            rule=Equal(0.15),
            how="modelled",
            run=lambda name=name: _throughput(name),  # type: ignore[misc]
            note="All four come out 37 to 42 % too fast, in the published ratio to each other (B0 is 5.1 times B3). The"
            " model prices TF32 and fp32 within 1 % of each other here. The authors' precision is not stated.",
            tolerance=0.1,
        )
        for name, title, published in (
            ("lowformer_b0", "LowFormer-B0", 5988),
            ("lowformer_b1", "LowFormer-B1", 4237),
            ("lowformer_b15", "LowFormer-B1.5", 2739),
            ("lowformer_b3", "LowFormer-B3", 1162),
        )
    ),
    *counts(
        SYSTEM,
        _source("table 1; the authors' implementation, model zoo"),
        {
            "timm:lowformer_b0": ("LowFormer-B0", 14.1e6, 0.944e9),
            "timm:lowformer_b1": ("LowFormer-B1", 17.9e6, 1.410e9),
            "timm:lowformer_b15": ("LowFormer-B1.5", 33.9e6, 2.573e9),
            "timm:lowformer_b3": ("LowFormer-B3", 57.1e6, 6.098e9),
        },
        tolerance=(0.005, 0.005),
        cheap=("timm:lowformer_b0",),
    ),
    not_tried(
        SYSTEM,
        "imagenet-top1",
        "Top-1 accuracy of LowFormer-B3",
        _source("table 1"),
        "ImageNet top-1 (share)",
        Claimed("83.6 %", 0.836),
        "ImageNet",
    ),
)
