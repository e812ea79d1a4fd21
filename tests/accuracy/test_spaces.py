"""Search spaces: composed rows are those of captured torch modules, written here after the papers' code."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

import foretell
from foretell.accuracy.spaces import fbnet, nasbench201, ofa, rows
from foretell.errors import InputError, UnknownNameError
from foretell.graph import OpTable

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional


def relu_conv_norm(i, o, k, s=1):
    return nn.Sequential(nn.ReLU(), nn.Conv2d(i, o, k, s, k // 2, bias=False), nn.BatchNorm2d(o))


class Zero(nn.Module):
    def forward(self, x):
        return x.mul(0.0)


class Cell(nn.Module):
    def __init__(self, arch, c):
        super().__init__()
        make = {
            "none": Zero,
            "skip_connect": nn.Identity,
            "nor_conv_1x1": lambda: relu_conv_norm(c, c, 1),
            "nor_conv_3x3": lambda: relu_conv_norm(c, c, 3),
            "avg_pool_3x3": lambda: nn.AvgPool2d(3, 1, 1, count_include_pad=False),
        }
        edges = [[edge.split("~") for edge in node.strip("|").split("|")] for node in arch.split("+")]
        self.nodes = nn.ModuleList([nn.ModuleList([make[name]() for name, _ in node]) for node in edges])
        self.sources = [[int(source) for _, source in node] for node in edges]

    def forward(self, x):
        outs = [x]
        for layers, sources in zip(self.nodes, self.sources, strict=True):
            outs.append(sum(layer(outs[s]) for layer, s in zip(layers, sources, strict=True)))
        return outs[-1]


class Reduce(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.a, self.b = relu_conv_norm(i, o, 3, 2), relu_conv_norm(o, o, 3)
        self.down = nn.Sequential(nn.AvgPool2d(2, 2), nn.Conv2d(i, o, 1, bias=False))

    def forward(self, x):
        y = self.b(self.a(x))
        return self.down(x) + y


class Classifier(nn.Module):
    def __init__(self, body, channels, classes):
        super().__init__()
        self.body, self.pool, self.fc = body, nn.AdaptiveAvgPool2d(1), nn.Linear(channels, classes)

    def forward(self, x):
        y = self.pool(self.body(x))
        return self.fc(y.view(y.size(0), -1))


def nasbench201_net(arch):
    layers = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)]
    for c in (16, 32, 64):
        layers += [Reduce(c // 2, c)] if c > 16 else []
        layers += [Cell(arch, c) for _ in range(5)]
    return Classifier(nn.Sequential(*layers, nn.BatchNorm2d(64), nn.ReLU(inplace=True)), 64, 10)


class Shuffle(nn.Module):
    def forward(self, x):
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).permute(0, 2, 1, 3, 4).contiguous().view(n, c, h, w)


def conv_norm(i, o, k, s=1):
    return nn.Sequential(nn.Conv2d(i, o, k, s, k // 2, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class FBBlock(nn.Module):
    def __init__(self, i, o, k, e, g, s):
        super().__init__()
        m = i * e
        self.c1, self.b1 = nn.Conv2d(i, m, 1, groups=g, bias=False), nn.BatchNorm2d(m)
        self.c2, self.b2 = nn.Conv2d(m, m, k, s, k // 2, groups=m, bias=False), nn.BatchNorm2d(m)
        self.c3, self.b3 = nn.Conv2d(m, o, 1, groups=g, bias=False), nn.BatchNorm2d(o)
        self.relu, self.shuffle = nn.ReLU(inplace=True), Shuffle() if g > 1 else nn.Identity()
        self.residual = i == o and s == 1

    def forward(self, x):
        y = self.shuffle(self.relu(self.b1(self.c1(x))))
        y = self.b3(self.c3(self.relu(self.b2(self.c2(y)))))
        if self.residual:
            y += x
        return y


def fbnet_net(choices):
    blocks = [(3, 1, 1), (3, 1, 2), (3, 3, 1), (3, 6, 1), (5, 1, 1), (5, 1, 2), (5, 3, 1), (5, 6, 1)]
    layers, i, rest = [conv_norm(3, 16, 3)], 16, list(choices)
    channels = [16] + [24] * 4 + [32] * 4 + [64] * 4 + [112] * 4 + [184] * 4 + [352]
    strides = [1, 1, 1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1]
    for choice, o, s in zip(rest, channels, strides, strict=True):
        if choice < 8:
            layers.append(FBBlock(i, o, *blocks[choice], s))
        else:
            layers.append(nn.Identity() if (i, s) == (o, 1) else conv_norm(i, o, 1, s))
        i = o
    return Classifier(nn.Sequential(*layers, conv_norm(352, 1504, 1)), 1504, 100)


class HardSwish(nn.Module):
    def forward(self, x):
        return x * F.relu6(x + 3.0, inplace=True) / 6.0


class Squeeze(nn.Module):
    def __init__(self, c, small):
        super().__init__()
        self.a, self.b = nn.Conv2d(c, small, 1), nn.Conv2d(small, c, 1)

    def forward(self, x):
        y = F.relu(self.a(x.mean(3, keepdim=True).mean(2, keepdim=True)), inplace=True)
        return x * (F.relu6(self.b(y) + 3.0, inplace=True) / 6.0)


class Bottleneck(nn.Module):
    def __init__(self, i, m, o, k, s, act, small):
        super().__init__()
        layers = [nn.Conv2d(i, m, 1, bias=False), nn.BatchNorm2d(m), act()] if m != i else []
        layers += [nn.Conv2d(m, m, k, s, k // 2, groups=m, bias=False), nn.BatchNorm2d(m), act()]
        layers += [Squeeze(m, small)] if small else []
        self.body = nn.Sequential(*layers, nn.Conv2d(m, o, 1, bias=False), nn.BatchNorm2d(o))
        self.residual = i == o and s == 1

    def forward(self, x):
        return self.body(x) + x if self.residual else self.body(x)


class OFA(nn.Module):
    """Width 1.2, expansion 3, kernel 3 or 5, depth 2; squeezed channels worked out by hand."""

    def __init__(self, k):
        super().__init__()

        def relu():
            return nn.ReLU(inplace=True)

        layers = [nn.Conv2d(3, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24), HardSwish()]
        layers.append(Bottleneck(24, 24, 24, 3, 1, relu, 0))
        i = 24
        for o, s, act, smalls in (
            (32, 2, relu, (0, 0)),
            (48, 2, relu, (24, 40)),
            (96, 2, HardSwish, (0, 0)),
            (136, 1, HardSwish, (72, 104)),
            (192, 2, HardSwish, (104, 144)),
        ):
            layers.append(Bottleneck(i, 3 * i, o, k, s, act, smalls[0]))
            layers.append(Bottleneck(o, 3 * o, o, k, 1, act, smalls[1]))
            i = o
        self.body = nn.Sequential(*layers, nn.Conv2d(192, 1152, 1, bias=False), nn.BatchNorm2d(1152), HardSwish())
        self.mix = nn.Sequential(nn.Conv2d(1152, 1536, 1, bias=False), HardSwish())
        self.fc = nn.Linear(1536, 1000)

    def forward(self, x):
        y = self.mix(self.body(x).mean(3, keepdim=True).mean(2, keepdim=True))
        return self.fc(y.view(y.size(0), -1))


CELL = "|nor_conv_3x3~0|+|avg_pool_3x3~0|none~1|+|nor_conv_1x1~0|skip_connect~1|nor_conv_1x1~2|"
CHOICES = [1, 0, 2, 8, 3, 8, 5, 6, 7, 4, 1, 8, 3, 0, 2, 8, 8, 6, 7, 8, 5, 3]


@pytest.mark.parametrize(
    ("make", "composed", "shape"),
    [
        (lambda: nasbench201_net(CELL), lambda: nasbench201.rows(CELL, 2), (2, 3, 32, 32)),
        (lambda: fbnet_net(CHOICES), lambda: fbnet.rows(CHOICES, 3), (3, 3, 32, 32)),
        (lambda: fbnet_net([8] * 22), lambda: fbnet.rows([8] * 22, 1), (1, 3, 32, 32)),
        (lambda: OFA(5), lambda: ofa.rows([5] * 20, [3] * 20, [2] * 5, 152, 2), (2, 3, 152, 152)),
    ],
    ids=["nasbench201", "fbnet", "fbnet-skips", "ofa"],
)
def test_rows_are_those_of_a_capture(make, composed, shape):
    captured = foretell.capture(make().eval(), torch.zeros(shape)).table()
    table = rows.table(composed())
    assert list(table.name) == list(captured.name)
    for field in fields(OpTable):
        if field.name not in ("name", "module"):
            expected, found = getattr(captured, field.name), getattr(table, field.name)
            wrong = [f"{captured.name[i]}: {found[i]}, not {expected[i]}" for i in np.flatnonzero(found != expected)]
            assert not wrong, (field.name, wrong[:3])


def test_stacked_networks_keep_their_totals():
    networks = [nasbench201.rows(CELL, 4), fbnet.rows(CHOICES, 4)]
    stacked, starts = rows.stack(networks)
    assert len(stacked) < sum(map(len, networks)) / 2
    for field in ("macs", "bytes_read", "operands"):
        sums = np.add.reduceat(getattr(stacked, field) * stacked.repeat, starts)
        assert list(sums) == [sum(getattr(row, field) for row in network) for network in networks]


def test_foreign_architectures_are_refused():
    with pytest.raises(UnknownNameError, match="sep_conv"):
        nasbench201.rows("|sep_conv~0|+|none~0|none~1|+|none~0|none~1|none~2|", 1)
    with pytest.raises(InputError, match="2 nodes"):
        nasbench201.rows("|none~0|+|none~0|none~1|", 1)
    with pytest.raises(InputError, match="22 choices"):
        fbnet.rows([9] * 22, 1)
    with pytest.raises(InputError, match="20 kernels"):
        ofa.rows([3] * 19, [3] * 20, [2] * 5, 160, 1)
