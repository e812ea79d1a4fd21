"""What a device file may not contain, and what the reader then says."""

import pytest

from foretell.errors import InputError
from foretell.hardware import load_device, load_node
from foretell.hardware.loader import compute_capabilities

GOOD = """
title = "My GPU"
vendor = "NVIDIA"
kind = "gpu"
architecture = "Ampere"
compute_capability = "8.6"

multiprocessors = [10, "sheet"]
memory = ["16 GiB", "sheet"]
memory_bandwidth = ["200 GB/s", "sheet"]

[peaks]
"fp16.tensor" = ["18 TFLOP/s", "sheet"]

[[links]]
kind = "pcie"
generation = "4"
bandwidth = ["31.5 GB/s", "pcie"]

[sources]
sheet = "My data sheet, 2026"
pcie = "PCI Express Base Specification 4.0"
"""


@pytest.fixture
def load(tmp_path):
    def read(text, name="my-gpu"):
        path = tmp_path / f"{name}.toml"
        path.write_text(text, encoding="utf-8")
        return load_device(path)

    return read


def test_good_file(load):
    found = load(GOOD)
    assert found.name == "my-gpu"
    assert found.memory_bandwidth_bytes_per_s == 200e9
    assert found.peaks == {"fp16.tensor": 18e12}
    assert found.link("pcie").bandwidth_bytes_per_s == 31.5e9
    assert found.sources["memory_bytes"] == "My data sheet, 2026"
    assert found.sources["links.pcie.bandwidth"].startswith("PCI Express")
    # joined from the compute-capability table, with that table's source
    assert found.max_warps_per_sm == 48
    assert found.shared_bytes_per_block == 99 * 1024
    assert "CUDA" in found.sources["max_warps_per_sm"]
    assert found.tdp_w is None


def test_a_file_may_overrule_the_capability_table(load):
    text = GOOD.replace(
        'multiprocessors = [10, "sheet"]', 'multiprocessors = [10, "sheet"]\nmax_warps_per_sm = [32, "sheet"]'
    )
    found = load(text)
    assert found.max_warps_per_sm == 32
    assert found.sources["max_warps_per_sm"] == "My data sheet, 2026"


BAD = {
    "no source": ('["16 GiB", "sheet"]', '"16 GiB"', ["memory", "a number needs its source", "[sources]"]),
    "bare number": ('[10, "sheet"]', "10", ["multiprocessors", "a number needs its source"]),
    "unlisted source": ('["16 GiB", "sheet"]', '["16 GiB", "shet"]', ["memory", "'shet'", "did you mean 'sheet'"]),
    "wrong unit": ('"16 GiB"', '"16 GiB/s"', ["memory", "wrong unit 'GiB/s'", "'80 GiB'"]),
    "no unit": ('"200 GB/s"', "200", ["memory_bandwidth", "no unit"]),
    "negative": ('"200 GB/s"', '"-200 GB/s"', ["memory_bandwidth", "negative"]),
    "not whole": ("[10,", "[10.5,", ["multiprocessors", "not a whole number"]),
    "zero": ("[10,", "[0,", ["multiprocessors", "not a whole number"]),
    "true": ("[10,", "[true,", ["multiprocessors", "not a whole number"]),
    "absurd count": ("[10,", "[1000000,", ["multiprocessors", "more than any gpu"]),
    "enormous count": ("[10,", "[999999999999999999999,", ["multiprocessors", "no sensible figure"]),
    "clocks exchanged": (
        "[10,",
        '[10, "sheet"]\nbase_clock = ["2 GHz", "sheet"]\nboost_clock = ["1 GHz", "sheet"]\nlaunch_year = [2020,',
        ["base_clock", "more than boost_clock"],
    ),
    "powers exchanged": (
        "[10,",
        '[10, "sheet"]\nidle = ["300 W", "sheet"]\ntdp = ["70 W", "sheet"]\nlaunch_year = [2020,',
        ["idle", "more than tdp"],
    ),
    "slow clock": ("[10,", '[10, "sheet"]\nboost_clock = ["1 Hz", "sheet"]\nlaunch_year = [2020,', ["boost_clock"]),
    "unknown key": ("memory =", "memorry =", ["unknown key 'memorry'", "did you mean 'memory'"]),
    "missing title": ('title = "My GPU"\n', "", ["'title' is missing", 'title = "…"']),
    "empty title": ('"My GPU"', '" "', ["title", "not a text"]),
    "title of number": ('"My GPU"', "7", ["title", "not a text"]),
    "kind": ('"gpu"', '"gpus"', ["kind", "unknown kind 'gpus'", "did you mean 'gpu'"]),
    "capability": ('"8.6"', '"8.66"', ["compute_capability", "'8.66' is not in the table", "8.9"]),
    "dtype": ("fp16.tensor", "float16.tensor", ['peaks."float16.tensor"', "unknown number format 'float16'"]),
    "unit": ("fp16.tensor", "fp16.matrix", ["unknown unit 'matrix'", "tensor"]),
    "no unit of a peak": ('"fp16.tensor"', '"fp16"', ["unknown unit ''"]),
    "peaks": ('[peaks]\n"fp16.tensor" = ["18 TFLOP/s", "sheet"]', "peaks = 3", ["peaks", "a table"]),
    "link kind": ('kind = "pcie"', "", ["links", "needs its kind"]),
    "link key": ('generation = "4"', 'gen = "4"', ["links", "unknown key 'gen'", "did you mean 'generation'"]),
    "link unit": ('"31.5 GB/s"', '"31.5 GB"', ["links.pcie.bandwidth", "wrong unit"]),
    "unused source": ("[sources]", '[sources]\nother = "Another sheet, 2026"', ["'other' is used by no number"]),
    "empty source": ('"My data sheet, 2026"', '""', ["sources", "must give a text"]),
    "aliases": ("[peaks]", 'aliases = "x"\n[peaks]', ["aliases", "a list of texts"]),
    "links": (
        '[[links]]\nkind = "pcie"\ngeneration = "4"\nbandwidth = ["31.5 GB/s", "pcie"]',
        "",
        ["'pcie' is used by no"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refusals_say_file_key_and_repair(load, case):
    old, new, said = BAD[case]
    assert GOOD.count(old) >= 1
    text = GOOD.replace(old, new, 1)
    if case == "aliases":
        text = text.replace('aliases = "x"\n', "").replace("[peaks]", "[peaks]", 1)
        text = 'aliases = "x"\n' + text
    with pytest.raises(InputError) as caught:
        load(text)
    assert "my-gpu.toml" in str(caught.value)
    assert caught.value.hint
    for words in said:
        assert words in str(caught.value)


def test_malformed_toml_says_the_line(load):
    with pytest.raises(InputError, match=r"my-gpu\.toml: malformed TOML: .*line 3") as caught:
        load('title = "x"\nvendor = "y"\nkind = \n')
    assert caught.value.exit_code == 2
    with pytest.raises(InputError, match="malformed TOML"):
        load('title = "x"\ntitle = "y"\n')


def test_unreadable_files(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        load_device(tmp_path / "absent.toml")
    with pytest.raises(InputError, match="not a regular file"):
        load_device(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read"):
        load_device(binary)


def test_toml_is_data_only(load):
    """No text in a file is ever formatted, imported or run."""
    found = load(GOOD.replace("My GPU", "{0.__class__} %s $(rm) __import__('os')"))
    assert found.title == "{0.__class__} %s $(rm) __import__('os')"


# CUDA Occupancy Calculator, "Physical Limits for GPU Compute Capability" (3.5 … 8.6); cudaDeviceProp of later parts.
LIMITS = {
    # capability: warps, blocks, registers per SM, shared KiB per SM, shared KiB per block with opt-in
    "3.5": (64, 16, 65536, 48, 48),
    "3.7": (64, 16, 131072, 112, 48),
    "5.2": (64, 32, 65536, 96, 48),
    "6.0": (64, 32, 65536, 64, 48),
    "6.1": (64, 32, 65536, 96, 48),
    "7.0": (64, 32, 65536, 96, 96),
    "7.5": (32, 16, 65536, 64, 64),
    "8.0": (64, 32, 65536, 164, 163),
    "8.6": (48, 16, 65536, 100, 99),
    "8.7": (48, 16, 65536, 164, 163),
    "8.9": (48, 24, 65536, 100, 99),
    "9.0": (64, 32, 65536, 228, 227),
    "10.0": (64, 32, 65536, 228, 227),
    "10.3": (64, 32, 65536, 228, 227),
    "11.0": (48, 24, 65536, 228, 227),
    "12.0": (48, 24, 65536, 100, 99),
}


@pytest.mark.parametrize("capability", LIMITS)
def test_compute_capability_limits(capability):
    limits, sources = compute_capabilities()[capability]
    warps, blocks, registers, shared_sm, shared_block = LIMITS[capability]
    assert limits["max_warps_per_sm"] == warps
    assert limits["max_blocks_per_sm"] == blocks
    assert limits["registers_per_sm"] == registers
    assert limits["shared_bytes_per_sm"] == shared_sm * 1024
    assert limits["shared_bytes_per_block"] == shared_block * 1024
    assert limits["warp_size"] == 32
    assert sources["max_warps_per_sm"]


@pytest.mark.parametrize("capability", compute_capabilities())
def test_compute_capability_consistency(capability):
    limits, _ = compute_capabilities()[capability]
    assert limits["shared_bytes_per_block"] <= limits["shared_bytes_per_sm"]
    reserved = limits["shared_reserved_bytes_per_block"]
    assert reserved == (1024 if float(capability) >= 8 else 0)
    if float(capability) >= 8:  # the largest block leaves room for exactly the reserve
        assert limits["shared_bytes_per_sm"] - limits["shared_bytes_per_block"] == reserved
    if limits["l1_bytes_per_sm"]:
        assert limits["l1_bytes_per_sm"] >= limits["shared_bytes_per_sm"]
    # one block of full size with 64 registers a thread fits the register file
    assert limits["registers_per_sm"] >= 1024 * 64


NODE = """
title = "My box"
device = "l40s"
count = [4, "sheet"]
topology = "pcie-tree"
link = "pcie"
host_memory = ["1 TiB", "sheet"]

[[nics]]
network = "ib-hdr"
count = [2, "sheet"]

[sources]
sheet = "My server's manual, 2026"
"""


def test_node_file(tmp_path):
    path = tmp_path / "my-box.toml"
    path.write_text(NODE, encoding="utf-8")
    found = load_node(path)
    assert (found.name, found.count, found.device.name) == ("my-box", 4, "l40s")
    assert found.host_memory_bytes == 2**40
    assert found.nics[0].total_bandwidth_bytes_per_s == 2 * 25e9
    assert found.sources["nics.ib-hdr.count"] == "My server's manual, 2026"
    assert found.to_dict()["device"] == "l40s"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('device = "l40s"', 'device = "l40x"', "unknown device 'l40x'"),
        ('device = "l40s"\n', "", "'device' is missing"),
        ('"pcie-tree"', '"pcie"', "did you mean 'pcie-tree'"),
        ('link = "pcie"', 'link = "nvlink"', "l40s has no link 'nvlink'"),
        ('count = [4, "sheet"]\ntopology', "topology", "'count' is missing"),
        ('"ib-hdr"', '"ib-hdx"', "did you mean 'ib-hdr'"),
        ("host_memory", "memory", "did you mean 'host_memory'"),
        ('network = "ib-hdr"', 'net = "ib-hdr"', "unknown key 'net'"),
    ],
)
def test_bad_node_files(tmp_path, old, new, said):
    path = tmp_path / "my-box.toml"
    assert old in NODE
    path.write_text(NODE.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_node(path)
    assert said in str(caught.value)
    assert "my-box.toml" in str(caught.value)
