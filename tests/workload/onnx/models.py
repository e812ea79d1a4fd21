"""Small models of every family, and how they are exported: shared by the tests of the ONNX door."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Example = tuple[nn.Module, tuple[Any, ...]]


def fill(module: nn.Module) -> nn.Module:
    """Parameters that differ from each other: exporters store equal tensors once."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand_like(parameter) + 0.5)
    return module.eval()


def export(module: nn.Module, args: tuple[Any, ...], path: Path, *, dynamo: bool, **settings: Any) -> Path:
    """The module as it is, nothing folded or joined by the exporter unless `settings` say so."""
    if dynamo:
        settings = {"optimize": False, "external_data": False, **settings}
    else:
        settings = {"do_constant_folding": False, "training": torch.onnx.TrainingMode.PRESERVE, **settings}
    logging.getLogger("torch.onnx").setLevel(logging.CRITICAL)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(module, args, str(path), dynamo=dynamo, **settings)
    return path


def _image(size: int = 32, batch: int = 2) -> tuple[Tensor]:
    return (torch.randn(batch, 3, size, size),)


def resnet() -> Example:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=7), _image()


def mobilenet() -> Example:
    from torchvision.models import MobileNetV2

    return MobileNetV2(num_classes=7, width_mult=0.25), _image()


def densenet() -> Example:
    from torchvision.models import DenseNet

    return DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=7), _image()


def efficientnet() -> Example:
    from functools import partial

    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    block = partial(MBConvConfig, width_mult=0.5, depth_mult=0.5)
    stages = [block(1, 3, 1, 16, 16, 1), block(6, 3, 2, 16, 24, 2), block(6, 5, 2, 24, 40, 2)]
    return EfficientNet(stages, dropout=0.2, num_classes=7), _image()


def vit() -> Example:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=7), _image()


def swin() -> Example:
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=7), _image()


def bert() -> Example:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=32, max_position_embeddings=32)
    return _Bare(BertModel(config, add_pooling_layer=False)), (torch.randint(0, 50, (2, 8)),)


class _Bare(nn.Module):
    """A model of transformers that returns a plain tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(input_ids=ids, use_cache=False)[0]


def llama() -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, intermediate_size=32, max_position_embeddings=32)
    return _Bare(LlamaForCausalLM(config)), (torch.randint(0, 50, (2, 8)),)


class Decoder(nn.Module):
    """One decoder layer that reads and returns its cache."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, 4, 4).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        k, v = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, 16))
        return x + self.down(nn.functional.gelu(self.up(x))), k, v


def decoder() -> Example:
    return Decoder(), (torch.randn(2, 1, 16), torch.randn(2, 4, 9, 4), torch.randn(2, 4, 9, 4))


class Head(nn.Module):
    """Two scales, box and class towers, boxes decoded and the best kept: what a one-stage detector runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.down = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.tower = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.GroupNorm(2, 8), nn.ReLU())
        self.boxes, self.classes = nn.Conv2d(8, 4, 3, 1, 1), nn.Conv2d(8, 5, 3, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fine = self.body(x).relu()
        coarse = self.down(fine).relu()
        fine = fine + nn.functional.interpolate(coarse, scale_factor=2.0, mode="nearest")
        boxes, scores = [], []
        for level in (fine, coarse):
            feature = self.tower(level)
            boxes.append(self.boxes(feature).exp().flatten(2).transpose(1, 2))
            scores.append(self.classes(feature).sigmoid().flatten(2).transpose(1, 2))
        best, index = torch.cat(scores, 1).amax(-1).topk(20, 1)
        every = torch.cat(boxes, 1)
        return torch.gather(every, 1, index[..., None].expand(-1, -1, 4)), best


def detection() -> Example:
    return Head(), _image()


def segmentation() -> Example:
    from torchvision.models.segmentation.deeplabv3 import DeepLabHead

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Conv2d(3, 8, 3, 4, 1), DeepLabHead(8, 5, (2, 4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.head(self.body(x).relu())
            return nn.functional.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)

    return Net(), _image()


def lstm() -> Example:
    return nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True), (torch.randn(2, 5, 6),)


def gru() -> Example:
    return nn.GRU(6, 8, 2), (torch.randn(5, 2, 6),)


def grouped() -> Example:
    layers = (nn.Conv2d(3, 12, 3, groups=3, bias=False), nn.ReLU6(), nn.Conv2d(12, 8, 1, groups=4))
    return nn.Sequential(*layers), _image(8)


def transposed() -> Example:
    layers = (nn.ConvTranspose2d(3, 6, 3, 2, 1, 1), nn.LeakyReLU(), nn.ConvTranspose2d(6, 4, 2, 2, groups=2))
    return nn.Sequential(*layers), _image(8)


class Sums(nn.Module):
    """Contractions of several forms."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        fixed = torch.ones(4, 3) + y[0, :, :1].mean()
        z = torch.einsum("bij,bkj->bik", x, y) + torch.einsum("...ij,jk->...ik", x, fixed)
        return torch.einsum("bij,bj->bi", z, y.mean(2))


def einsum() -> Example:
    return Sums(), (torch.randn(2, 5, 4), torch.randn(2, 3, 4))


MODELS: dict[str, Callable[[], Example]] = {
    f.__name__: f
    for f in (resnet, mobilenet, densenet, efficientnet, vit, swin, bert, llama, decoder, detection, segmentation, lstm,
              gru, grouped, transposed, einsum)
}  # fmt: skip
