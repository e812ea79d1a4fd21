"""An exported program read as data equals a capture of the module it was made from."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, export, save
from typer.testing import CliRunner

from foretell import capture
from foretell.cli.app import app
from foretell.errors import InputError, UnknownNameError
from foretell.graph import Graph
from foretell.report import graph_settings
from foretell.workload import pt2
from foretell.workload.capture import capture_module
from foretell.workload.options import options


class Cnn(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 16, 1),
            nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 10),
        )


class Patches(nn.Module):
    """A small vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 8, 8)
        self.token, self.place = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.zeros(1, 17, 16))
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True, activation="gelu"), 2,
            enable_nested_tensor=False,
        )
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.place
        return self.head(self.norm(self.blocks(x))[:, 0])


class Windows(nn.Module):
    """Shifted windows with a relative position bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.zeros(49, 4))
        self.merge = nn.Linear(64, 32, bias=False)
        self.register_buffer("index", torch.zeros(256, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, h, w, c = x.shape
        y = torch.roll(self.norm(x), (-2, -2), (1, 2))
        y = y.view(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
        q, k, v = self.qkv(y).reshape(-1, 16, 3, 4, c // 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * 0.5) @ k.transpose(-2, -1)
        scores = scores + self.bias[self.index].view(16, 16, 4).permute(2, 0, 1).contiguous().unsqueeze(0)
        y = self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, 16, c))
        y = y.view(b, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        x = x + torch.roll(y, (2, 2), (1, 2))
        return self.merge(torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1))


class Encoder(nn.Module):
    """Tokens with a padding mask; the embedding is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(ids), src_key_padding_mask=mask))


class Decoder(nn.Module):
    """One token against cached keys and values; grouped queries, a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.norm, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 64), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.norm(x)
        b, t, c = h.shape
        q = self.q(h).view(b, t, 4, 4).transpose(1, 2)
        k, v = self.kv(h).view(b, t, 2, 8).transpose(1, 2).chunk(2, -1)
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        y = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        gate, up = self.up(self.norm(x)).split(32, -1)
        return x + self.down(F.silu(gate) * up), keys, values


class Detector(nn.Module):
    """Two levels, boxes of the best scores."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.more = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1)
        self.scores, self.boxes = nn.Conv2d(16, 12, 1), nn.Conv2d(16, 12, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fine = F.silu(self.body(x))
        coarse = F.silu(self.more(fine))
        fine = fine + F.interpolate(coarse, scale_factor=2)
        scores, boxes = (
            torch.cat([head(f).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4) for f in (fine, coarse)], 1)
            for head in (self.scores, self.boxes)
        )
        best, label = scores.softmax(-1)[..., 1:].max(-1)
        kept = best.topk(10)[1]
        return boxes.gather(1, kept.unsqueeze(-1).expand(-1, -1, 4)).sigmoid(), label


class Recurrent(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(layer.hidden_size * (2 if layer.bidirectional else 1), 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0])


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm, self.rnn = nn.GRUCell(8, 4), nn.LSTMCell(4, 4), nn.RNNCell(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(self.lstm(self.gru(x))[0])


class Upsampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.ConvTranspose2d(3, 8, 4, 2, 1), nn.InstanceNorm2d(8, affine=True)
        self.second = nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1, groups=2)
        self.group, self.same = nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, padding="same", bias=False)
        self.act, self.even = nn.PReLU(), nn.Conv2d(4, 2, 4, padding="same")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.group(self.second(F.leaky_relu(self.norm(self.first(x)), 0.2)))
        y = self.act(self.same(F.interpolate(y, scale_factor=2, mode="bilinear")))
        return self.even(F.pad(y, (1, 1, 1, 1), mode="reflect"))


class Einsums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.h = nn.Parameter(torch.zeros(8, 2, 4)), nn.Parameter(torch.zeros(5, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = torch.einsum("bnd,dhe->bhne", x, self.w)
        scores = torch.einsum("bhie,bhje->bhij", q, q).softmax(-1)
        out = torch.einsum("bhij,bhje->bihe", scores, q)
        return torch.einsum("bihe,ie->bh", out, self.h), torch.einsum("...d->...", x), torch.einsum("i,j->ij", x[0, 0],
                                                                                                    x[0, 1])


class Everything(nn.Module):
    """Ops that PyTorch makes of others, and views, without weights but one."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(7, 5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            self.w @ x, x.transpose(1, 2).contiguous(), x.std(1), x.var((1, 2)), x.norm(dim=1), F.normalize(x),
            F.cosine_similarity(x, x, dim=2), x.square().mean(), torch.where(x > 0, x, 0.0), F.one_hot(x.argmax(-1), 8),
            x.repeat_interleave(2, 1), F.pad(x, (1, 1)), x.movedim(0, 1) + 1, x.mT @ x, x.unflatten(2, (2, 4)) + 1,
            torch.stack(x.unbind(1)), x.tile(2, 1, 1), torch.hstack([x, x]), F.avg_pool1d(x, 2), F.max_pool1d(x, 2),
            F.adaptive_avg_pool1d(x, 1), F.softsign(x), F.logsigmoid(x), x.half().float(), x.to(torch.float64),
            x.flatten(), (x > 0) & (x < 1), torch.outer(x[0, 0], x[0, 1]), x.cumsum(1), x.triu(), x.diff(),
            torch.meshgrid(x[0, 0], x[0, 1], indexing="ij")[0] + 1, x.expand(3, -1, -1, -1) + 1,
            F.cross_entropy(x[:, 0], x[:, 0, 0].long()), F.rms_norm(x, (8,)), torch.arange(4), x.narrow(1, 0, 2) + 1,
            x.tensor_split(2, 1)[0] + 1, x[..., None] + 1, x[:, [0, 2]], torch.tensor(2.0) * x, 1 - x, 1 / x, x // 2,
            x**2,
            F.linear(x[:1, :1], self.w.new_zeros(3, 8), x[0, 0, :3]), x.transpose(1, 2).softmax(1),
            x.mT @ self.w.t(), (x.mT + 1).log_softmax(-1).mT.reshape(10, 8), F.layer_norm(x.mT, (5,)),
            x.reshape(8, 10).t().reshape(10, 8) + 1, x.swapaxes(1, 2) + 1, x.view_as(x.reshape(10, 8).view(2, 5, 8)),
        )


def _images(n: int = 2, size: int = 32) -> torch.Tensor:
    return torch.zeros(n, 3, size, size)


_IDS = torch.zeros(2, 8, dtype=torch.long)
_TOKENS = torch.zeros(2, 5, 8)
MODELS: dict[str, tuple[Any, tuple[torch.Tensor, ...]]] = {
    "cnn": (Cnn, (_images(),)),
    "patches": (Patches, (_images(),)),
    "windows": (Windows, (torch.zeros(2, 8, 8, 16),)),
    "encoder": (Encoder, (_IDS, _IDS.bool())),
    "decoder": (Decoder, (torch.zeros(2, 1, 16), torch.zeros(2, 2, 7, 4), torch.zeros(2, 2, 7, 4))),
    "detector": (Detector, (_images(),)),
    "gru": (lambda: Recurrent(nn.GRU(8, 4, 2, batch_first=True, bidirectional=True)), (_TOKENS,)),
    "lstm": (lambda: Recurrent(nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True)), (_TOKENS,)),
    "rnn": (lambda: Recurrent(nn.RNN(8, 4, 2)), (_TOKENS,)),
    "plain": (lambda: Recurrent(nn.LSTM(8, 4, bias=False)), (_TOKENS,)),
    "relu": (lambda: Recurrent(nn.RNN(8, 4, 2, "relu", bias=False, bidirectional=True)), (_TOKENS,)),
    "cells": (Cells, (torch.zeros(3, 8),)),
    "upsampler": (Upsampler, (_images(2, 8),)),
    "einsums": (Einsums, (_TOKENS,)),
    "everything": (Everything, (_TOKENS,)),
}
# Programs whose batch is left open, and the other one they are then read at.
OPEN = {"cnn": ({0: Dim("n")},), "encoder": ({0: Dim("n")}, {0: Dim("n")}), "upsampler": ({0: Dim("n")},)}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Writes a model's program once; gives its path."""
    folder = tmp_path_factory.mktemp("pt2")

    def path(name: str, dynamic: bool = False, decomposed: bool = False) -> Path:
        file = folder / f"{name}{'-open' if dynamic else ''}{'-core' if decomposed else ''}.pt2"
        if not file.exists():
            make, inputs = MODELS[name]
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about what export does to recurrent layers
                program = export(make().eval(), inputs, dynamic_shapes=OPEN[name] if dynamic else None)
            save(program.run_decompositions() if decomposed else program, file)
        return file

    return path


def _captured(name: str, batch: int | None = None) -> Graph:
    make, inputs = MODELS[name]
    if batch is not None:
        inputs = tuple(x.new_zeros((batch, *x.shape[1:])) for x in inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # padding="same" may copy
        return capture_module(make().eval(), inputs, options=options())


def _work(graph: Graph) -> list[tuple[Any, ...]]:
    """What each op that is no view is, reads and writes; and where."""

    def shapes(tensors: tuple[int, ...]) -> list[tuple[Any, ...]]:
        return [(graph.tensors[t].shape, graph.tensors[t].strides, graph.tensors[t].dtype) for t in tensors]

    return [
        (op.name, op.kind, shapes(op.inputs), shapes(op.outputs), dict(op.attrs), op.macs, op.gemm, op.module,
         op.bytes_read, op.bytes_written, op.counted)
        for op in graph.ops
        if op.kind != "view"
    ]


def _peak(graph: Graph) -> int:
    change = Counter[int]()
    for storage in graph.storages:
        change[max(storage.born, 0)] += storage.nbytes
        if storage.dies is not None:
            change[storage.dies + 1] -= storage.nbytes
    now = peak = 0
    for op in sorted(change):
        now += change[op]
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("name", MODELS)
def test_a_program_equals_a_capture_of_its_module(name: str, exported: Any) -> None:
    ours, theirs = pt2.graph(str(exported(name)), options()), _captured(name)
    assert ours.parameters == theirs.parameters
    assert ours.trainable_parameters == theirs.trainable_parameters
    assert ours.parameter_bytes == theirs.parameter_bytes
    assert ours.macs() == theirs.macs()
    assert ours.macs("fvcore") == theirs.macs("fvcore")
    assert ours.items == theirs.items
    assert _work(ours) == _work(theirs)
    assert Counter(op.name for op in ours.ops) == Counter(op.name for op in theirs.ops)  # views too
    for ends in ("inputs", "outputs"):
        assert [ours.tensors[t].shape for t in getattr(ours, ends)] == [
            theirs.tensors[t].shape for t in getattr(theirs, ends)
        ]


@pytest.mark.parametrize("name", MODELS)
def test_storages_live_as_they_do_in_a_capture(name: str, exported: Any) -> None:
    """What a local variable of the module holds longer is not in the program: live memory may be less there."""
    ours, theirs = pt2.graph(str(exported(name)), options()), _captured(name)
    assert Counter((s.nbytes, s.role, s.born) for s in ours.storages) == Counter(
        (s.nbytes, s.role, s.born) for s in theirs.storages
    )
    for storage in ours.storages:
        assert storage.dies is None or storage.born <= storage.dies < len(ours.ops)
    assert 0.7 * _peak(theirs) < _peak(ours) < 1.01 * _peak(theirs)


def test_a_chain_of_modules_frees_exactly_what_a_capture_frees(exported: Any) -> None:
    ours, theirs = pt2.graph(str(exported("cnn")), options()), _captured("cnn")
    lives = [Counter((s.nbytes, s.role, s.born, s.dies) for s in graph.storages) for graph in (ours, theirs)]
    assert lives[0] == lives[1]


@pytest.mark.parametrize("name", ["cnn", "upsampler", "windows", "encoder", "decoder"])
def test_core_aten_programs_count_the_same(name: str, exported: Any) -> None:
    ours, theirs = pt2.graph(str(exported(name, decomposed=True)), options()), _captured(name)
    assert ours.parameters == theirs.parameters
    assert ours.macs() == theirs.macs()
    assert not ours.not_counted
    for kind in ("convolution", "normalization"):
        if name != "decoder":  # whose norm is of pointwise ops either way
            assert sum(op.kind == kind for op in ours.ops) == sum(op.kind == kind for op in theirs.ops)


# --- open sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPEN)
def test_an_open_batch_is_bound(name: str, exported: Any) -> None:
    file = str(exported(name, dynamic=True))
    for batch in (1, 6):
        ours, theirs = pt2.graph(file, options(batch=batch)), _captured(name, batch)
        assert ours.items == {"samples": batch}
        assert _work(ours) == _work(theirs)
    assert pt2.graph(file, options()).items == {"samples": 1}
    assert "1 (the batch)" in pt2.graph(file, options()).provenance["sizes"]


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Images and tokens whose batch, height and length are open, the last from 3 to 128."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.embed = nn.Conv2d(3, 8, 3, 2, 1), nn.Embedding(10, 8)

        def forward(self, x: torch.Tensor, ids: torch.Tensor, pairs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = F.interpolate(self.conv(x), scale_factor=2)
            return y[:, :, : y.shape[2] // 2], self.embed(ids).sum(1), pairs.view(-1, 2, 4)

    n, s, p = Dim("n"), Dim("s", min=3, max=128), Dim("p", min=2)
    program = export(
        Both(), (torch.zeros(2, 3, 16, 16), torch.zeros(2, 7, dtype=torch.long), torch.zeros(10, 4)),
        dynamic_shapes=({0: n, 2: Dim("h", min=4, max=640)}, {0: n, 1: s}, {0: 2 * p}),
    )
    file = tmp_path_factory.mktemp("sized") / "both.pt2"
    save(program, file)
    return str(file)


def test_sizes_left_open_take_the_exported_example(sized: str) -> None:
    graph = pt2.graph(sized, options(batch=3))
    assert [graph.tensors[t].shape for t in graph.inputs] == [(3, 3, 16, 16), (3, 7), (10, 4)]
    assert graph.provenance["sizes"].count("the example's") == 3
    assert graph.provenance["sizes"].count("the batch") == 1
    assert "=7 (the example's)" in " ".join(graph_settings(graph))


def test_inputs_bind_sizes_by_name_and_by_place(sized: str) -> None:
    for names in (("x", "ids"), ("0", "1")):
        graph = pt2.graph(sized, options(inputs=[f"{names[0]}=4x3x32x16", f"{names[1]}=4x9:int64"]))
        assert [graph.tensors[t].shape for t in graph.inputs[:2]] == [(4, 3, 32, 16), (4, 9)]
        assert [graph.tensors[t].shape for t in graph.outputs] == [(4, 8, 16, 16), (4, 8), (5, 2, 4)]
        assert graph.items == {"samples": 4}
    graph = pt2.graph(sized, options(inputs=["pairs=24x4"]))
    assert graph.tensors[graph.outputs[2]].shape == (12, 2, 4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"inputs": ["ids=1x2:int64"]}, "is 2, the program takes 3 to 128; give --input ids="),
        ({"inputs": ["x=1x3x700x16"]}, "is 700, the program takes 4 to 640"),
        ({"inputs": ["ids=4x9"]}, "input ids is int64, not float32; give --input ids=4x9:int64"),
        ({"inputs": ["x=4x3x32"]}, "input x has 4 dimensions, not 3; give --input x="),
        ({"inputs": ["x=4x3x32x17"]}, "input x is 4x3x32x16 in the program, not 4x3x32x17"),
        ({"inputs": ["pairs=9x4"]}, "not 9x4"),
        ({"inputs": ["x=4x3x32x16", "ids=5x9:int64"]}, "in one input and 5 in ids"),
        ({"inputs": ["x=4x3x32x16"], "batch": 5}, "--batch 5 contradicts an input of 4"),
        ({"inputs": ["9=4x3x32x16", "1=4x9:int64"]}, "takes 3 inputs, 0 to 2"),
        ({"train": True}, "is one inference step, not train; capture the module it was made from"),
        ({"precision": "bf16"}, "is exported in fp32, not bf16"),
        ({"precision": "amp"}, "has its precision built in"),
        ({"layout": "nhwc"}, "export the module in channels_last"),
        ({"image_size": 64}, "takes no --image-size; give --input"),
        ({"seq_len": 64}, "takes no --seq-len"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_repair(sized: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        pt2.graph(sized, options(**settings))
    assert said in str(error.value)
    assert "both.pt2" in str(error.value)


def test_unknown_inputs_list_the_known(sized: str) -> None:
    with pytest.raises(UnknownNameError, match=r"known: x, ids, pairs"):
        pt2.graph(sized, options(inputs=["image=4x3x32x16"]))


def test_the_largest_batch_is_one_that_the_program_takes(tmp_path: Path) -> None:
    program = export(Cnn().eval(), (_images(),), dynamic_shapes=({0: Dim("n", max=48)},))
    save(program, tmp_path / "few.pt2")
    workload = f"pt2:{tmp_path / 'few.pt2'}"
    assert capture(workload).provenance["most_batch"] == "48"
    result = CliRunner().invoke(app, ["predict", workload, "--on", "t4", "--largest-batch", "--json"])
    assert json.loads(result.stdout)["largest_batch"] == 48


def test_a_fixed_batch_stays(exported: Any) -> None:
    assert pt2.graph(str(exported("cnn")), options(batch=2)).batch == 2
    with pytest.raises(InputError, match="is exported for a batch of 2; leave --batch out"):
        pt2.graph(str(exported("cnn")), options(batch=8))


def test_sizes_that_depend_on_values_are_refused(tmp_path: Path) -> None:
    class Positive(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.nonzero().float().cos()

    save(export(Positive(), (torch.zeros(4),)), tmp_path / "positive.pt2")
    with pytest.raises(InputError, match=r"node \d+ \(aten.nonzero.default\): size u0 depends on values"):
        pt2.graph(str(tmp_path / "positive.pt2"), options())


# --- what is not PyTorch's --------------------------------------------------------------------------------------


@torch.library.custom_op("foretell_pt2_tests::linear", mutates_args=())
def _custom(x: torch.Tensor, k: int) -> torch.Tensor:
    return x.clone()


@_custom.register_fake
def _(x: torch.Tensor, k: int) -> torch.Tensor:
    return torch.empty_like(x)


def test_custom_and_higher_order_ops_are_named_and_not_counted(tmp_path: Path) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
            return self.linear(_custom(x, 3))

    save(export(Other(), (torch.zeros(2, 8),)), tmp_path / "other.pt2")
    graph = pt2.graph(str(tmp_path / "other.pt2"), options())
    assert graph.not_counted == {"foretell_pt2_tests.linear.default": 1, "higher_order.cond": 1}
    assert graph.macs() == 2 * 8 * 8


def test_programs_within_that_surely_run_are_run_through(tmp_path: Path) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = self.linear(x).cos()
            return self.linear(y)

    save(export(Frozen(), (torch.zeros(2, 8),)), tmp_path / "frozen.pt2")
    assert "wrap_with_set_grad_enabled" in (tmp_path / "frozen.pt2").read_bytes().decode("latin-1")
    graph = pt2.graph(str(tmp_path / "frozen.pt2"), options())
    assert _work(graph) == _work(capture_module(Frozen(), (torch.zeros(2, 8),), options=options()))


def test_half_precision_programs_say_so(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)).to(torch.bfloat16).eval()
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    save(export(module, (x,)), tmp_path / "half.pt2")
    graph = pt2.graph(str(tmp_path / "half.pt2"), options())
    assert graph.precision == "bf16"
    assert pt2.graph(str(tmp_path / "half.pt2"), options(precision="bf16")) == graph
    assert graph.macs() == capture_module(module, (x,), options=options()).macs()
    assert graph.parameter_bytes == 2 * graph.parameters


# --- use --------------------------------------------------------------------------------------------------------


def test_a_workload_string_names_a_program(exported: Any) -> None:
    graph = capture(f"pt2:{exported('cnn')}")
    assert graph.name == "pt2:cnn.pt2"
    assert Graph.from_dict(graph.to_dict()) == graph
    with pytest.raises(InputError, match=r"is a PyTorch exported program; write pt2:.*cnn\.pt2"):
        capture(str(exported("cnn")))


def test_pytorch_is_not_imported(exported: Any) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from foretell.workload import pt2; from foretell.workload.options import options\n"
        f"graph = pt2.graph({str(exported('encoder'))!r}, options())\n"
        "print(graph.macs())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) == _captured("encoder").macs()


def test_five_thousand_nodes_load_in_five_seconds(exported: Any, tmp_path: Path, within: Any) -> None:
    """A program of one layer, repeated under new names."""
    save(export(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.zeros(2, 8),)), tmp_path / "one.pt2")
    with zipfile.ZipFile(tmp_path / "one.pt2") as archive:
        program = json.loads(archive.read("one/models/model.json"))
    graph = program["graph_module"]["graph"]
    nodes, shape = graph["nodes"], graph["tensor_values"]["relu"]
    graph["nodes"], last = [], nodes[0]["inputs"][0]["arg"]["as_tensor"]["name"]
    for index in range(5000):
        node = copy.deepcopy(nodes[index % 2])
        node["inputs"][0]["arg"]["as_tensor"]["name"] = last
        last = node["outputs"][0]["as_tensor"]["name"] = f"value_{index}"
        graph["nodes"].append(node)
        graph["tensor_values"][last] = shape
    program["graph_module"]["signature"]["output_specs"][0]["user_output"]["arg"]["as_tensor"]["name"] = last
    graph["outputs"] = [{"as_tensor": {"name": last}}]
    with zipfile.ZipFile(tmp_path / "deep.pt2", "w") as archive:
        archive.writestr("deep/models/model.json", json.dumps(program))
    made = within(5.0, lambda: pt2.graph(str(tmp_path / "deep.pt2"), options()))
    assert sum(op.kind != "view" for op in made.ops) == 5000
