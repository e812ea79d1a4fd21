"""GhostSR: Learning Ghost Features for Efficient Image Super-Resolution."""

from __future__ import annotations

from foretell.claims.architectures import estimate, fewer, macs, not_tried, parameters
from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import Equal, Gain

SYSTEM = "ghost-sr"


def _source(place: str) -> Source:
    return Source(
        "Nie, Han, Liu, Liu, Wang: GhostSR: Learning Ghost Features for Efficient Image Super-Resolution",
        2022,
        "TMLR",
        place,
    )


def _saved_time(device: str) -> Obtained:
    a, b = (estimate(w, device).time_s for w in ("zoo:ghost_edsr_x2", "zoo:edsr_x2"))
    return Obtained(f"{a / b - 1:+.1%} ({a * 1e3:.0f} against {b * 1e3:.0f} ms)", 1 - a / b, {"ours_s": a, "edsr_s": b})


CLAIMS = (
    Claim(
        id="ghost-sr/time",
        system=SYSTEM,
        title="EDSR ×2 with half its features shifted takes less time",
        source=_source("abstract"),
        metric="inference time saved (share)",
        claimed=Claimed("42 % less GPU latency", 0.42),
        setting="a result of 1280×720, batch 1, fp32; the GPU is not in the abstract, ours a V100",
        rule=Gain(),
        how="modelled",
        run=lambda: _saved_time("v100-sxm2-16gb"),
        note="A shift is a padded copy and a join of slices, of stock PyTorch; the authors wrote a kernel for it.",
        cheap=True,
        tolerance=0.1,
    ),
    Claim(
        id="ghost-sr/parameters",
        system=SYSTEM,
        title="EDSR ×2 with half its features shifted has fewer parameters",
        source=_source("abstract"),
        metric="parameters saved (share)",
        claimed=Claimed("46 % fewer", 0.46),
        setting="half of the features of the residual blocks' convolutions are ghosts",
        rule=Equal(0.02),
        how="measured here",
        run=lambda: fewer(parameters, "zoo:ghost_edsr_x2", "zoo:edsr_x2"),
        cheap=True,
    ),
    Claim(
        id="ghost-sr/macs",
        system=SYSTEM,
        title="EDSR ×2 with half its features shifted does less work",
        source=_source("abstract"),
        metric="multiply-adds saved (share)",
        claimed=Claimed("46 % fewer FLOPs", 0.46),
        setting="a result of 1280×720",
        rule=Equal(0.02),
        how="measured here",
        run=lambda: fewer(macs, "zoo:ghost_edsr_x2", "zoo:edsr_x2"),
        cheap=True,
    ),
    not_tried(
        SYSTEM,
        "psnr",
        "The quality is basically that of EDSR",
        _source("abstract"),
        "PSNR lost (dB)",
        Claimed("basically lossless"),
        "Set5, Set14, B100, Urban100 at ×2; trained on DIV2K",
    ),
)
