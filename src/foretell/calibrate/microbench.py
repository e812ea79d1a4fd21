"""`run`: microbenchmarks of the machine at hand: small modules, each timed by itself in several interleaved passes.

A case is a chain of layers on one input. Most are one operation at a size that occurs in networks; chains of small
layers show what dispatching costs when caches are cold, chains with large weights what reading those costs when they
do not stay in cache. What a case does is captured like any workload, so that a cost model fitted on cases sees in a
network the very columns it was fitted on.

Every sample is kept in a file as it comes, so a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from foretell.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from foretell.graph import Graph

SCHEMA = "foretell.microbench/1"
PASSES = 3
_SAMPLE_S = 2e-3  # a sample repeats its case for at least this long, so that the clock's own cost vanishes
_MOST_RUNS = 16
_MOST_SAMPLES = 25
_STALE_S = 86400.0  # samples older than this are of another day's machine
_LIMIT_BYTES = 16 * 2**20

Layer = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A chain of `layers` on an input of `shape`; see `_layer` for what a layer may be."""

    name: str
    shape: tuple[int, ...]
    layers: tuple[Layer, ...]
    channels_last: bool = False
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one run of a case, in one pass: the mean of the pass's repetitions, and how many there were."""

    case: str
    turn: int
    mean_s: float
    count: int


# --- what is measured ---------------------------------------------------------------------------------------------


def _conv(batch: int, cin: int, cout: int, size: int, kernel: int, stride: int = 1, groups: int = 1,
          last: bool = False) -> Case:
    name = f"conv {batch}x{cin}x{size} → {cout}, {kernel}x{kernel}/{stride}" + f", groups {groups}" * (groups > 1)
    layer = ("conv", cin, cout, kernel, stride, groups)
    return Case(name + ", nhwc" * last, (batch, cin, size, size), (layer,), last)


def _one(what: str, *shape: int, args: Sequence[Any] = (), last: bool = False) -> Case:
    name = f"{what} {'x'.join(map(str, shape))}" + (f" {args}" if args else "") + ", nhwc" * last
    return Case(name, shape, ((what, *args),), last)


def _linear(m: int, n: int, k: int) -> Case:
    return Case(f"linear {m}x{k} → {n}", (m, k), (("linear", k, n),))


def _unit(cin: int, cout: int, kernel: int, groups: int = 1) -> tuple[Layer, ...]:
    return ("conv", cin, cout, kernel, 1, groups), ("batch_norm", cout), ("relu_",)


def _bottleneck(wide: int, narrow: int, kernel: int, groups: int = 1) -> tuple[Layer, ...]:
    return (*_unit(wide, narrow, 1), *_unit(narrow, narrow, kernel, groups), *_unit(narrow, wide, 1))


def _perceptron(width: int, hidden: int) -> tuple[Layer, ...]:
    return ("layer_norm", width), ("linear", width, hidden), ("gelu",), ("linear", hidden, width)


def cpu_cases() -> tuple[Case, ...]:
    """What tells how fast a processor is: about 170 cases in fp32, two milliseconds to a tenth of a second each."""
    tiny = (1, 16, 2, 2)
    cases = [
        Case("tiny convolutions, norms, relus", tiny,
             (("conv", 16, 16, 1, 1, 1), ("batch_norm", 16), ("relu_",)) * 24),
        Case("tiny convolutions", tiny, (("conv", 16, 16, 1, 1, 1),) * 24),
        Case("tiny depthwise convolutions", tiny, (("conv", 16, 16, 3, 1, 16),) * 24),
        Case("tiny norms, linears, gelus", (1, 16), (("layer_norm", 16), ("linear", 16, 16), ("gelu",)) * 24),
        Case("tiny linears", (1, 16), (("linear", 16, 16),) * 48),
        Case("tiny relus", tiny, (("relu_",),) * 64),
        Case("tiny sums", tiny, (("add", *tiny),) * 64),
        Case("tiny views", (16, 16), (("views", 64), ("relu_",))),
        Case("tiny batch norms", tiny, (("batch_norm", 16),) * 48),
        Case("tiny layer norms", (1, 16), (("layer_norm", 16),) * 48),
        Case("tiny softmaxes", (4, 16), (("softmax",),) * 48),
        Case("tiny means", (4, 16, 4, 4), (("mean_keep",),) * 16),
        Case("tiny transposed copies", (16, 16), (("transposed_copy",),) * 32),
        Case("tiny concatenations", (1, 4, 4, 4), (("cat",),) * 6),
        Case("tiny gates", (1, 32, 2, 2), (("gate", 32, 8),) * 12),
        Case("gates of eight images", (8, 240, 14, 14), (("gate", 240, 10),) * 4),
        Case("tiny attentions", (1, 2, 4, 16), (("attention",),) * 24),
        Case("tiny batched products", (2, 8, 8), (("bmm",),) * 32),
        Case("wide linears in turn, 8 rows", (8, 1024), (("linear", 1024, 1024),) * 24),
        Case("wide linears in turn, 1 row", (1, 2048), (("linear", 2048, 2048),) * 6),
        Case("wide linears in turn, 196 rows", (196, 1024), (("linear", 1024, 1024),) * 12),
        Case("huge linears in turn, 1 row", (1, 4096), (("linear", 4096, 4096),) * 8),
        Case("huge linears in turn, 8 rows", (8, 4096), (("linear", 4096, 4096),) * 8),
        Case("perceptrons of 196 rows", (196, 320), _perceptron(320, 1280) * 6),
        Case("perceptrons of 784 rows", (784, 128), _perceptron(128, 512) * 6),
        Case("perceptrons of 49 rows", (49, 640), _perceptron(640, 2560) * 4),
        Case("perceptrons of 1600 rows", (1600, 256), _perceptron(256, 1024) * 2),
        Case("deep 3x3 convolutions in turn", (1, 512, 7, 7), (("conv", 512, 512, 3, 1, 1),) * 8),
        Case("deep 1x1 convolutions in turn", (1, 1024, 7, 7), (("conv", 1024, 1024, 1, 1, 1),) * 8),
        Case("bottlenecks of one image", (1, 320, 48, 48), _bottleneck(320, 80, 3) * 3),
        Case("deep bottlenecks of one image", (1, 960, 12, 12), _bottleneck(960, 240, 3) * 4),
        Case("deep bottlenecks of eight images", (8, 960, 12, 12), _bottleneck(960, 240, 3)),
        Case("grouped bottlenecks of one image", (1, 320, 24, 24), _bottleneck(320, 320, 3, 20) * 3),
        Case("inverted blocks of one image", (1, 48, 28, 28), _bottleneck(48, 288, 5, 288) * 3),
        Case("deep inverted blocks of one image", (1, 128, 12, 12), _bottleneck(128, 768, 3, 768) * 4),
        Case("inverted blocks of eight images", (8, 48, 28, 28), _bottleneck(48, 288, 5, 288)),
        Case("blocks of one image", (1, 128, 28, 28), _unit(128, 128, 3) * 4),
        Case("blocks of eight images", (8, 64, 56, 56), _unit(64, 64, 3) * 2),
    ]
    # Pointwise, at sizes from the caches to memory and beyond what the allocator keeps.
    for elements in ((64, 16, 16), (1, 64, 64, 64), (8, 64, 56, 56), (8, 64, 112, 112), (8, 96, 112, 112)):
        cases += [_one(what, *elements) for what in ("relu_", "relu")]
        cases += [_one("add", *elements, args=elements), _one("add_", *elements, args=elements)]
    for elements in ((1, 64, 64, 64), (8, 64, 56, 56), (8, 64, 112, 112)):
        cases += [_one(what, *elements) for what in ("gelu", "silu", "silu_", "sigmoid", "hardswish_", "relu6_")]
    cases += [_one("scale", *s) for s in ((1, 96, 28, 28), (8, 144, 28, 28), (8, 96, 56, 56))]
    cases += [_one("scale_last", *s) for s in ((1, 28, 28, 192), (8, 56, 56, 96))]
    cases += [_one("tanh", 8, 64, 56, 56), _one("div", 8, 64, 56, 56)]
    cases.append(Case("stream", (2**27,), (("relu_",),)))  # 512 MiB: larger than caches
    # Norms, softmax, pooling, reductions, copies.
    for c, size, batch in ((64, 56, 8), (64, 112, 8), (512, 7, 8), (256, 14, 1), (64, 56, 1), (96, 112, 8)):
        cases.append(_one("batch_norm", batch, c, size, size, args=(c,)))
    cases.append(_one("batch_norm", 8, 64, 56, 56, args=(64,), last=True))
    for shape in ((1576, 384), (25088, 96), (196, 768), (394, 192), (3136, 96)):
        cases.append(_one("layer_norm", *shape, args=(shape[-1],)))
    cases += [_one("layer_norm_2d", *s, args=(s[1],)) for s in ((8, 96, 56, 56), (8, 384, 14, 14), (1, 192, 28, 28))]
    cases += [_one("group_norm", 8, 64, 56, 56, args=(64,)), _one("group_norm", 1, 256, 14, 14, args=(256,))]
    cases += [_one("softmax", *s) for s in ((1536, 49, 49), (48, 197, 197), (192, 49, 49), (64, 1000))]
    cases += [_one("max_pool", *s) for s in ((8, 64, 112, 112), (1, 64, 112, 112), (8, 192, 28, 28))]
    cases += [_one("avg_pool", *s) for s in ((8, 128, 56, 56), (1, 256, 28, 28))]
    cases += [_one("mean", *s) for s in ((8, 512, 7, 7), (8, 96, 56, 56), (1, 240, 28, 28), (8, 672, 14, 14))]
    cases += [_one("mean_tokens", *s) for s in ((8, 196, 384), (1, 196, 768))]
    cases += [_one("cat", *s) for s in ((8, 128, 28, 28), (1, 256, 14, 14), (8, 64, 56, 56))]
    cases += [_one("transposed_copy", *s) for s in ((8, 196, 384), (1, 196, 768), (8, 384, 196))]
    cases += [_one("windows", *s) for s in ((8, 56, 56, 96), (1, 28, 28, 192), (8, 14, 14, 384))]
    cases += [_one("heads_copy", *s) for s in ((512, 49, 288), (8, 197, 1152))]
    cases += [_one("roll", *s) for s in ((8, 56, 56, 96), (1, 28, 28, 192))]
    cases += [_one("pad", 8, 56, 56, 96), _one("to_nhwc", 8, 96, 56, 56), _one("to_nhwc", 1, 384, 14, 14)]
    cases += [_one("gather", 169, 12, args=(2401,)), _one("upsample", 8, 64, 28, 28)]
    # Matrix products, (rows, columns, depth).
    for m, n, k in (
        *((1, 1000, 512), (1, 1000, 2048), (8, 1000, 512), (8, 1000, 2048), (8, 768, 768), (49, 3072, 768)),
        *((196, 384, 384), (196, 1536, 384), (196, 384, 1536), (392, 768, 3072), (1576, 384, 384)),
        *((1576, 1536, 384), (1576, 384, 1536), (1576, 576, 192), (3136, 96, 96), (25088, 384, 96)),
        *((25088, 96, 384), (25088, 288, 96), (6272, 192, 768), (1568, 384, 768), (4096, 64, 64), (64, 64, 64)),
        *((256, 256, 256), (1024, 1024, 1024), (1536, 2048, 2048), (16384, 32, 32), (4096, 256, 196)),
    ):
        cases.append(_linear(m, n, k))
    cases += [_one("bmm", *s) for s in ((1536, 49, 49), (48, 197, 197), (192, 49, 49), (12, 197, 197))]
    cases += [_one("bmm_scores", *s) for s in ((1536, 49, 32), (48, 197, 64), (96, 49, 32))]
    heads = ((8, 6, 197, 64), (1, 6, 197, 64), (8, 12, 197, 64), (1, 12, 577, 64), (512, 3, 49, 32))
    cases += [_one("attention", *s) for s in heads]
    # Convolutions: (batch, channels in, out, height, window, stride, groups).
    for batch in (1, 8):
        cases += [
            _conv(batch, 3, 64, 224, 7, 2), _conv(batch, 3, 32, 224, 3, 2), _conv(batch, 3, 384, 224, 16, 16),
            _conv(batch, 3, 96, 224, 4, 4), _conv(batch, 64, 64, 56, 3), _conv(batch, 128, 128, 28, 3),
            _conv(batch, 256, 256, 14, 3), _conv(batch, 512, 512, 7, 3), _conv(batch, 128, 256, 28, 3, 2),
            _conv(batch, 128, 32, 28, 3), _conv(batch, 128, 32, 7, 3), _conv(batch, 24, 24, 56, 3),
            _conv(batch, 64, 256, 56, 1), _conv(batch, 256, 64, 56, 1), _conv(batch, 512, 128, 28, 1),
            _conv(batch, 1024, 256, 14, 1), _conv(batch, 512, 2048, 7, 1), _conv(batch, 256, 512, 56, 1, 2),
            _conv(batch, 24, 144, 56, 1), _conv(batch, 144, 24, 56, 1), _conv(batch, 80, 480, 14, 1),
            _conv(batch, 480, 80, 14, 1), _conv(batch, 160, 960, 7, 1), _conv(batch, 480, 20, 1, 1),
            _conv(batch, 96, 96, 56, 3, 1, 96), _conv(batch, 384, 384, 14, 3, 1, 384),
            _conv(batch, 144, 144, 56, 3, 2, 144), _conv(batch, 240, 240, 28, 5, 1, 240),
            _conv(batch, 1152, 1152, 7, 5, 1, 1152), _conv(batch, 96, 96, 56, 7, 1, 96),
            _conv(batch, 384, 384, 14, 7, 1, 384), _conv(batch, 192, 192, 28, 7, 1, 192, last=True),
            _conv(batch, 96, 192, 56, 2, 2, last=True), _conv(batch, 64, 64, 56, 3, last=True),
            _conv(batch, 96, 96, 56, 3, 1, 96, last=True),
            _conv(batch, 128, 128, 28, 3, 1, 16), _conv(batch, 256, 256, 14, 3, 1, 16),
            _conv(batch, 240, 240, 14, 3, 1, 10), _conv(batch, 128, 128, 28, 3, 1, 32),
            _conv(batch, 512, 512, 14, 3, 1, 16), _conv(batch, 96, 96, 28, 3, 2, 4),
        ]
    cases += [
        _conv(8, 16, 96, 112, 1), _conv(8, 96, 96, 112, 3, 2, 96), _conv(8, 32, 32, 112, 3, 1, 32),
        _conv(8, 64, 64, 28, 5), _conv(8, 32, 16, 112, 1), _conv(8, 32, 64, 112, 3, 2),
    ]
    return tuple(cases)


def gpu_cases() -> tuple[Case, ...]:
    """What tells how fast a GPU is: large and small calls of each kind; matrix products in fp16 and bf16 too."""
    cases = [
        Case("tiny relus", (1, 16, 2, 2), (("relu_",),) * 64),
        Case("tiny linears", (1, 16), (("linear", 16, 16),) * 48),
        Case("tiny convolutions", (1, 16, 2, 2), (("conv", 16, 16, 1, 1, 1),) * 24),
    ]
    for dtype in ("float32", "float16", "bfloat16"):
        for m, n, k in ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 1024, 1024), (512, 4096, 4096), (8, 8192, 8192)):
            cases.append(Case(f"linear {m}x{k} → {n} {dtype}", (m, k), (("linear", k, n),), dtype=dtype))
    for batch in (8, 64):
        cases += [
            _conv(batch, 3, 64, 224, 7, 2), _conv(batch, 64, 64, 56, 3), _conv(batch, 256, 256, 14, 3),
            _conv(batch, 512, 512, 7, 3), _conv(batch, 64, 256, 56, 1), _conv(batch, 1024, 256, 14, 1),
            _conv(batch, 96, 96, 56, 3, 1, 96), _conv(batch, 240, 240, 28, 5, 1, 240),
            _conv(batch, 256, 256, 14, 3, 1, 16), _one("batch_norm", batch, 64, 112, 112, args=(64,)),
            _one("layer_norm", batch * 197, 768, args=(768,)),
            _one("softmax", batch * 12, 197, 197), _one("max_pool", batch, 64, 112, 112),
            _one("gelu", batch, 197, 3072),
            _one("mean", batch, 512, 7, 7), _one("attention", batch, 12, 197, 64), _one("cat", batch, 128, 56, 56),
            _one("windows", batch, 56, 56, 96), _one("bmm", batch * 12, 197, 197),
        ]
    for elements in (2**16, 2**20, 2**24, 2**27):
        cases += [_one("relu", elements), _one("add", elements, args=(elements,))]
    return tuple(cases)


def modules(case: Case, device: str = "cpu") -> tuple[nn.Module, torch.Tensor]:
    """The case as a module (random weights) and its input."""
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(0)
    source = torch.randn(case.shape, generator=generator)
    dtype = getattr(torch, case.dtype)
    net = nn.Sequential(*(_layer(layer) for layer in case.layers)).eval().to(device)
    if dtype != torch.float32:
        net = net.to(dtype)
    source = source.to(device, dtype)
    if case.channels_last:
        source = source.to(memory_format=torch.channels_last)
        net = net.to(memory_format=torch.channels_last)
    return net, source


def _layer(layer: Layer) -> nn.Module:
    """One layer: its kind, then sizes."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Function(nn.Module):
        def __init__(self, function: Callable[[Any], Any]) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: Any) -> Any:
            return self.function(x)

    class Buffered(nn.Module):
        """A function of the input and a constant."""

        def __init__(self, function: Callable[[Any, Any], Any], buffer: torch.Tensor) -> None:
            super().__init__()
            self.function = function
            self.register_buffer("buffer", buffer)

        def forward(self, x: Any) -> Any:
            return self.function(x, self.buffer)

    class Permuted(nn.Module):
        """A norm over the channels of images."""

        def __init__(self, channels: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(channels)

        def forward(self, x: Any) -> Any:
            return self.norm(x.permute(0, 2, 3, 1))

    class Gate(nn.Module):
        """Squeeze and excitation."""

        def __init__(self, channels: int, hidden: int) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(channels, hidden, 1), nn.Conv2d(hidden, channels, 1)
            self.act, self.gate = nn.SiLU(inplace=True), nn.Sigmoid()

        def forward(self, x: Any) -> Any:
            return x * self.gate(self.up(self.act(self.down(x.mean((2, 3), keepdim=True)))))

    kind, *sizes = layer
    if kind == "conv":
        cin, cout, kernel, stride, groups = sizes
        return nn.Conv2d(cin, cout, kernel, stride, (kernel - 1) // 2 if stride < 4 else 0, groups=groups, bias=False)
    if kind == "views":

        def views(x: Any) -> Any:
            for _ in range(sizes[0]):
                x = x.transpose(0, 1)
            return x

        return Function(views)
    made: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(*sizes),
        "batch_norm": lambda: nn.BatchNorm2d(*sizes),
        "layer_norm": lambda: nn.LayerNorm(*sizes),
        "group_norm": lambda: nn.GroupNorm(32, *sizes),
        "gate": lambda: Gate(*sizes),
        "layer_norm_2d": lambda: Permuted(*sizes),
        "add": lambda: Buffered(lambda x, y: x + y, torch.zeros(sizes)),
        "add_": lambda: Buffered(lambda x, y: x.add_(y), torch.zeros(sizes)),
        "gather": lambda: Buffered(lambda x, y: x[y], torch.arange(sizes[0]) % 169),
        "relu": nn.ReLU,
        "relu_": lambda: nn.ReLU(inplace=True),
        "relu6_": lambda: nn.ReLU6(inplace=True),
        "gelu": nn.GELU,
        "silu": nn.SiLU,
        "silu_": lambda: nn.SiLU(inplace=True),
        "sigmoid": nn.Sigmoid,
        "tanh": nn.Tanh,
        "hardswish_": lambda: nn.Hardswish(inplace=True),
        "softmax": lambda: nn.Softmax(-1),
        "max_pool": lambda: nn.MaxPool2d(3, 2, 1),
        "avg_pool": lambda: nn.AvgPool2d(2, 2),
        "upsample": lambda: nn.Upsample(scale_factor=2, mode="nearest"),
    }
    functions: dict[str, Callable[[Any], Any]] = {
        "div": lambda x: x / x,
        "scale": lambda x: x * x[:, :, :1, :1],
        "scale_last": lambda x: x * x[0, 0, 0],
        "mean": lambda x: x.mean((-1, -2)),
        "mean_keep": lambda x: x + x.mean((2, 3), keepdim=True),
        "mean_tokens": lambda x: x.mean(1),
        "cat": lambda x: torch.cat([x, x], 1),
        "transposed_copy": lambda x: x.transpose(-1, -2).contiguous(),
        "windows": lambda x: (
            x.view(x.shape[0], x.shape[1] // 7, 7, x.shape[2] // 7, 7, -1).permute(0, 1, 3, 2, 4, 5).contiguous()
        ),
        "heads_copy": lambda x: (
            x.view(x.shape[0], x.shape[1], 3, -1, 32).permute(2, 0, 3, 1, 4).contiguous()
        ),
        "roll": lambda x: torch.roll(x, (3, 3), (1, 2)),
        "pad": lambda x: functional.pad(x, (0, 0, 0, 7, 0, 7)),
        "to_nhwc": lambda x: x.contiguous(memory_format=torch.channels_last),
        "bmm": lambda x: x @ x,
        "bmm_scores": lambda x: x @ x.transpose(-1, -2),
        "attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
    }
    return made[kind]() if kind in made else Function(functions[kind])


def graph_of(case: Case) -> Graph:
    """What one run of the case does."""
    from foretell.api import capture

    module, source = modules(case)
    return capture(module, source)


# --- measuring ----------------------------------------------------------------------------------------------------


class Clock(Protocol):
    """Times calls on one device."""

    def seconds(self, call: Callable[[], object], runs: int) -> float:
        """Seconds that `runs` calls take together, device work included."""


class HostClock:
    """The processor's own clock: a call has ended when it returns."""

    def seconds(self, call: Callable[[], object], runs: int) -> float:
        """See `Clock`."""
        start = time.perf_counter()
        for _ in range(runs):
            call()
        return time.perf_counter() - start


class CudaClock:
    """CUDA events around the calls, on the current stream; `cuda` is ``torch.cuda`` or a stand-in."""

    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda

    def seconds(self, call: Callable[[], object], runs: int) -> float:
        """See `Clock`."""
        start, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
        self.cuda.synchronize()
        start.record()
        for _ in range(runs):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3  # events count milliseconds


def time_case(case: Case, budget_s: float, clock: Clock, device: str = "cpu") -> tuple[float, int]:
    """(mean seconds of one run, number of samples) within about `budget_s`; three samples at the least.

    A mean, as disturbances are part of what a network's step takes; but samples beyond twice the median are left out.
    """
    import torch

    module, source = modules(case, device)
    with torch.inference_mode():
        given = source.clone()
        module(given)
        one = clock.seconds(lambda: module(given), 1)
        runs = max(1, min(_MOST_RUNS, math.ceil(_SAMPLE_S / max(one, 1e-7))))
        samples: list[float] = []
        until = time.perf_counter() + budget_s
        while len(samples) < 3 or (time.perf_counter() < until and len(samples) < _MOST_SAMPLES):
            given.copy_(source)  # layers that work in place would otherwise run into denormal numbers
            samples.append(clock.seconds(lambda: module(given), runs) / runs)
    middle = sorted(samples)[len(samples) // 2]
    kept = [sample for sample in samples if sample <= 2.0 * middle]
    return sum(kept) / len(kept), len(samples)


def machine(device: str = "cpu") -> dict[str, Any]:
    """What samples are valid for: machine, threads, versions."""
    import torch

    from foretell.hardware.local import local_device

    found = local_device(gpu=device != "cpu", measured=False)
    return {
        "device": found.title,
        "kind": found.kind,
        "multiprocessors": found.multiprocessors,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def run(
    path: Path,
    seconds: float = 90.0,
    *,
    cases: Sequence[Case] | None = None,
    clock: Clock | None = None,
    device: str = "cpu",
    passes: int = PASSES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Sample]:
    """Time the cases in up to `passes` passes within `seconds` and return every sample; `path` keeps them as they come.

    The first pass is finished whatever it takes. Samples of the same machine, versions and day that are in `path`
    already count. KeyboardInterrupt passes through; the file is then complete up to there.
    """
    if cases is None:
        cases = cpu_cases() if device == "cpu" else gpu_cases()
    if clock is None:
        clock = HostClock() if device == "cpu" else CudaClock(_cuda())
    of = machine(device)
    kept = _kept(path, of)
    done = {(s.case, s.turn) for s in kept}
    known = {case.name for case in cases}
    samples = [s for s in kept if s.case in known]
    start = time.perf_counter()
    # The other half goes into building, warming up and long cases.
    slice_s = 0.5 * max(seconds, 0.0) / (passes * len(cases))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        print(json.dumps({"schema": SCHEMA, "at": time.time(), "machine": of}), file=file)
        for sample in kept:  # anew, as the last line may have been cut short
            print(_line(sample), file=file)
        file.flush()
        for turn in range(passes):
            for i, case in enumerate(cases):
                progress(turn * len(cases) + i, passes * len(cases))
                if (case.name, turn) in done:
                    continue
                if turn and time.perf_counter() - start > seconds:
                    return samples
                mean_s, count = time_case(case, slice_s, clock, device)
                sample = Sample(case.name, turn, mean_s, count)
                samples.append(sample)
                print(_line(sample), file=file, flush=True)
    return samples


def _line(sample: Sample) -> str:
    return json.dumps([sample.case, sample.turn, sample.mean_s, sample.count], ensure_ascii=False)


def _cuda() -> Any:
    import torch

    if not torch.cuda.is_available():
        raise InputError("PyTorch sees no CUDA device", "--here", "calibrate the processor instead: --device cpu")
    return torch.cuda


def _kept(path: Path, of: Mapping[str, Any]) -> list[Sample]:
    """Samples of an earlier run on the same machine; none where the file is of another, old or absent."""
    try:
        if path.stat().st_size > _LIMIT_BYTES:
            return []
        lines = path.read_text(encoding="utf-8").splitlines()
        head = json.loads(lines[0])
        if head["schema"] != SCHEMA or head["machine"] != of or time.time() - head["at"] > _STALE_S:
            return []
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []
    samples = []
    for line in lines[1:]:
        try:  # the last line may be cut short
            name, turn, mean_s, count = json.loads(line)
            sample = Sample(str(name), int(turn), float(mean_s), int(count))
        except (ValueError, TypeError, OverflowError, RecursionError):
            break
        if not (0 < sample.mean_s < _STALE_S and sample.turn >= 0 and sample.count > 0):
            break
        samples.append(sample)
    return samples


def medians(samples: Iterable[Sample]) -> dict[str, tuple[float, float]]:
    """Case → (median of its passes in seconds, spread: largest over smallest pass)."""
    by_case: dict[str, list[float]] = {}
    for sample in samples:
        by_case.setdefault(sample.case, []).append(sample.mean_s)
    result = {}
    for case, times in by_case.items():
        times.sort()
        result[case] = (statistics.median(times), times[-1] / times[0])
    return result


def today() -> str:
    """The date, for provenance; `SOURCE_DATE_EPOCH` fixes it."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    moment = float(epoch) if epoch else time.time()
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).date().isoformat()
