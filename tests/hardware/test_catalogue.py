"""Names, aliases, folders; every shipped file obeys the rules."""

import contextlib
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import InputError, UnknownNameError
from foretell.hardware import Catalogue, Device, add_devices, catalogue, device, devices
from foretell.hardware import catalogue as catalogue_function
from foretell.hardware import loader as loader_module
from foretell.hardware.catalogue import fold
from foretell.hardware.loader import DATA

catalogue_module = __import__("foretell.hardware.catalogue", fromlist=["catalogue"])

# Names that people ask for.
NEEDED = frozenset(
    word
    for line in (
        "a100-sxm4-80gb a100-sxm4-40gb a100-pcie-40gb a100-pcie-80gb h100-sxm h100-pcie h100-nvl",
        "h800-sxm h200-sxm b200-sxm gb200 b300-sxm gb300 v100-sxm2-16gb v100-sxm2-32gb v100-pcie-16gb",
        "v100-pcie-32gb p100-pcie-16gb p100-sxm2-16gb p4 t4 k80 m40 a10 a10g a30 a40 l4 l40s gtx-980",
        "gtx-1080-ti titan-x-maxwell titan-x-pascal titan-xp titan-v titan-rtx rtx-2080-ti rtx-3070",
        "rtx-3090 rtx-3090-ti rtx-4060 rtx-4090 rtx-5090 quadro-rtx-6000 quadro-rtx-8000 rtx-a4000",
        "rtx-a5000 rtx-a6000 rtx-6000-ada rtx-pro-6000-server rtx-pro-6000-workstation",
        "rtx-pro-6000-maxq mi25 vega-fe mi100 mi210 mi250 mi300x gaudi-2 tpu-v5p i7-12700h i9-10940x",
    )
    for word in line.split()
)

# Spellings found in public measurement tables, and by drivers.
SPELLINGS = {
    "NVIDIA A100-SXM4-80GB": "a100-sxm4-80gb",
    "NVIDIA_A100-SXM4-40GB": "a100-sxm4-40gb",
    "A100-SXM-80GB": "a100-sxm4-80gb",
    "A100 80GB SXM4": "a100-sxm4-80gb",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA_A100_80GB_PCIe": "a100-pcie-80gb",
    "A100-PCIE-80GB": "a100-pcie-80gb",
    "A800-SXM4-80GB": "a800-sxm4-80gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "h100_sxm": "h100-sxm",
    "H100 80GB SXM5": "h100-sxm",
    "NVIDIA H100 SXM": "h100-sxm",
    "NVIDIA_H100_PCIe": "h100-pcie",
    "H100 80GB PCIe Gen5": "h100-pcie",
    "H800": "h800-sxm",
    "NVIDIA H200": "h200-sxm",
    "h200_sxm": "h200-sxm",
    "NVIDIA_H200_NVL": "h200-nvl",
    "NVIDIA_GH200_480GB": "gh200-96gb",
    "NVIDIA B200": "b200-sxm",
    "b200_sxm": "b200-sxm",
    "NVIDIA B300 SXM6 AC": "b300-sxm",
    "NVIDIA GB200": "gb200",
    "NVIDIA GB200 SXM": "gb200",
    "NVIDIA GB300": "gb300",
    "Tesla V100-SXM2-16GB": "v100-sxm2-16gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
    "Tesla P100-PCIE-16GB": "p100-pcie-16gb",
    "Tesla P4": "p4",
    "NVIDIA Tesla T4": "t4",
    "NV_T4": "t4",
    "NV_M40": "m40",
    "NV_1080Ti": "gtx-1080-ti",
    "GeForce_GTX_1080_Ti": "gtx-1080-ti",
    "1080 Ti": "gtx-1080-ti",
    "gtx980": "gtx-980",
    "NV_TitanX_Pascal": "titan-x-pascal",
    "NV_TitanXp": "titan-xp",
    "titanxp": "titan-xp",
    "Titan V": "titan-v",
    "titan_rtx": "titan-rtx",
    "TITAN_RTX": "titan-rtx",
    "2080 Ti": "rtx-2080-ti",
    "GeForce_RTX_2080_Ti": "rtx-2080-ti",
    "rtx3090": "rtx-3090",
    "NVIDIA GeForce RTX 3090 Ti": "rtx-3090-ti",
    "4090": "rtx-4090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "5090": "rtx-5090",
    "Quadro_RTX_6000": "quadro-rtx-6000",
    "Quadro RTX 8000": "quadro-rtx-8000",
    "NVIDIA_RTX_A4000": "rtx-a4000",
    "RTX_A5000": "rtx-a5000",
    "A6000": "rtx-a6000",
    "NVIDIA RTX A6000": "rtx-a6000",
    "RTX 6000 Ada": "rtx-6000-ada",
    "NVIDIA_RTX_6000_Ada_Generation": "rtx-6000-ada",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000-server",
    "rtx_pro_6000_server": "rtx-pro-6000-server",
    "pro6000maxq": "rtx-pro-6000-maxq",
    "NVIDIA A10G": "a10g",
    "NVIDIA L40S": "l40s",
    "AMD_MI25": "mi25",
    "AMD_VegaFE": "vega-fe",
    "AMD Instinct MI300X": "mi300x",
    "AMD_Instinct_MI210": "mi210",
    "Intel Gaudi 2": "gaudi-2",
    "Intel(R) Graphics [0xe211]": "arc-pro-b60",
    "Intel(R) Arc(TM) Pro B60 Graphics": "arc-pro-b60",
    "12th Gen Intel(R) Core(TM) i7-12700H": "i7-12700h",
    "Intel(R) Core(TM) i9-10940X CPU @ 3.30GHz": "i9-10940x",
    "cpu-i9_10940x": "i9-10940x",
}

# Spellings that leave open which device: never answered with a default.
AMBIGUOUS = {
    "a100": {"a100-pcie-40gb", "a100-pcie-80gb", "a100-sxm4-40gb", "a100-sxm4-80gb"},
    "a100_sxm": {"a100-sxm4-40gb", "a100-sxm4-80gb"},
    "NVIDIA H100": {"h100-nvl", "h100-pcie", "h100-sxm"},
    "V100": {"v100-pcie-16gb", "v100-pcie-32gb", "v100-sxm2-16gb", "v100-sxm2-32gb", "v100-sxm3-32gb"},
    "Tesla P100": {"p100-pcie-12gb", "p100-pcie-16gb", "p100-sxm2-16gb"},
    "titanx": {"titan-x-maxwell", "titan-x-pascal"},
    "rtx pro 6000": {"rtx-pro-6000-maxq", "rtx-pro-6000-server", "rtx-pro-6000-workstation"},
}


def test_there_are_enough_devices():
    assert len(devices()) >= 150
    assert list(devices()) == sorted(devices())
    assert not NEEDED - set(devices())


@pytest.mark.parametrize("path", sorted((DATA / "devices").glob("*.toml")), ids=lambda p: p.stem)
def test_every_file_states_a_source_for_every_number(path):
    """Read with nothing but tomllib: no bare number anywhere, no unused source, no alias outside aliases.toml."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    sources = data.pop("sources")
    used = set()

    def walk(value, key):
        assert not isinstance(value, int | float), f"{key} has no source"
        if isinstance(value, dict):
            for inner, item in value.items():
                walk(item, f"{key}.{inner}")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for item in value:
                walk(item, key)
        elif isinstance(value, list):
            assert len(value) == 2, key
            assert value[1] in sources, key
            used.add(value[1])

    assert "aliases" not in data
    for key, value in data.items():
        walk(value, key)
    assert used == set(sources)
    assert all(len(text) > 10 for text in sources.values())
    for key, text in sources.items():
        if key in ("cloud", "price"):
            assert "20" in text, "prices carry a date"


@pytest.mark.parametrize("name", devices())
def test_every_device_loads_with_sources_for_its_fields(name):
    found = device(name)
    assert found.name == name
    for field in ("launch_year", "multiprocessors", "memory_bytes", "memory_bandwidth_bytes_per_s", "tdp_w"):
        if getattr(found, field) is not None:
            assert found.sources[field]
    for key in found.peaks:
        assert found.sources[f"peaks.{key}"]
    for alias in found.aliases:
        assert device(alias).name == name


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling):
    assert device(spelling).name == SPELLINGS[spelling]


@pytest.mark.parametrize("spelling", AMBIGUOUS)
def test_a_shared_name_is_no_device(spelling):
    with pytest.raises(UnknownNameError) as caught:
        device(spelling)
    assert set(caught.value.near) - {"titan-xp"} == AMBIGUOUS[spelling]
    assert "no default" in caught.value.hint
    assert all(name in caught.value.hint for name in AMBIGUOUS[spelling])


@pytest.mark.parametrize(
    ("wrong", "near"), [("rtx4009", "rtx-4090"), ("h200-sx", "h200-sxm"), ("mi300", "mi300x"), ("gaudi", "gaudi-2")]
)
def test_unknown_names_list_near_ones(wrong, near):
    with pytest.raises(UnknownNameError) as caught:
        device(wrong)
    assert near in caught.value.near
    assert caught.value.exit_code == 2


def test_a_name_far_from_all_lists_some():
    with pytest.raises(UnknownNameError, match="known: ") as caught:
        device("qqqq")
    assert caught.value.known == devices()


@settings(deadline=None)  # files are read on first use, slowly on a busy machine
@given(st.sampled_from(devices()), st.randoms(use_true_random=False))
def test_case_and_separators_do_not_matter(name, random):
    spelling = "".join(random.choice((c.upper(), c)) if c != "-" else random.choice("-_ ./") for c in name)
    assert device(spelling).name == name


@settings(deadline=None)  # files are read on first use, slowly on a busy machine
@given(st.text())
def test_any_text_either_names_a_device_or_raises_unknown(text):
    with contextlib.suppress(UnknownNameError):
        assert isinstance(device(text), Device)


def test_fold_never_folds_a_whole_name_away():
    assert fold("NVIDIA") == "nvidia"
    assert fold("nvidia nvidia a40") == "a40"
    with pytest.raises(UnknownNameError):
        device("")


# --- folders of the user's own

MINE = """
title = "My accelerator"
vendor = "Me"
kind = "accelerator"
architecture = "Mine"
aliases = ["my favourite"]
memory = ["16 GiB", "sheet"]
[peaks]
"bf16.tensor" = ["100 TFLOP/s", "sheet"]
[sources]
sheet = "My data sheet, 2026"
"""


def write(folder: Path, name: str, text: str = MINE) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_extra_folder(tmp_path):
    write(tmp_path, "mine")
    found = catalogue(extra_dir=tmp_path)
    assert found.device("My Favourite").memory_bytes == 16 * 2**30
    assert "mine" in found.names
    assert "h100-sxm" in found.names
    with pytest.raises(UnknownNameError):
        device("mine")


def test_folder_from_the_environment(tmp_path, monkeypatch):
    write(tmp_path, "mine")
    monkeypatch.setenv("FORETELL_DEVICES", str(tmp_path))
    assert device("mine").title == "My accelerator"
    assert "mine" in devices()
    monkeypatch.delenv("FORETELL_DEVICES")
    assert "mine" not in devices()
    monkeypatch.setenv("FORETELL_DEVICES", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="no such folder"):
        device("h100-sxm")


def test_add_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue_module, "_added", ())
    write(tmp_path, "mine")
    assert add_devices(tmp_path) == ("mine",)
    assert device("mine").vendor == "Me"


def test_a_file_of_another_kind_in_the_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue_module, "_added", ())
    write(tmp_path, "mine")
    write(tmp_path, "pyproject", "[project]\nname = 'x'\n")
    with pytest.raises(InputError, match=r"pyproject\.toml: describes no device.*use a folder that holds device files"):
        add_devices(tmp_path)
    (tmp_path / "pyproject.toml").rename(tmp_path / "My Settings.toml")
    with pytest.raises(InputError, match="single dashes; use a folder that holds device files only"):
        add_devices(tmp_path)


def test_a_bad_folder_adds_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue_module, "_added", ())
    write(tmp_path, "mine", "title = 3")
    with pytest.raises(InputError):
        add_devices(tmp_path)
    assert catalogue_module._added == ()
    assert device("h100-sxm").name == "h100-sxm"


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("h100-sxm", MINE, "exists already"),
        ("local", MINE, "reserved"),
        ("h100sxm", MINE, "would mean both"),
        ("mine", MINE.replace("my favourite", "NVIDIA H100-PCIe"), "would mean both"),
        ("Mine", MINE, "file name"),
        ("my--chip", MINE, "file name"),
    ],
)
def test_names_must_stay_unambiguous(tmp_path, name, text, why):
    write(tmp_path, name, text)
    with pytest.raises(InputError, match=why):
        Catalogue(tmp_path)


# --- cost of looking


@pytest.fixture
def read_files(monkeypatch):
    read = []
    real = loader_module.read_toml
    monkeypatch.setattr(loader_module, "read_toml", lambda path: (read.append(path.name), real(path))[1])
    return read


def test_one_device_reads_one_device_file(read_files):
    Catalogue().device("a100-sxm4-80gb")
    assert [name for name in read_files if name != "compute_capability.toml"] == ["a100-sxm4-80gb.toml"]


def test_a_device_is_read_once(read_files):
    fresh = Catalogue()
    assert fresh.device("A40") is fresh.device("a40")
    assert read_files.count("a40.toml") == 1


def test_the_whole_catalogue_loads_quickly(within):
    """0.3 s is the aim, 0.12 s usual."""

    def load():
        fresh = Catalogue()
        return [fresh.device(name).name for name in fresh.names]

    assert within(0.3, load)
    assert catalogue_function().names == devices()
