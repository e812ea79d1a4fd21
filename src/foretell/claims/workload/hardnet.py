"""HarDNet: A Low Memory Traffic Network."""

from __future__ import annotations

from typing import Any

from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import Direction, Equal, Gain

SYSTEM = "hardnet"


def _source(place: str) -> Source:
    return Source("Chao, Kao, Ruan, Huang, Lin: HarDNet: A Low Memory Traffic Network", 2019, "ICCV", place)


def _saved_time(ours: str, theirs: str, on: str, **settings: Any) -> Obtained:
    from foretell.api import predict

    a, b = (predict(workload, on=on, **settings).time_s for workload in (ours, theirs))
    return Obtained(
        f"{a / b - 1:+.0%} ({a * 1e3:.1f} against {b * 1e3:.1f} ms)",
        1 - a / b,
        {f"{ours}_s": a, f"{theirs}_s": b},
    )


def _saved_traffic(ours: str, theirs: str) -> Obtained:
    from foretell.api import capture
    from foretell.graph.traffic import convolution_io_bytes

    a, b = (convolution_io_bytes(capture(workload)) for workload in (ours, theirs))
    return Obtained(
        f"{a / b - 1:+.0%} ({a / 1e6:.0f} against {b / 1e6:.0f} MB)",
        1 - a / b,
        {f"{ours}_bytes": a, f"{theirs}_bytes": b},
    )


def _parameters(workload: str) -> Obtained:
    from foretell.api import capture

    found = capture(workload).parameters
    return Obtained(f"{found / 1e6:.2f} M", float(found))


def _macs(workload: str) -> Obtained:
    from foretell.api import capture

    found = capture(workload).macs()
    return Obtained(f"{found / 1e9:.2f} G", float(found))


def _traffic(workload: str) -> Obtained:
    from foretell.api import capture
    from foretell.graph.traffic import convolution_io_elements

    found = convolution_io_elements(capture(workload))
    return Obtained(f"{found / 1e6:.2f} M elements", float(found))


# Inference time (ms) of table 4: GTX 1080, PyTorch 1.1.0, 1024×1024. MobileNetV2 1.4x, of no library, is left out.
_TABLE_4_MS = {
    "zoo:hardnet39ds": 17.8,
    "torchvision:mobilenet_v2": 23.7,
    "zoo:hardnet68ds": 31.7,
    "torchvision:resnet18": 13.0,
    "torchvision:squeezenet1_0": 19.6,
    "zoo:hardnet68": 32.6,
    "zoo:hardnet96s": 36.4,
    "zoo:hardnet117s": 57.6,
    "zoo:hardnet138s": 70.5,
    "torchvision:resnet50": 46.5,
    "torchvision:densenet121": 51.5,
    "torchvision:vgg16": 79.3,
    "torchvision:resnet101": 76.9,
    "torchvision:densenet201": 83.9,
    "torchvision:resnet152": 109.7,
}


def _published_correlation() -> Obtained:
    """How much better our traffic follows the published GPU times than our multiply-adds do (Pearson's r)."""
    from foretell.api import capture

    graphs = [capture(workload, image_size=224) for workload in _TABLE_4_MS]
    return _correlated(graphs, list(_TABLE_4_MS.values()), f"GTX 1080, {len(graphs)} networks", {})


def _correlated(graphs: list[Any], times: list[float], where: str, details: dict[str, float | str]) -> Obtained:
    import statistics

    from foretell.graph.traffic import convolution_io_bytes

    by_traffic = statistics.correlation(times, [float(convolution_io_bytes(graph)) for graph in graphs])
    by_macs = statistics.correlation(times, [float(graph.macs()) for graph in graphs])
    return Obtained(
        f"r = {by_traffic:.2f} with traffic, {by_macs:.2f} with multiply-adds ({where})",
        by_traffic - by_macs,
        {"r_traffic": by_traffic, "r_macs": by_macs, **details},
    )


# The models whose time is measured against their traffic: the paper's families, at the size of its table 4.
_MEASURED = (
    "zoo:hardnet39ds",
    "zoo:hardnet68",
    "zoo:hardnet96s",
    "torchvision:resnet18",
    "torchvision:resnet50",
    "torchvision:densenet121",
    "torchvision:mobilenet_v2",
)
_SIDE = 512


def _measured_correlation() -> Obtained:
    """The same with times measured on this machine's CPU: medians of three, runs of the networks interleaved."""
    import statistics
    import time

    import torch
    import torchvision

    from foretell.api import capture
    from foretell.workload import zoo

    torch.manual_seed(0)
    x = torch.randn(1, 3, _SIDE, _SIDE)
    modules = []
    for workload in _MEASURED:
        source, _, name = workload.partition(":")
        modules.append((zoo.build(name) if source == "zoo" else torchvision.models.get_model(name)).eval())
    runs: list[list[float]] = [[] for _ in modules]
    with torch.inference_mode():
        for repeat in range(4):
            for module, seen in zip(modules, runs, strict=True):
                start = time.perf_counter()
                module(x)
                if repeat:
                    seen.append(time.perf_counter() - start)
    times = [statistics.median(seen) for seen in runs]
    graphs = [capture(workload, image_size=_SIDE) for workload in _MEASURED]
    details: dict[str, float | str] = {f"{w}_s": t for w, t in zip(_MEASURED, times, strict=True)}
    return _correlated(graphs, times, f"CPU, {len(modules)} networks", details)


_NO_WINOGRAD = (
    "The roofline prices a 3×3 convolution by its multiply-adds; Winograd's algorithm, which cuDNN uses for those of"
    " stride 1, favours HarDNet, which has little else, over networks of 1×1 convolutions."
)

CLAIMS = (
    Claim(
        id="hardnet/time-fc-densenet103",
        system=SYSTEM,
        title="FC-HarDNet-84 takes less time than FC-DenseNet-103 at higher accuracy",
        source=_source("abstract and section 4.1"),
        metric="inference time saved (share)",
        claimed=Claimed("35 % less", 0.35),
        setting="Titan V, PyTorch 1.0.1, CamVid at 352×480, batch 1, fp32",
        rule=Gain(),
        how="modelled",
        run=lambda: _saved_time("zoo:fc_hardnet84", "zoo:fc_densenet103", "titan-v"),
        note=_NO_WINOGRAD,
        cheap=True,
        tolerance=0.1,
    ),
    Claim(
        id="hardnet/time-densenet264",
        system=SYSTEM,
        title="HarDNet-138s takes less time than DenseNet-264 at the same accuracy",
        source=_source("abstract, figure 5c and section 6"),
        metric="inference time saved (share)",
        claimed=Claimed("36 % less", 0.36),
        setting="Titan V, Torch7, fp32; image size and batch are not stated, ours: 1024×1024 as in table 4, batch 1",
        rule=Gain(),
        how="modelled",
        run=lambda: _saved_time("zoo:hardnet138s", "zoo:densenet264", "titan-v", image_size=1024),
        note="The conclusion says 35 %. " + _NO_WINOGRAD,
        tolerance=0.1,
    ),
    Claim(
        id="hardnet/time-resnet50",
        system=SYSTEM,
        title="HarDNet-68 takes less time than ResNet-50 at similar accuracy",
        source=_source("abstract and table 4"),
        metric="inference time saved (share)",
        claimed=Claimed("30 % less (32.6 against 46.5 ms)", 0.30),
        setting="GTX 1080, PyTorch 1.1.0, 1024×1024, batch 1, fp32",
        rule=Gain(),
        how="modelled",
        run=lambda: _saved_time("zoo:hardnet68", "torchvision:resnet50", "gtx-1080", image_size=1024),
        note=_NO_WINOGRAD,
        cheap=True,
        tolerance=0.1,
    ),
    Claim(
        id="hardnet/time-resnet152",
        system=SYSTEM,
        title="HarDNet-138s takes less time than ResNet-152 at the same accuracy",
        source=_source("abstract and table 4"),
        metric="inference time saved (share)",
        claimed=Claimed("32 % less (table 4: 70.5 against 109.7 ms, 36 %)", 0.32),
        setting="GTX 1080, PyTorch 1.1.0, 1024×1024, batch 1, fp32",
        rule=Gain(),
        how="modelled",
        run=lambda: _saved_time("zoo:hardnet138s", "torchvision:resnet152", "gtx-1080", image_size=1024),
        tolerance=0.1,
    ),
    Claim(
        id="hardnet/time-ssd-vgg",
        system=SYSTEM,
        title="SSD512 takes less time on HarDNet-68 than on VGG-16",
        source=_source("abstract and section 4.3"),
        metric="inference time saved (share)",
        claimed=Claimed("45 % less", 0.45),
        setting="device and batch are not stated; ours: GTX 1080, 512×512, batch 1, fp32, without suppression",
        rule=Gain(),
        how="modelled",
        run=lambda: _saved_time("zoo:ssd512_hardnet68", "zoo:ssd512_vgg16", "gtx-1080"),
        cheap=True,
        tolerance=0.1,
    ),
    Claim(
        id="hardnet/traffic-fc-densenet103",
        system=SYSTEM,
        title="FC-HarDNet-84 moves less through its convolutions than FC-DenseNet-103",
        source=_source("section 4.1 and table 2"),
        metric="convolutional input/output saved (share)",
        claimed=Claimed("41 % less (1267 against 2150 MB)", 0.41),
        setting="352×480, fp32",
        rule=Equal(0.01),
        how="measured here",
        run=lambda: _saved_traffic("zoo:fc_hardnet84", "zoo:fc_densenet103"),
        cheap=True,
    ),
    Claim(
        id="hardnet/traffic-follows-gpu-time",
        system=SYSTEM,
        title="Inference time on a GPU follows memory traffic more than multiply-adds",
        source=_source("abstract and section 4.1, figure 4b"),
        metric="correlation with time: traffic's less that of multiply-adds",
        claimed=Claimed("much more"),
        setting="published times of table 4 (GTX 1080, 1024×1024); traffic and multiply-adds from our graphs",
        rule=Direction(),
        how="public data",
        run=_published_correlation,
    ),
    Claim(
        id="hardnet/traffic-follows-cpu-time",
        system=SYSTEM,
        title="Inference time on a CPU follows memory traffic more than multiply-adds",
        source=_source("abstract; the paper measures GPUs and simulates ARM's systolic arrays"),
        metric="correlation with time: traffic's less that of multiply-adds",
        claimed=Claimed("much more"),
        setting=f"{_SIDE}×{_SIDE}, batch 1, fp32, {len(_MEASURED)} networks",
        rule=Direction(),
        how="measured here",
        run=_measured_correlation,
        note="A CPU core has far fewer FLOP a byte of bandwidth than a GPU: there, multiply-adds decide.",
    ),
    Claim(
        id="hardnet/imagenet-top1",
        system=SYSTEM,
        title="Top-1 accuracy of HarDNet-68",
        source=_source("table 4"),
        metric="ImageNet top-1 (share)",
        claimed=Claimed("76.2 %", 0.762),
        setting="ImageNet, 224×224",
        rule=Equal(0.01),
        note="Needs ImageNet and the authors' training schedule.",
    ),
    *(
        claim
        for name, title, parameters, macs, traffic in (
            ("hardnet39ds", "HarDNet-39DS", 3.5e6, 0.44e9, None),
            ("hardnet68", "HarDNet-68", 17.6e6, 4.3e9, 11.5e6),
            ("hardnet138s", "HarDNet-138s", 35.5e6, 6.7e9, 19.6e6),
        )
        for claim in (
            Claim(
                id=f"hardnet/parameters-{name}",
                system=SYSTEM,
                title=f"Parameters of {title}",
                source=_source("table 4"),
                metric="parameters",
                claimed=Claimed(f"{parameters / 1e6:.1f} M", parameters),
                setting="1000 classes",
                rule=Equal(0.005),
                how="measured here",
                run=lambda name=name: _parameters(f"zoo:{name}"),  # type: ignore[misc]
                cheap=True,
            ),
            Claim(
                id=f"hardnet/macs-{name}",
                system=SYSTEM,
                title=f"Multiply-adds of {title}",
                source=_source("table 4"),
                metric="multiply-adds an image",
                claimed=Claimed(f"{macs / 1e9:.2g} G", macs),
                setting="224×224",
                rule=Equal(0.025),
                how="measured here",
                run=lambda name=name: _macs(f"zoo:{name}"),  # type: ignore[misc]
                note="The paper's counter takes in some of what is neither convolution nor matrix product.",
                cheap=True,
            ),
            *(
                (
                    Claim(
                        id=f"hardnet/traffic-{name}",
                        system=SYSTEM,
                        title=f"Convolutional input/output of {title}",
                        source=_source("table 4"),
                        metric="elements an image",
                        claimed=Claimed(f"{traffic / 1e6:.1f} M", traffic),
                        setting="224×224",
                        rule=Equal(0.005),
                        how="measured here",
                        run=lambda name=name: _traffic(f"zoo:{name}"),  # type: ignore[misc]
                        cheap=True,
                    ),
                )
                if traffic is not None
                else ()
            ),
        )
    ),
)
