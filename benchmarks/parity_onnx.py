"""Full-size models exported to ONNX beside the same models captured: parameters, multiply-adds, predicted time.

    python benchmarks/parity_onnx.py [--on a100-sxm4-80gb] [--models NAME,NAME] [--dynamo]

Each model is built with random weights, captured, exported by ``torch.onnx.export`` without the exporter's own folding,
and read back; times are predicted on one device for both graphs. Exit code 1 where parameters or multiply-adds differ.
Needs ``foretell[zoo,onnx]``, with ``--dynamo`` onnxscript too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import foretell
from foretell.workload.onnx import graph
from foretell.workload.options import options

Example = tuple[nn.Module, tuple[Any, ...]]

VISION = {
    "resnet50": 224, "resnext50_32x4d": 224, "mobilenet_v3_large": 224, "densenet121": 224, "efficientnet_b0": 224,
    "regnet_y_400mf": 224, "convnext_tiny": 224, "vit_b_16": 224, "swin_t": 224, "shufflenet_v2_x1_0": 224,
    "deeplabv3_resnet50": 256,
}  # fmt: skip


class First(nn.Module):
    """A model whose output is a mapping, reduced to its first tensor."""

    def __init__(self, inner: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.inner, self.settings = inner, settings

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x, **self.settings)
        return made if isinstance(made, Tensor) else next(iter(made.values()))


def vision(name: str, size: int, batch: int) -> Example:
    """A torchvision model on square images."""
    from torchvision import models

    return First(models.get_model(name, weights=None, **({"weights_backbone": None} if "deep" in name else {}))), (
        torch.randn(batch, 3, size, size),
    )


def bert(batch: int) -> Example:
    """BERT-base on 128 tokens."""
    from transformers import BertConfig, BertModel

    ids = torch.randint(0, 100, (batch, 128))
    return First(BertModel(BertConfig(), add_pooling_layer=False), use_cache=False), (ids,)


def lstm(batch: int) -> Example:
    """Two layers of 1024."""
    return nn.LSTM(1024, 1024, 2), (torch.randn(64, batch, 1024),)


def models(batch: int) -> dict[str, Callable[[], Example]]:
    """All by name."""
    every: dict[str, Callable[[], Example]] = {
        name: lambda name=name, size=size: vision(name, size, batch) for name, size in VISION.items()  # type: ignore[misc]
    }
    return every | {"bert-base": lambda: bert(batch), "lstm-1024": lambda: lstm(batch)}


def distinct(module: nn.Module) -> nn.Module:
    """Parameters that differ from each other: exporters store equal tensors once."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(0.5, 1.5)
    return module.eval()


def export(module: nn.Module, args: tuple[Any, ...], path: Path, dynamo: bool) -> None:
    """Nothing folded by the exporter."""
    how: dict[str, Any] = {"dynamo": True, "optimize": False} if dynamo else {
        "dynamo": False, "do_constant_folding": False, "training": torch.onnx.TrainingMode.PRESERVE}
    logging.getLogger("torch.onnx").setLevel(logging.CRITICAL)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(module, args, str(path), **how)


def main() -> int:
    """One line a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="a100-sxm4-80gb")
    parser.add_argument("--models", default="")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dynamo", action="store_true")
    given = parser.parse_args()
    every = models(given.batch)
    worse = 0
    heads = ("M param.", "same", "GMAC", "same", "ops", "of", "ms", "of", "ratio", "read s")
    print(f"{'model':20}" + "".join(f"{h:>{w}}" for h, w in zip(heads, (9, 6, 9, 6, 6, 6, 9, 9, 7, 8), strict=True)))
    for name in given.models.split(",") if given.models else every:
        module, args = every[name]()
        distinct(module)
        want = foretell.capture(module, *args)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "m.onnx"
            export(module, args, path, given.dynamo)
            before = time.perf_counter()
            got = graph(str(path), options())
            seconds = time.perf_counter() - before
        here, there = (foretell.predict(g, on=given.on).time_s for g in (got, want))
        macs = [(g.macs(), g.macs("fvcore")) for g in (got, want)]
        same = got.parameters == want.parameters, macs[0] == macs[1]
        worse += not all(same)
        counts = [sum(op.kind != "view" for op in g.ops) for g in (got, want)]
        print(f"{name:20}{got.parameters / 1e6:9.2f}{same[0]!s:>6}{got.macs() / 1e9:9.2f}{same[1]!s:>6}{counts[0]:6}"
              f"{counts[1]:6}{here * 1e3:9.3f}{there * 1e3:9.3f}{here / there:7.3f}{seconds:8.2f}", flush=True)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
