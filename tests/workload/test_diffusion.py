"""Stable Diffusion 1's three models, built from their published sizes, against published counts.

The counts are those of https://github.com/Nota-NetsPresso/BK-SDM/issues/53 (SD 1.4, 512×512, batch 1), made with thop:
it sees modules, so not the two products of attention, and counts 4 for every element that a LayerNorm takes.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import foretell
from foretell.graph import Graph
from foretell.workload.resolve import on_meta

pytest.importorskip("diffusers", reason="diffusers is not installed: pip install 'foretell[diffusion]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'foretell[zoo]'")

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "diffusion.md"

PUBLISHED = {  # name: parameters, MACs as thop counts
    "text": (123_060_480, 6_545_882_112),
    "denoiser": (859_520_964, 338_749_194_240),
    "decoder": (49_490_179, 1_240_079_532_032),
}
# The published decoder leaves out the 1×1 convolution of the latent's 4 channels before it.
BEFORE_DECODER = (4 * 4 + 4, 4 * 4 * 64 * 64)


@pytest.fixture(scope="module")
def models() -> SimpleNamespace:
    """The page's own models, so that what it says of them is held."""
    found = re.search(r"^```python\n# sd\.py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found
    names: dict[str, Any] = {"__name__": "sd"}
    exec(compile(found[1], str(PAGE), "exec"), names)
    return SimpleNamespace(**names)


def one(models: SimpleNamespace, name: str) -> Graph:
    module, *inputs = on_meta(getattr(models, name))
    return foretell.capture(module, *(tensor[:1] for tensor in inputs))


def parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def of_kind(graph: Graph, kind: str) -> int:
    return sum(op.macs for op in graph.ops if op.kind == kind)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_macs_are_the_published(models: SimpleNamespace, name: str) -> None:
    weights, macs = PUBLISHED[name]
    if name == "decoder":
        weights, macs = weights + BEFORE_DECODER[0], macs + BEFORE_DECODER[1]
    module, *_ = on_meta(getattr(models, name))
    assert parameters(module) == weights
    graph = one(models, name)
    norms = [op for op in graph.ops if op.name == "aten.native_layer_norm.default"]
    normalised = sum(math.prod(graph.tensors[op.outputs[0]].shape) for op in norms)
    assert graph.macs() - of_kind(graph, "attention") + 4 * normalised == macs


def test_the_denoisers_attention_is_its_two_products(models: SimpleNamespace) -> None:
    graph = one(models, "denoiser")
    side, text = models.SIDE, models.TOKENS
    products = 0
    for level, (width, blocks) in enumerate([(320, 5), (640, 5), (1280, 5), (1280, 1)]):
        pixels = (side >> level) ** 2
        products += blocks * 2 * pixels * width * (pixels + text)  # of pixels among themselves, and to the text
    assert of_kind(graph, "attention") == products
    assert round(100 * products / graph.macs()) == 16  # as the page says


def test_the_whole_autoencoder_has_the_published_parameters() -> None:
    from diffusers import AutoencoderKL

    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    with torch.device("meta"):
        whole = AutoencoderKL(block_out_channels=(128, 256, 512, 512), layers_per_block=2, **kinds)
    assert parameters(whole) == 83_653_863


def test_guidance_doubles_the_denoisers_arithmetic(models: SimpleNamespace) -> None:
    guided = foretell.capture(*on_meta(models.denoiser))
    assert guided.macs() == 2 * one(models, "denoiser").macs()
