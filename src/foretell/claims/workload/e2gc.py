"""E2GC: Energy-efficient Group Convolution in Deep Neural Networks."""

from __future__ import annotations

from foretell.claims.architectures import less_energy, not_tried
from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import Direction, Gain

SYSTEM = "e2gc"
DEVICE = "p100-pcie-16gb"
BATCH = 32


def _source(place: str) -> Source:
    return Source(
        "Jha, Saini, Nag, Mittal: E2GC: Energy-efficient Group Convolution in Deep Neural Networks",
        2020,
        "VLSI Design",
        place,
    )


def _spread(network: str) -> tuple[float, float]:
    """Largest over smallest arithmetic intensity of a network's grouped convolutions (FLOP an element)."""
    from foretell.api import capture

    graph = capture(network)
    found = []
    for op in graph.ops:
        if op.kind != "convolution" or int(op.attrs.get("groups", 1)) == 1:
            continue
        x, weight, y = (graph.tensors[i] for i in (*op.inputs[:2], op.outputs[0]))
        found.append(2 * y.elements * weight.elements / weight.shape[0] / (x.elements + weight.elements + y.elements))
    return max(found), min(found)


def _steadier() -> Obtained:
    """How much less intensity varies through ResNeXt-50 with constant group width: ratio of the ranges, less one."""
    (ours_high, ours_low), (high, low) = _spread("zoo:resnext50_e2gc8"), _spread("zoo:resnext50_groups32")
    gain = (high / low) / (ours_high / ours_low) - 1
    return Obtained(
        f"{ours_low:.0f} to {ours_high:.0f} FLOP an element, against {low:.0f} to {high:.0f}",
        gain,
        {"ours_low": ours_low, "ours_high": ours_high, "low": low, "high": high},
    )


_NOTE = (
    "The pair is that of nearest multiply-adds: group width 8 against 32 groups. The model prices a grouped convolution"
    " by its traffic and its multiply-adds, which the pair shares but for the order of its layers; what P100's kernels"
    " of 2019 did at each width is not in it."
)

CLAIMS = (
    Claim(
        id="e2gc/energy-mobilenet-v1",
        system=SYSTEM,
        title="MobileNet-V1 of constant group width takes less energy than one of a constant number of groups",
        source=_source("abstract"),
        metric="images an equal energy serves, less one (share)",
        claimed=Claimed("10.8 % more energy-efficient", 0.108),
        setting=f"P100, 224×224, fp32, comparable multiply-adds (690 against 685 M); batch not stated, ours {BATCH}",
        rule=Gain(),
        how="modelled",
        run=lambda: less_energy("zoo:mobilenet_v1_e2gc8", "zoo:mobilenet_v1_groups32", DEVICE, batch=BATCH),
        note=_NOTE,
        tolerance=0.1,
    ),
    Claim(
        id="e2gc/energy-resnext50",
        system=SYSTEM,
        title="ResNeXt-50 of constant group width takes less energy than one of 32 groups",
        source=_source("abstract"),
        metric="images an equal energy serves, less one (share)",
        claimed=Claimed("4.73 % more energy-efficient", 0.0473),
        setting=f"P100, 224×224, fp32, comparable multiply-adds (4.20 against 4.23 G); batch not stated, ours {BATCH}",
        rule=Gain(),
        how="modelled",
        run=lambda: less_energy("zoo:resnext50_e2gc8", "zoo:resnext50_groups32", DEVICE, batch=BATCH),
        note=_NOTE,
        tolerance=0.1,
    ),
    Claim(
        id="e2gc/balance",
        system=SYSTEM,
        title="A constant group width balances computation and data reuse throughout a network",
        source=_source("abstract"),
        metric="range of arithmetic intensity: the usual over ours, less one (share)",
        claimed=Claimed("a constant number of groups creates an imbalance"),
        setting="grouped convolutions of ResNeXt-50: group width 8 against 32 groups, 224×224, batch 1",
        rule=Direction(),
        how="measured here",
        run=_steadier,
        cheap=True,
    ),
    not_tried(
        SYSTEM,
        "accuracy",
        "Accuracy can be tuned by the group width",
        _source("abstract"),
        "ImageNet and Food-101 top-1 (share)",
        Claimed("a trade-off between generalization and representational power"),
        "ImageNet-1K and Food-101",
    ),
)
