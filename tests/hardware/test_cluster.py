"""The cluster language, its values and its errors."""

import contextlib
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import ForetellError, InputError, UnknownNameError
from foretell.hardware import Cluster, cluster, device, network, networks, node, nodes


def shape(text):
    found = cluster(text)
    return [(count, item.name) for count, item in found.groups], found.device_count


def test_nodes_devices_and_mixtures():
    assert shape("dgx-h100") == ([(1, "dgx-h100")], 8)
    assert shape("16x dgx-h100") == ([(16, "dgx-h100")], 128)
    assert shape("16 x DGX H100") == ([(16, "dgx-h100")], 128)
    assert shape("2×gb200-nvl72") == ([(2, "gb200-nvl72")], 144)
    assert shape("h100-sxm") == ([(1, "1x h100-sxm")], 1)
    assert shape("8x a100-sxm4-80gb") == ([(1, "8x a100-sxm4-80gb")], 8)
    assert shape("2x 8x l40s over roce-100") == ([(2, "8x l40s")], 16)
    assert shape("4x dgx-a100 + 2x dgx-h100 over ib-hdr") == ([(4, "dgx-a100"), (2, "dgx-h100")], 48)
    assert shape("p4d.24xlarge") == ([(1, "p4d-24xlarge")], 8)


@pytest.mark.parametrize("name", nodes())
def test_every_node_can_be_written(name):
    assert shape(name)[0] == [(1, name)]
    assert shape(f"3x {name} over ethernet-100")[0] == [(3, name)]


def test_bare_devices_are_wired_as_their_makers_wire_them():
    def box(text):
        ((_, found),) = cluster(text).groups
        return found.topology, found.link and found.link.kind

    assert box("h100-sxm") == ("single", None)
    assert box("4x l40s") == ("pcie-tree", "pcie")
    assert box("8x a100-sxm4-80gb") == ("nvswitch", "nvlink")
    assert box("4x a100-pcie-80gb") == ("pcie-tree", "pcie")  # bridges are optional, so not assumed
    assert box("2x rtx-3090") == ("pcie-tree", "pcie")
    assert box("8x v100-sxm2-16gb") == ("hybrid-mesh", "nvlink")
    assert box("8x mi300x") == ("full-mesh", "xgmi")
    assert box("256x tpu-v5p") == ("torus", "ici")


def test_the_network_is_the_nodes_own_ports():
    found = cluster("4x dgx-a100").network
    assert (found.generation, found.count) == ("HDR", 8)
    assert cluster("dgx-a100").network is None


def test_a_mixed_cluster_is_as_fast_as_its_slowest_node():
    found = cluster("1x dgx-a100 + 1x dgx-h100").network
    assert found.total_bandwidth_bytes_per_s == 8 * 25e9
    assert cluster("1x dgx-h100 + 1x dgx-1v").network.count == 4


def test_over_replaces_the_ports_and_keeps_their_number():
    assert cluster("2x dgx-a100 over ib-ndr").network.total_bandwidth_bytes_per_s == 8 * 50e9
    assert cluster("2x dgx-a100 over 4x ib-ndr").network.total_bandwidth_bytes_per_s == 4 * 50e9
    assert cluster("1x dgx-a100 + 1x dgx-1v over ib-ndr").network.count == 4  # the fewest of 8 and 4
    assert cluster("2x 8x l40s over ethernet-25").network.total_bandwidth_bytes_per_s == 3.125e9


def test_totals():
    found = cluster("2x p4d-24xlarge + 1x p5-48xlarge over efa-100")
    assert found.node_count == 3
    assert len(found.nodes) == 3
    assert not found.homogeneous
    assert found.price_usd_per_h == pytest.approx(2 * 21.957642 + 55.04)
    assert cluster("2x dgx-a100").price_usd_per_h is None
    assert cluster("8x t4").price_usd_per_h == pytest.approx(8 * 0.526)
    assert cluster("2x dgx-a100").homogeneous
    assert node("dgx-a100").memory_bytes == 8 * 80 * 2**30


BROKEN = {
    "": "cannot be empty",
    "   ": "cannot be empty",
    "over ib-hdr": "one 'over'",
    "dgx-a100 over": "one 'over'",
    "2x dgx-a100 over ib-hdr over ib-ndr": "one 'over'",
    "0x dgx-a100": "cannot read '0x dgx-a100'",
    "4x": "cannot read '4x'",
    "8": "cannot read '8'",
    "dgx-a100 +": "cannot read ''",
    "2x 2x 2x l40s": "cannot read",
    "2x 2x dgx-a100": "a whole node",
    "-2x dgx-a100": None,
    "2x dgx-a100 over 0x ib-hdr": "cannot read",
}


@pytest.mark.parametrize("text", BROKEN)
def test_bad_text_gets_the_grammar_and_an_example(text):
    with pytest.raises(ForetellError) as caught:
        cluster(text)
    if BROKEN[text] is not None:
        assert isinstance(caught.value, InputError)
        assert BROKEN[text] in caught.value.message
        example = caught.value.hint.split("'")[-2]
        assert isinstance(cluster(example), Cluster)


def test_errors_that_need_their_own_repair():
    with pytest.raises(InputError, match="add 'over NETWORK'"):
        cluster("2x 8x l40s")
    with pytest.raises(InputError, match="leave out 'over"):
        cluster("dgx-a100 over ib-ndr")
    with pytest.raises(InputError, match="no machine holds 64") as caught:
        cluster("64x h100-sxm")
    assert cluster(caught.value.hint.split("'")[1]).device_count == 64


def test_a_part_of_a_rack_is_one_machine():
    part = cluster("4x 64x gb200 over 64x ib-ndr")
    assert (part.device_count, part.node_count) == (256, 4)
    whole = cluster("gb200-nvl72").nodes[0]
    assert part.nodes[0].link == whole.link
    assert part.nodes[0].topology == whole.topology
    with pytest.raises(InputError, match="no machine holds 73"):
        cluster("73x gb200")


def test_unknown_names():
    with pytest.raises(UnknownNameError) as caught:
        cluster("4x dgx-h10")
    assert "dgx-h100" in caught.value.near
    with pytest.raises(UnknownNameError) as caught:
        cluster("8x a100")
    assert {"a100-pcie-80gb", "a100-sxm4-80gb"} <= set(caught.value.near)
    with pytest.raises(UnknownNameError, match="unknown network 'ib'") as caught:
        cluster("2x dgx-a100 over ib")
    assert set(caught.value.near) == {"ib-edr", "ib-hdr", "ib-ndr", "ib-xdr"}
    with pytest.raises(UnknownNameError, match="unknown node 'dgx'"):
        node("dgx")


@settings(deadline=None)  # files are read on first use, slowly on a busy machine
@given(st.text(alphabet="0123456789x +overdgxa1-h.l4s", max_size=40))
def test_any_text_is_a_cluster_or_one_of_our_errors(text):
    with contextlib.suppress(ForetellError):
        assert cluster(text).device_count >= 1


@settings(deadline=None)  # files are read on first use, slowly on a busy machine
@given(st.integers(1, 500), st.integers(1, 16))
def test_counts_multiply(machines, per_machine):
    found = cluster(f"{machines}x {per_machine}x l4 over ethernet-100" if machines > 1 else f"{per_machine}x l4")
    assert found.device_count == machines * per_machine
    assert found.node_count == machines


def test_networks_are_as_fast_as_their_names_say():
    speed = {"edr": 100, "hdr": 200, "ndr": 400, "xdr": 800}
    for name in networks():
        word = name.split("-")[1]
        gigabits = speed.get(word) or float(word)
        assert network(name).bandwidth_bytes_per_s == gigabits * 1e9 / 8
        assert network(name).count == 1


def test_node_and_device_names_are_apart():
    from foretell.hardware import devices

    assert not set(nodes()) & set(devices())
    for name in nodes():
        with pytest.raises(UnknownNameError):
            device(name)


def test_values_travel():
    found = cluster("4x dgx-a100 + 2x dgx-h100 over ib-hdr")
    assert pickle.loads(pickle.dumps(found)) == found
    data = json.loads(json.dumps(found.to_dict()))
    assert data["groups"][1]["count"] == 2
    assert data["groups"][0]["node"]["device"] == "a100-sxm4-80gb"
    assert data["network"]["generation"] == "HDR"
