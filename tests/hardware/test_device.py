"""The `Device` value itself."""

import dataclasses
import json
import pickle

import pytest

from foretell.errors import UnknownNameError
from foretell.hardware import DTYPES, UNITS, Device, Link, device
from foretell.hardware.device import FrozenMap

TOY = Device(
    name="toy",
    title="Toy",
    vendor="NVIDIA",
    kind="gpu",
    architecture="Toy",
    peaks=FrozenMap({"fp16.tensor": 100e12, "fp16.vector": 20e12, "fp32.vector": 10e12}),
    memory_bandwidth_bytes_per_s=1e12,
    links=(Link("pcie", "4", 31.5e9), Link("nvlink", "3", 25e9, count=12)),
    warp_size=32,
    max_warps_per_sm=48,
)


def test_peak_takes_the_faster_unit_unless_told():
    assert TOY.peak("fp16") == 100e12
    assert TOY.peak("fp16", "vector") == 20e12
    assert TOY.peak("fp32") == 10e12
    assert TOY.peak("fp32", "tensor") is None
    assert TOY.peak("bf16") is None  # emulated somewhere, perhaps: not for the catalogue to say


def test_ridge_is_peak_over_bandwidth():
    assert TOY.ridge("fp16") == 100
    assert TOY.ridge("fp32") == 10
    assert TOY.ridge("bf16") is None
    assert dataclasses.replace(TOY, memory_bandwidth_bytes_per_s=None).ridge("fp16") is None


def test_unknown_format_or_unit_names_the_near_ones():
    with pytest.raises(UnknownNameError, match="unknown number format 'float16'"):
        TOY.peak("float16")
    with pytest.raises(UnknownNameError, match="did you mean 'tensor'") as caught:
        TOY.peak("fp16", "tensors")
    assert caught.value.near == ("tensor",)


def test_links():
    assert TOY.link("nvlink").total_bandwidth_bytes_per_s == 300e9
    assert TOY.link("xgmi") is None
    assert Link("nvlink").total_bandwidth_bytes_per_s is None
    assert TOY.max_threads_per_sm == 1536
    assert dataclasses.replace(TOY, warp_size=None).max_threads_per_sm is None


def test_missing_lists_every_unknown_field_and_only_those():
    missing = TOY.missing()
    assert {"memory_bytes", "tdp_w", "idle_w", "price_usd", "registers_per_sm"} <= set(missing)
    assert not {"peaks", "memory_bandwidth_bytes_per_s", "links", "warp_size", "aliases", "sources"} & set(missing)
    assert "registers_per_sm" not in dataclasses.replace(TOY, kind="cpu").missing()
    assert {"peaks", "links"} <= set(dataclasses.replace(TOY, peaks=FrozenMap(), links=()).missing())


def test_values_cannot_change_and_can_travel():
    found = device("a100-sxm4-80gb")
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.tdp_w = 1
    with pytest.raises(TypeError):
        found.peaks["fp16.tensor"] = 1
    assert pickle.loads(pickle.dumps(found)) == found
    assert hash(found) == hash(pickle.loads(pickle.dumps(found)))
    assert found != device("a100-sxm4-40gb")


def test_to_dict_is_json_and_complete():
    data = json.loads(json.dumps(device("h100-sxm").to_dict()))
    assert set(data) == {f.name for f in dataclasses.fields(Device)}
    assert data["peaks"]["bf16.tensor"] == 989.4e12
    assert data["links"][0]["kind"] == "nvlink"
    assert data["price_usd"] is None
    assert len(DTYPES) == len(set(DTYPES))
    assert all(key.split(".")[0] in DTYPES and key.split(".")[1] in UNITS for key in data["peaks"])


def test_one_price_is_enough():
    """A card that is only rented has no list price to miss."""
    rented = dataclasses.replace(TOY, price_usd=None, price_usd_per_h=2.0)
    assert not {"price_usd", "price_usd_per_h"} & set(rented.missing())
    assert {"price_usd", "price_usd_per_h"} <= set(dataclasses.replace(rented, price_usd_per_h=None).missing())
