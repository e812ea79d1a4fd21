"""RepVGG: Making VGG-style ConvNets Great Again."""

from __future__ import annotations

from typing import Any

from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import AtMost, Direction, Equal, Gain

SYSTEM = "repvgg"
BATCH = 128


def _source(place: str) -> Source:
    return Source(
        "Ding, Zhang, Ma, Han, Ding, Sun: RepVGG: Making VGG-style ConvNets Great Again", 2021, "CVPR", place
    )


def _plain(name: str) -> Any:
    """The converted model, without weights."""
    import torch

    from foretell.transform import reparametrize
    from foretell.workload import zoo

    with torch.device("meta"):
        return reparametrize(zoo.build(name)).module


def _folded(name: str) -> Any:
    """A torchvision model with its batch norms folded, as the authors' baselines have."""
    import torch
    import torchvision

    from foretell.transform import fold_batch_norm

    with torch.device("meta"):
        return fold_batch_norm(torchvision.models.get_model(name)).module


def _graph(module: Any, batch: int = 1) -> Any:
    import torch

    from foretell.api import capture

    return capture(module, torch.empty(batch, 3, 224, 224, device="meta"))


def _faster(name: str, baseline: str) -> Obtained:
    from foretell.api import predict

    ours, theirs = (
        predict(_graph(m, BATCH), on="gtx-1080-ti").throughput_per_s for m in (_plain(name), _folded(baseline))
    )
    return Obtained(
        f"{ours / theirs - 1:+.0%} ({ours:.0f} against {theirs:.0f} images/s)",
        ours / theirs - 1,
        {f"{name}_images_per_s": ours, f"{baseline}_images_per_s": theirs},
    )


def _parameters(name: str) -> Obtained:
    found = sum(p.numel() for p in _plain(name).parameters())
    return Obtained(f"{found / 1e6:.2f} M", float(found))


def _macs(name: str) -> Obtained:
    found = _graph(_plain(name)).macs()
    return Obtained(f"{found / 1e9:.2f} G", float(found))


def _exact() -> Obtained:
    """Largest difference of the outputs, as a share of the largest output; nothing at its initial value."""
    import torch

    from foretell.transform import reparametrize
    from foretell.workload import zoo

    torch.manual_seed(0)
    model = zoo.build("repvgg_a0").eval()
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            for tensor, low, high in (
                (layer.running_mean, -0.5, 0.5),
                (layer.running_var, 0.5, 2.0),
                (layer.weight, 0.5, 1.5),
                (layer.bias, -0.3, 0.3),
            ):
                assert tensor is not None
                torch.nn.init.uniform_(tensor, low, high)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(x)
        error = float((reparametrize(model).module(x) - expected).abs().max() / expected.abs().max())
    return Obtained(f"{error:.1e} of the largest output, float32", error)


def _speedup() -> Obtained:
    """Median time of the two forms on this machine's CPU, runs interleaved."""
    import statistics
    import time

    import torch

    from foretell.transform import reparametrize
    from foretell.workload import zoo

    torch.manual_seed(0)
    model = zoo.build("repvgg_b0").eval()
    forms = {"branches": model, "plain": reparametrize(model).module}
    x = torch.randn(4, 3, 224, 224)
    times: dict[str, list[float]] = {form: [] for form in forms}
    with torch.inference_mode():
        for repeat in range(9):
            for form, module in forms.items():
                start = time.perf_counter()
                module(x)
                if repeat >= 2:
                    times[form].append(time.perf_counter() - start)
    medians = {form: statistics.median(t) for form, t in times.items()}
    gain = medians["branches"] / medians["plain"] - 1
    return Obtained(
        f"{gain:+.0%} ({medians['branches'] * 1e3:.0f} ms → {medians['plain'] * 1e3:.0f} ms, CPU, batch 4)",
        gain,
        {f"{form}_s": t for form, t in medians.items()} | {"threads": float(torch.get_num_threads())},
    )


_SPEED = f"GTX 1080 Ti, batch {BATCH}, fp32, 224×224; batch norms folded in both"
_NO_WINOGRAD = (
    "The roofline prices a 3×3 convolution by its multiply-adds. cuDNN runs those of stride 1 by Winograd's algorithm,"
    " with 4/9 of the multiplications, and that is most of the gain (the paper's section 2.4)."
)

CLAIMS = (
    Claim(
        id="repvgg/speed-resnet50",
        system=SYSTEM,
        title="RepVGG-A2 runs faster than ResNet-50, with higher accuracy",
        source=_source("abstract and section 4.1"),
        metric="throughput gain (share)",
        claimed=Claimed("83 % faster", 0.83),
        setting=_SPEED,
        rule=Gain(),
        how="modelled",
        run=lambda: _faster("repvgg_a2", "resnet50"),
        note=_NO_WINOGRAD,
        cheap=True,
        tolerance=0.1,
    ),
    Claim(
        id="repvgg/speed-resnet101",
        system=SYSTEM,
        title="RepVGG-B1g4 runs faster than ResNet-101, with higher accuracy",
        source=_source("abstract and section 4.1"),
        metric="throughput gain (share)",
        claimed=Claimed("101 % faster", 1.01),
        setting=_SPEED,
        rule=Gain(),
        how="modelled",
        run=lambda: _faster("repvgg_b1g4", "resnet101"),
        note=_NO_WINOGRAD,
        cheap=True,
        tolerance=0.1,
    ),
    Claim(
        id="repvgg/imagenet-top1",
        system=SYSTEM,
        title="First plain model above 80 % top-1",
        source=_source("abstract"),
        metric="ImageNet top-1 (share)",
        claimed=Claimed("over 80 %", 0.80),
        setting="RepVGG-B3, 200 epochs on ImageNet",
        rule=Equal(0.01),
        note="Needs ImageNet and 200 epochs on 8 GPUs.",
    ),
    Claim(
        id="repvgg/equivalence",
        system=SYSTEM,
        title="The converted model computes what the trained one does",
        source=_source("section 3.3"),
        metric="largest difference of outputs (share of the largest)",
        claimed=Claimed("equivalent (held here to 1e-5 in float32)", 1e-5),
        setting="evaluation mode; random weights and statistics",
        rule=AtMost(),
        how="measured here",
        run=_exact,
        cheap=True,
        tolerance=10.0,  # rounding differs from machine to machine; the rule is what counts
    ),
    Claim(
        id="repvgg/conversion-speedup",
        system=SYSTEM,
        title="Removing the branches makes inference faster",
        source=_source("section 4.2"),
        metric="throughput gain (share)",
        claimed=Claimed("significant speed-up"),
        setting="RepVGG-B0; the paper's on a GTX 1080 Ti at batch 128, ours on a CPU at batch 4",
        rule=Direction(),
        how="measured here",
        run=_speedup,
        note="benchmarks/repvgg_reparam.py measures more sizes.",
    ),
    *(
        claim
        for name, title, parameters, macs in (
            ("a2", "RepVGG-A2", 25.49e6, 5.1e9),
            ("b1g4", "RepVGG-B1g4", 36.12e6, 7.3e9),
            ("b3", "RepVGG-B3", 110.96e6, 26.2e9),
        )
        for claim in (
            Claim(
                id=f"repvgg/parameters-{name}",
                system=SYSTEM,
                title=f"Parameters of {title}, converted",
                source=_source("tables 4 and 5"),
                metric="parameters",
                claimed=Claimed(f"{parameters / 1e6:.2f} M", parameters),
                setting="1000 classes",
                rule=Equal(0.001),
                how="measured here",
                run=lambda name=name: _parameters(f"repvgg_{name}"),  # type: ignore[misc]
                cheap=name != "b3",
            ),
            Claim(
                id=f"repvgg/macs-{name}",
                system=SYSTEM,
                title=f"Multiply-adds of {title}, converted",
                source=_source("tables 4 and 5"),
                metric="multiply-adds an image",
                claimed=Claimed(f"{macs / 1e9:.1f} G", macs),
                setting="224×224",
                rule=Equal(0.01),
                how="measured here",
                run=lambda name=name: _macs(f"repvgg_{name}"),  # type: ignore[misc]
                cheap=name != "b3",
            ),
        )
    ),
)
