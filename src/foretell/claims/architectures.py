"""What claims about architectures share: counts from graphs, and speed, energy and memory predicted on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import Equal

Build = Callable[[], Any]


def estimate(workload: Any, on: str, **settings: Any) -> Any:
    """`foretell.predict` of a workload string, or of a pair of one and the settings that are its own."""
    from foretell.api import predict

    name, own = workload if isinstance(workload, tuple) else (workload, {})
    return predict(name, on=on, **(settings | own))


def named(workload: Any) -> str:
    """The workload string of either form."""
    return workload[0] if isinstance(workload, tuple) else workload


def faster(ours: Any, theirs: Any, on: str, **settings: Any) -> Obtained:
    """How much more of its images a second one architecture is predicted to run than another (share)."""
    a, b = (estimate(w, on, **settings) for w in (ours, theirs))
    ratio = a.throughput_per_s / b.throughput_per_s
    return Obtained(
        f"{ratio:.2f}× as fast ({a.throughput_per_s:.4g} against {b.throughput_per_s:.4g} images/s)",
        ratio - 1,
        {f"{named(w)}_images_per_s": e.throughput_per_s for w, e in ((ours, a), (theirs, b))},
    )


def ratio_of_speeds(ours: Any, theirs: Any, on: str, **settings: Any) -> Obtained:
    """The predicted ratio of throughputs."""
    found = faster(ours, theirs, on, **settings)
    return Obtained(found.text, 1 + found.value, found.details)


def less_energy(ours: Any, theirs: Any, on: str, **settings: Any) -> Obtained:
    """How many times the images an equal energy is predicted to serve, less one."""
    a, b = (estimate(w, on, **settings) for w in (ours, theirs))
    joules = [e.energy_j / next(iter(e.items.values())) for e in (a, b)]
    return Obtained(
        f"{joules[1] / joules[0]:.2f}× the images a joule ({joules[0]:.3g} against {joules[1]:.3g} J an image)",
        joules[1] / joules[0] - 1,
        {f"{named(w)}_j": j for w, j in zip((ours, theirs), joules, strict=True)},
    )


def parameters(workload: str) -> Obtained:
    """Trained numbers of a workload."""
    from foretell.api import capture

    found = capture(workload).parameters
    return Obtained(f"{found / 1e6:.4g} M", float(found))


def macs(workload: str, image_size: int | None = None, flops: int = 1) -> Obtained:
    """Multiply-adds an image; or, with `flops` 2, floating-point operations."""
    from foretell.api import capture

    found = flops * capture(workload, **({} if image_size is None else {"image_size": image_size})).macs()
    return Obtained(f"{found / 1e9:.4g} G", float(found))


def fewer(count: Callable[[str], Obtained], ours: str, theirs: str) -> Obtained:
    """The share of a count that one architecture saves of another's."""
    a, b = count(ours), count(theirs)
    return Obtained(
        f"{a.value / b.value - 1:+.1%} ({a.text} against {b.text})",
        1 - a.value / b.value,
        {ours: a.value, theirs: b.value},
    )


def counts(
    system: str,
    source: Source,
    published: Mapping[str, tuple[str, float | None, float | None]],
    *,
    size: str = "224×224",
    tolerance: tuple[float, float] = (0.01, 0.05),
    cheap: Sequence[str] = (),
    image_sizes: Mapping[str, int] | None = None,
    note: str = "",
) -> tuple[Claim, ...]:
    """Claims of parameters and multiply-adds: by workload, (title, parameters, multiply-adds an image).

    `tolerance` is that of either count, a share; `image_sizes` those of networks not built for 224×224 images.
    """
    sizes = image_sizes or {}
    made = []
    for workload, (title, wanted_parameters, wanted_macs) in published.items():
        slug = workload.partition(":")[2].replace("_", "-")
        if wanted_parameters is not None:
            made.append(
                Claim(
                    id=f"{system}/parameters-{slug}",
                    system=system,
                    title=f"Parameters of {title}",
                    source=source,
                    metric="parameters",
                    claimed=Claimed(f"{wanted_parameters / 1e6:.4g} M", wanted_parameters),
                    setting="with its classifier",
                    rule=Equal(tolerance[0]),
                    how="measured here",
                    run=lambda workload=workload: parameters(workload),  # type: ignore[misc]
                    cheap=workload in cheap,
                )
            )
        if wanted_macs is not None:
            own = sizes.get(workload)
            made.append(
                Claim(
                    id=f"{system}/macs-{slug}",
                    system=system,
                    title=f"Multiply-adds of {title}",
                    source=source,
                    metric="multiply-adds an image",
                    claimed=Claimed(f"{wanted_macs / 1e9:.4g} G", wanted_macs),
                    setting=size if own is None else f"{own}×{own}",
                    rule=Equal(tolerance[1]),
                    how="measured here",
                    run=lambda workload=workload, own=own: macs(workload, own),  # type: ignore[misc]
                    cheap=workload in cheap,
                    note=note,
                )
            )
    return tuple(made)


def not_tried(system: str, id: str, title: str, source: Source, metric: str, claimed: Claimed, setting: str) -> Claim:
    """A claim of accuracy: the architecture is built, its training is beyond this ledger."""
    return Claim(
        id=f"{system}/{id}",
        system=system,
        title=title,
        source=source,
        metric=metric,
        claimed=claimed,
        setting=setting,
        rule=Equal(0.01),
        note="The architecture is reproduced; its accuracy needs the data and the authors' training schedule.",
    )


def measured_faster(ours: Build, theirs: Build, sizes: tuple[int, int], batch: int = 1, repeats: int = 7) -> Obtained:
    """How much faster the first module runs on one core of this machine: medians, runs interleaved (share)."""
    import torch

    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        modules = [build().eval() for build in (ours, theirs)]
        inputs = [torch.randn(batch, 3, size, size) for size in sizes]
        times: list[list[float]] = [[], []]
        with torch.inference_mode():
            for repeat in range(repeats + 2):
                for module, x, seen in zip(modules, inputs, times, strict=True):
                    start = time.perf_counter()
                    module(x)
                    if repeat >= 2:
                        seen.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    a, b = (statistics.median(seen) for seen in times)
    return Obtained(
        f"{b / a:.2f}× as fast ({a * 1e3:.0f} against {b * 1e3:.0f} ms, one core, batch {batch})",
        b / a - 1,
        {"ours_s": a, "theirs_s": b},
    )


def timm_model(name: str, folded: bool = False) -> Build:
    """A timm model without trained weights; `folded`: with its batch norms folded into the convolutions before."""

    def build() -> Any:
        import timm

        model = timm.create_model(name).eval()
        if not folded:
            return model
        from timm.utils import reparameterize_model

        from foretell.transform import fold_batch_norm

        # First as the models themselves offer: EfficientViT's attention reads attributes that a trace does not keep.
        return fold_batch_norm(reparameterize_model(model)).module

    return build


def folded_speed(name: str, on: str, batch: int, size: int, **settings: Any) -> float:
    """Images a second predicted of a timm model with its batch norms folded."""
    import torch

    from foretell.api import capture, predict

    with torch.device("meta"):
        module = timm_model(name, folded=True)()
        graph = capture(module, torch.empty(batch, 3, size, size), **settings)
    return float(predict(graph, on=on).throughput_per_s)
