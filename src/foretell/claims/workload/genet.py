"""GENet: Neural Architecture Design for GPU-Efficient Networks."""

from __future__ import annotations

from foretell.claims.architectures import faster, not_tried
from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import Direction, Gain

SYSTEM = "genet"


def _source(place: str) -> Source:
    return Source(
        "Lin, Chen, Sun, Qian, Li, Jin: Neural Architecture Design for GPU-Efficient Networks",
        2020,
        "arXiv 2006.14090",
        place,
    )


_LARGE = ("timm:gernet_l", {"image_size": 256})
_B3 = ("timm:efficientnet_b3", {"image_size": 300})


def _early_full() -> Obtained:
    """How much less time a full 3×3 takes at high resolution than an inverted bottleneck of its width (share)."""
    from foretell.api import capture, predict

    times = {}
    for kind in ("full", "depthwise"):
        graph = capture(_block(kind), _images(64, 56), precision="fp16", layout="nhwc")
        times[kind] = float(predict(graph, on="v100-sxm2-16gb").time_s)
    return Obtained(
        f"{times['depthwise'] / times['full']:.2f}× as fast ({times['full'] * 1e3:.2f} against"
        f" {times['depthwise'] * 1e3:.2f} ms)",
        times["depthwise"] / times["full"] - 1,
        {f"{kind}_s": t for kind, t in times.items()},
    )


def _images(channels: int, side: int):  # type: ignore[no-untyped-def]
    import torch

    return torch.empty(64, channels, side, side, device="meta")


def _block(kind: str, channels: int = 64, expansion: int = 6):  # type: ignore[no-untyped-def]
    """Two 3×3 convolutions (the paper's XX), or one inverted bottleneck (DW), each with norms and activations."""
    import torch
    from torch import nn

    def conv(inputs: int, outputs: int, kernel: int, groups: int = 1) -> list[nn.Module]:
        made = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)
        return [made, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    wide = expansion * channels
    with torch.device("meta"):
        if kind == "full":
            return nn.Sequential(*conv(channels, channels, 3), *conv(channels, channels, 3)).eval()
        layers = [*conv(channels, wide, 1), *conv(wide, wide, 3, wide), *conv(wide, channels, 1)[:2]]
        return nn.Sequential(*layers).eval()


CLAIMS = (
    *(
        Claim(
            id=f"genet/speed-efficientnet-{slug}",
            system=SYSTEM,
            title="GENet-large runs faster than EfficientNet of as high accuracy",
            source=_source("abstract"),
            metric="throughput gain (share)",
            claimed=Claimed("up to 6.4× faster at 81.3 % top-1", 5.4),
            setting=f"{title}, fp16, batch 64, channels last; GENet-large at 256×256, EfficientNet-B3 (81.1 %) at"
            " 300×300; the abstract does not say which of its GPUs and engines gave 6.4×",
            rule=Gain(),
            how="modelled",
            run=lambda device=device: faster(  # type: ignore[misc]
                _LARGE, _B3, device, batch=64, precision="fp16", layout="nhwc"
            ),
            note="6.4× is the best of several GPUs and inference engines, which fold norms and fuse; ours is one"
            " setting of today's eager PyTorch.",
            tolerance=0.1,
        )
        for slug, device, title in (("v100", "v100-sxm2-16gb", "V100"), ("t4", "t4", "T4"))
    ),
    Claim(
        id="genet/full-convolutions-early",
        system=SYSTEM,
        title="At high resolution a block of full convolutions is faster on a GPU than a depthwise one",
        source=_source("the authors' implementation: full convolutions in low-level stages"),
        metric="throughput gain of two full 3×3 over an inverted bottleneck of expansion 6 (share)",
        claimed=Claimed("full convolutions suit low-level stages"),
        setting="64 channels, 56×56, batch 64, fp16, V100",
        rule=Direction(),
        how="modelled",
        run=_early_full,
        cheap=True,
        tolerance=0.1,
        note="The search over blocks with a latency table (LLR-NAS) is not built.",
    ),
    not_tried(
        SYSTEM,
        "imagenet-top1",
        "Top-1 accuracy of GENet-large",
        _source("abstract"),
        "ImageNet top-1 (share)",
        Claimed("at least 81.3 %", 0.813),
        "ImageNet, 256×256, distilled",
    ),
)
