"""The exchange of experts' tokens: routing counted by brute force, times by hand, and what a caller gets wrong."""

import itertools

import numpy as np
import pytest

from foretell.errors import InputError, UnknownNameError
from foretell.hardware import cluster
from foretell.simulate.collectives import Fabric
from foretell.simulate.collectives.experts import FP8_BYTES, PHASES, constants, exchange_s, spread


@pytest.mark.parametrize(("places", "experts", "topk"), [(2, 4, 2), (4, 8, 3), (3, 9, 2), (8, 8, 4), (1, 5, 2)])
def test_spread_counts_every_choice(places: int, experts: int, topk: int):
    each = experts // places
    chosen = list(itertools.combinations(range(experts), topk))
    expected = np.mean([len({expert // each for expert in choice}) for choice in chosen])
    assert float(spread(places, experts, topk)) == pytest.approx(expected)


def test_large_normal_exchange_fills_the_slower_link():
    fabric = Fabric.of(cluster("4x dgx-h100"))
    tokens = 2.0**22
    for phase, width in (("dispatch", FP8_BYTES), ("combine", 2.0)):
        near, far = constants(fabric.node_kind, fabric.network_kind, phase)
        # Within a node, seven eighths of the copies, one for each of 5.29 ranks, cross a GPU's NVLink; many workers.
        nbytes = tokens * float(spread(8, 256, 8)) * 7168 * width * 7 / 8
        took = float(exchange_s(fabric, phase, tokens, 7168, 8, 256, 8, multiprocessors=10_000))
        assert took == pytest.approx(nbytes * near.wire / 450e9, rel=0.01)
        # Over four nodes, three quarters of one copy a node cross a GPU's port.
        nbytes = tokens * float(spread(4, 256, 8)) * 7168 * width * 3 / 4
        took = float(exchange_s(fabric, phase, tokens, 7168, 8, 256, 32, multiprocessors=10_000))
        assert took == pytest.approx(nbytes * far.wire / 50e9, rel=0.05)


def test_low_latency_sends_every_copy():
    fabric = Fabric.of(cluster("8x dgx-h100"))
    _, far = constants(fabric.node_kind, fabric.network_kind, "combine")
    nbytes = 4096 * 8 * 7168 * 2 * 7 / 8
    took = float(exchange_s(fabric, "combine", 4096, 7168, 8, 256, 64, low_latency=True))
    assert took == pytest.approx(nbytes * far.wire / 50e9, rel=0.05)


@pytest.mark.parametrize("low_latency", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_laws(phase: str, low_latency: bool):
    fabric = Fabric.of(cluster("8x dgx-h100"))
    tokens = np.geomspace(1, 1e5, 20)[:, None]
    sizes = np.array([1, 2, 8, 16, 64])
    times = exchange_s(fabric, phase, tokens, 7168, 8, 256, sizes, low_latency=low_latency)
    assert times.shape == (20, 5)
    assert np.all(times[:, 0] == 0)
    assert np.all(times[:, 1:] > 0)
    assert np.all(np.diff(times, axis=0) >= 0)
    assert np.all(exchange_s(fabric, phase, 0, 7168, 8, 256, sizes) == 0)
    more = exchange_s(fabric, phase, 4096, 7168, np.arange(1, 33), 256, 64, low_latency=low_latency)
    assert np.all(np.diff(more) >= 0)
    slow = Fabric.of(cluster("8x dgx-h100 over 8x ib-hdr"))
    assert np.all(exchange_s(slow, phase, tokens, 7168, 8, 256, sizes, low_latency=low_latency) >= times)


def test_more_multiprocessors_never_hurt():
    fabric = Fabric.of(cluster("dgx-b200"))
    times = exchange_s(fabric, "dispatch", 4096, 7168, 8, 256, 8, multiprocessors=np.array([4, 8, 12, 24, 64]))
    assert np.all(np.diff(times) < 0)
    assert exchange_s(fabric, "dispatch", 4096, 7168, 8, 256, 8, elastic=True) < times[3]


def test_deepep_spares_the_network_what_a_plain_all_to_all_sends_twice():
    fabric = Fabric.of(cluster("4x dgx-h100"))
    plain, once = (fabric.time_s("all_to_all", 4096 * 8 * 7168, 32, algorithm=name) for name in ("pairwise", "deepep"))
    # Eight copies cross to 3.6 nodes at most once each.
    assert once == pytest.approx(plain * float(spread(4, 256, 8)) / 8, rel=0.1)


def test_published_figures():
    """DeepEP's own, H800 with 400 Gb/s a GPU: 4,096 tokens of 7,168, 8 of 256 experts (docs/legacy.md)."""
    fabric = Fabric.of(cluster("8x hgx-h800"))
    sizes = np.array([32, 64])
    counted = 4096 * 7168 * FP8_BYTES * np.array([float(spread(4, 256, 8)), float(spread(4, 128, 8))])
    bandwidth = counted / exchange_s(fabric, "dispatch", 4096, 7168, 8, 256, sizes) / 1e9
    assert bandwidth == pytest.approx([58, 51], rel=0.1)
    fast = exchange_s(fabric, "dispatch", 128, 7168, 8, 256, np.array([16, 32, 64]), low_latency=True)
    assert fast * 1e6 == pytest.approx([118, 155, 173], rel=0.2)


def test_what_is_wrong_is_said():
    fabric = Fabric.of(cluster("dgx-h100"))
    with pytest.raises(UnknownNameError, match="dispatch"):
        exchange_s(fabric, "dispatsh", 1, 7168, 8, 256, 8)
    with pytest.raises(InputError, match="a token goes to more"):
        exchange_s(fabric, "dispatch", 1, 7168, 8, 4, 8)
    with pytest.raises(InputError, match="below 1"):
        exchange_s(fabric, "dispatch", 1, 0, 8, 256, 8)
