"""The catalogue's numbers against what they must be by the chips' structure.

`PER_CLOCK` and `BUS` are constants of the architectures, from other documents than the data sheets the catalogue
quotes, so that a slip (a sparse peak for a dense one, a board for a chip, GB/s for Gb/s) shows.
"""

import pytest

from foretell.hardware import cluster, device, devices, node, nodes

# fp32 FLOP per SM and clock = 2 × CUDA cores per SM.
# Source: CUDA C++ Best Practices and Programming Guides, throughput of native arithmetic instructions ("32-bit
# floating-point add, multiply, multiply-add", results per clock and SM), times two.
FP32_PER_CLOCK = dict.fromkeys(["3.5", "3.7"], 2 * 192)
FP32_PER_CLOCK |= dict.fromkeys(["6.0", "7.0", "7.5", "8.0"], 2 * 64)
FP32_PER_CLOCK |= dict.fromkeys(["5.2", "6.1", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0"], 2 * 128)
# fp16 tensor FLOP per SM and clock, fp32 accumulators: 2 × (tensor cores per SM) × (fused multiply-adds per core).
# Source: the tensor-core sections of the architecture white papers: Volta 8 × 64, GA100 4 × 256, GH100 4 × 512,
# GB100 4 × 1024; GA10x, Ada, GB20x 4 × 128 on professional boards; GeForce boards run fp32 accumulation at half of
# that rate (Turing 8 × 64 halved likewise).
PROFESSIONAL, GEFORCE = 2 * 4 * 128, 4 * 128
TENSOR_PER_CLOCK = {"7.0": 2 * 8 * 64, "8.0": 2 * 4 * 256, "8.7": 2 * 4 * 256}
# Clocks at which vendors quote tensor peaks, where they are not the boost clock (H100 white paper, table 3).
TENSOR_CLOCK_HZ = {"h100-sxm": 1830e6, "h200-sxm": 1830e6, "h800-sxm": 1830e6, "h100-pcie": 1620e6}
# L40 and L20 are professional boards whose sheets give GeForce's rate; the A10G too.
HALF_RATE = {"l40", "l20", "a10g"}


def nvidia():
    return [d for d in map(device, devices()) if d.vendor == "NVIDIA" and d.kind == "gpu"]


@pytest.mark.parametrize("found", nvidia(), ids=lambda d: d.name)
def test_fp32_is_cores_times_clock(found):
    peak = found.peak("fp32", "vector")
    if peak is None or found.boost_clock_hz is None:
        assert found.name in {"gb10", "gb300"}
        return
    if found.name == "h20":  # its sheet gives 44 TFLOP/s for 78 SMs, which the listed clock does not reach
        return
    expected = found.multiprocessors * FP32_PER_CLOCK[found.compute_capability] * found.boost_clock_hz
    assert peak == pytest.approx(expected, rel=0.035)


@pytest.mark.parametrize("found", nvidia(), ids=lambda d: d.name)
def test_fp16_tensor_is_dense_with_fp32_accumulators(found):
    peak = found.peak("fp16", "tensor")
    if peak is None:
        assert float(found.compute_capability) < 7 or found.name in {"gb10", "jetson-thor-t5000"}
        return
    if found.name in {"h20", "titan-v", "gb300", "h100-nvl", "h200-nvl"}:
        return  # cut-down tensor cores, or a tensor clock that NVIDIA does not publish: bounded below
    clock = TENSOR_CLOCK_HZ.get(found.name, found.boost_clock_hz)
    geforce = "GeForce" in found.title or found.name in HALF_RATE
    if found.name.startswith("gh200"):
        clock = 1830e6
    rate = TENSOR_PER_CLOCK.get(found.compute_capability)
    if rate is None and found.compute_capability in ("9.0", "10.0", "10.3"):
        rate = {"9.0": 2 * 4 * 512, "10.0": 2 * 4 * 1024, "10.3": 2 * 4 * 1024}[found.compute_capability]
    elif rate is None:
        rate = GEFORCE if geforce else PROFESSIONAL
    # Blackwell's sheets are quoted some 5 to 9 % under the maximum clock.
    tolerance = {"10.0": 0.08, "10.3": 0.1}.get(str(found.compute_capability), 0.03)
    assert peak == pytest.approx(found.multiprocessors * rate * clock, rel=tolerance)


@pytest.mark.parametrize("found", nvidia(), ids=lambda d: d.name)
def test_no_sparsity_slipped_in(found):
    """Sparse rates are twice dense ones, so a mixed-up sheet breaks these ratios between formats."""
    peaks = found.peaks
    for low, high in (("fp16", "fp8"), ("fp16", "int8")):
        if f"{low}.tensor" in peaks and f"{high}.tensor" in peaks and found.architecture != "Blackwell Ultra":
            ratio = peaks[f"{high}.tensor"] / peaks[f"{low}.tensor"]
            assert ratio == pytest.approx(2, rel=0.03) or ratio == pytest.approx(4, rel=0.03)
    if "bf16.tensor" in peaks:
        assert peaks["bf16.tensor"] == peaks["fp16.tensor"]
    if "tf32.tensor" in peaks:
        assert peaks["tf32.tensor"] == pytest.approx(peaks["bf16.tensor"] / 2, rel=0.03)
    if "fp16acc16.tensor" in peaks:
        assert peaks["fp16acc16.tensor"] == pytest.approx(2 * peaks["fp16.tensor"], rel=0.01)


# FLOP per SM and clock of the other vector formats: 2 × results per clock and SM.
# Source: CUDA C++ Programming Guide, throughput of native arithmetic instructions, rows "16-bit floating-point add,
# multiply, multiply-add" (two results per half2 instruction) and "64-bit floating-point add, multiply, multiply-add".
FP64_PER_CLOCK = {"3.5": 128, "3.7": 128, "6.0": 64, "7.0": 64, "8.0": 64, "9.0": 128, "10.0": 128, "10.3": 4}
FP64_PER_CLOCK |= dict.fromkeys(["5.2", "6.1"], 8) | dict.fromkeys(["7.5", "8.6", "8.9", "12.0"], 4)
FP16_PER_CLOCK = {"6.0": 256, "6.1": 4, "7.0": 256, "7.5": 256, "8.0": 512, "9.0": 512}
FP16_PER_CLOCK |= dict.fromkeys(["8.6", "8.9", "12.0"], 256)
EXPORT = {"h20", "h800-sxm"}  # fp64 cut down for export


@pytest.mark.parametrize("found", nvidia(), ids=lambda d: d.name)
def test_fp64_and_fp16_vector_rates_are_the_guides(found):
    for dtype, table in (("fp64", FP64_PER_CLOCK), ("fp16", FP16_PER_CLOCK)):
        peak = found.peak(dtype, "vector")
        if peak is None or found.boost_clock_hz is None or (dtype == "fp64" and found.name in EXPORT):
            continue
        if found.compute_capability == "8.7":  # Orin, which the guide's table leaves out
            continue
        expected = found.multiprocessors * table[found.compute_capability] * found.boost_clock_hz
        assert peak == pytest.approx(expected, rel=0.04), dtype


# FLOP per compute unit and clock, dense. Source: AMD's Vega, CDNA, CDNA 2 and CDNA 3 white papers, tables of operations
# per clock and compute unit; CDNA 4 and RDNA 3 and 4 architecture presentations.
GCN5 = {"fp32.vector": 128, "fp16.vector": 256}
AMD_PER_CLOCK = {
    "mi25": GCN5 | {"fp64.vector": 8},
    "vega-fe": GCN5 | {"fp64.vector": 8},
    "mi50-16gb": GCN5 | {"fp64.vector": 64, "int8.vector": 512},
    "mi60": GCN5 | {"fp64.vector": 64, "int8.vector": 512},
    "radeon-pro-w7900": {"fp32.vector": 256, "fp16.tensor": 512, "bf16.tensor": 512},
    "rx-7900-xtx": {"fp32.vector": 256, "fp16.tensor": 512, "bf16.tensor": 512},
}
CDNA = {"fp64.vector": 64, "fp32.vector": 128, "fp32.tensor": 256, "bf16.tensor": 512}
CDNA |= dict.fromkeys(["fp16.tensor", "int8.tensor"], 1024)
RDNA4 = {"fp32.vector": 256} | dict.fromkeys(["fp16.tensor", "bf16.tensor"], 1024)
RDNA4 |= dict.fromkeys(["fp8.tensor", "int8.tensor"], 2048)
CDNA2 = dict.fromkeys(["fp64.vector", "fp32.vector"], 128) | dict.fromkeys(["fp64.tensor", "fp32.tensor"], 256)
CDNA2 |= dict.fromkeys(["bf16.tensor", "fp16.tensor", "int8.tensor"], 1024)
CDNA3 = {"fp64.vector": 128} | dict.fromkeys(["fp32.vector", "fp64.tensor", "fp32.tensor"], 256)
CDNA3 |= {"tf32.tensor": 1024} | dict.fromkeys(["bf16.tensor", "fp16.tensor"], 2048)
CDNA3 |= dict.fromkeys(["fp8.tensor", "int8.tensor"], 4096)
CDNA4 = dict.fromkeys(["fp64.vector", "fp64.tensor"], 128) | dict.fromkeys(["fp32.vector", "fp32.tensor"], 256)
CDNA4 |= dict.fromkeys(["bf16.tensor", "fp16.tensor"], 4096) | dict.fromkeys(["fp8.tensor", "int8.tensor"], 8192)
CDNA4 |= dict.fromkeys(["fp6.tensor", "fp4.tensor"], 16384)
AMD_PER_CLOCK |= {"mi100": CDNA, "rx-9070-xt": RDNA4}
AMD_PER_CLOCK |= dict.fromkeys(["mi210", "mi250", "mi250x"], CDNA2)
AMD_PER_CLOCK |= dict.fromkeys(["mi300a", "mi300x", "mi325x"], CDNA3) | dict.fromkeys(["mi350x", "mi355x"], CDNA4)


@pytest.mark.parametrize("name", [d.name for d in map(device, devices()) if d.vendor == "AMD" and d.kind == "gpu"])
def test_amd_peaks_are_compute_units_times_clock(name):
    found = device(name)
    assert set(found.peaks) == set(AMD_PER_CLOCK[name])
    for key, rate in AMD_PER_CLOCK[name].items():
        expected = found.multiprocessors * rate * found.boost_clock_hz
        assert found.peaks[key] == pytest.approx(expected, rel=0.006), key


# Matrix units per core, each of 128 × 128 multiply-adds per clock. Source: Jouppi et al., ISCA 2023, table 4 (v4 and
# v3), and CACM 2020 (v2).
@pytest.mark.parametrize(("name", "units"), [("tpu-v2", 1), ("tpu-v3", 2), ("tpu-v4", 4)])
def test_tpu_peaks_are_matrix_units_times_clock(name, units):
    found = device(name)
    expected = found.multiprocessors * units * 2 * 128**2 * found.boost_clock_hz
    assert found.peaks["bf16.tensor"] == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize("name", ["xeon-8480-plus", "xeon-8592-plus", "xeon-6980p"])
def test_amx_multiplies_one_pair_of_tiles_in_sixteen_cycles(name):
    """A tile is 16 rows of 64 bytes: 32 bf16 or 64 int8 (Intel 64 and IA-32 optimization manual, AMX)."""
    found = device(name)
    per_clock = found.multiprocessors * found.boost_clock_hz * 2 * 16 * 16 / 16
    assert found.peaks["bf16.tensor"] == pytest.approx(32 * per_clock, rel=0.005)
    assert found.peaks["int8.tensor"] == pytest.approx(64 * per_clock, rel=0.005)


COMMON = ["v100-sxm2-16gb", "t4", "a10g", "a100-sxm4-40gb", "a100-sxm4-80gb", "l4", "l40s", "h100-sxm", "h200-sxm"]


@pytest.mark.parametrize("name", COMMON)
def test_common_accelerators_have_a_dated_hourly_price(name):
    found = device(name)
    assert found.price_usd_per_h is not None
    assert "20" in found.sources["price_usd_per_h"]


# Memory bus width (bits) and data rate per pin (bit/s): TechPowerUp GPU database and the memory makers' parts.
BUS = {
    "k80": (384, 5.0e9),
    "m40": (384, 6.0e9),
    "gtx-980": (256, 7.0e9),
    "titan-x-maxwell": (384, 7.0e9),
    "titan-x-pascal": (384, 10.0e9),
    "titan-xp": (384, 11.4e9),
    "gtx-1080-ti": (352, 11.0e9),
    "p4": (256, 6.0e9),
    "p40": (384, 7.2e9),
    "p100-pcie-16gb": (4096, 1.43e9),
    "p100-sxm2-16gb": (4096, 1.43e9),
    "v100-sxm2-16gb": (4096, 1.752e9),
    "v100-pcie-32gb": (4096, 1.752e9),
    "v100-sxm3-32gb": (4096, 1.752e9),
    "p100-pcie-12gb": (3072, 1.43e9),
    "titan-v": (3072, 1.7e9),
    "t4": (256, 10.0e9),
    "rtx-2080-ti": (352, 14.0e9),
    "titan-rtx": (384, 14.0e9),
    "quadro-rtx-8000": (384, 14.0e9),
    "a10": (384, 12.5e9),
    "a30": (3072, 2.43e9),
    "a40": (384, 14.5e9),
    "a100-sxm4-40gb": (5120, 2.43e9),
    "a100-pcie-40gb": (5120, 2.43e9),
    "a100-sxm4-80gb": (5120, 3.186e9),
    "a100-pcie-80gb": (5120, 3.024e9),
    "rtx-a4000": (256, 14.0e9),
    "rtx-a5000": (384, 16.0e9),
    "rtx-a6000": (384, 16.0e9),
    "rtx-3060": (192, 15.0e9),
    "rtx-3070": (256, 14.0e9),
    "rtx-3080": (320, 19.0e9),
    "rtx-3090": (384, 19.5e9),
    "rtx-3090-ti": (384, 21.0e9),
    "rtx-4060": (128, 17.0e9),
    "rtx-4070": (192, 21.0e9),
    "rtx-4080": (256, 22.4e9),
    "rtx-4090": (384, 21.0e9),
    "l4": (192, 12.5e9),
    "l40": (384, 18.0e9),
    "l40s": (384, 18.0e9),
    "rtx-6000-ada": (384, 20.0e9),
    "h100-sxm": (5120, 5.24e9),
    "h100-pcie": (5120, 3.186e9),
    "rtx-5070": (192, 28.0e9),
    "rtx-5080": (256, 30.0e9),
    "rtx-5090": (512, 28.0e9),
    "rtx-pro-6000-workstation": (512, 28.0e9),
    "rtx-pro-6000-maxq": (512, 28.0e9),
    "rtx-pro-6000-server": (512, 24.96e9),
    "mi25": (2048, 1.89e9),
    "mi100": (4096, 2.4e9),
    "mi210": (4096, 3.2e9),
    "mi250": (4096, 3.2e9),
    "mi300x": (8192, 5.2e9),
    "mi325x": (8192, 5.86e9),
    "mi355x": (8192, 7.8e9),
    "arc-b580": (192, 19.0e9),
    "i7-12700h": (128, 4.8e9),
    "i9-10940x": (256, 2.933e9),
    "epyc-9654": (12 * 64, 4.8e9),
    "xeon-6980p": (12 * 64, 8.8e9),
    "graviton4": (12 * 64, 5.6e9),
}


@pytest.mark.parametrize("name", BUS)
def test_bandwidth_is_bus_width_times_data_rate(name):
    bits, rate = BUS[name]
    assert device(name).memory_bandwidth_bytes_per_s == pytest.approx(bits * rate / 8, rel=0.012)


# As printed in the vendors' white papers: checks of peaks that the catalogue derives.
PUBLISHED_TFLOPS = {
    ("rtx-2080-ti", "fp16acc16.tensor"): 107.6,
    ("rtx-2080-ti", "fp16.tensor"): 53.8,
    ("quadro-rtx-6000", "fp16.tensor"): 130.5,
    ("titan-rtx", "fp32.vector"): 16.3,
    ("rtx-3070", "fp16.tensor"): 40.6,
    ("rtx-3080", "fp16acc16.tensor"): 119,
    ("rtx-3090", "fp16.tensor"): 71,
    ("rtx-3090", "tf32.tensor"): 35.6,
    ("rtx-3090", "int8.tensor"): 284,
    ("rtx-a6000", "fp16.tensor"): 154.8,
    ("rtx-a6000", "tf32.tensor"): 77.4,
    ("rtx-4080", "fp16.tensor"): 97.5,
    ("rtx-4090", "fp16.tensor"): 165.2,
    ("rtx-4090", "fp16acc16.tensor"): 330.3,
    ("rtx-4090", "fp8.tensor"): 330.3,
    ("rtx-4090", "fp8acc16.tensor"): 660.6,
    ("rtx-6000-ada", "fp32.vector"): 91.1,
    ("rtx-6000-ada", "fp8.tensor"): 728.5,
    ("rtx-5090", "fp16.tensor"): 209.5,
    ("rtx-5090", "fp4.tensor"): 1676,
    ("rtx-5080", "fp32.vector"): 56.3,
    ("rtx-pro-6000-workstation", "bf16.tensor"): 503.8,
    ("rtx-pro-6000-maxq", "fp4.tensor"): 3511 / 2,
    ("gtx-1080-ti", "fp32.vector"): 11.3,
    ("gtx-1080-ti", "fp16.vector"): 0.177,
    ("gtx-980", "fp32.vector"): 4.98,
    ("k80", "fp32.vector"): 8.73 / 2,
    ("titan-xp", "fp32.vector"): 12.15,
}


@pytest.mark.parametrize(("name", "key"), PUBLISHED_TFLOPS)
def test_derived_peaks_match_the_white_papers(name, key):
    assert device(name).peaks[key] / 1e12 == pytest.approx(PUBLISHED_TFLOPS[name, key], rel=0.01)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("v100-sxm2-32gb", "a100-sxm4-80gb"),
        ("a100-sxm4-80gb", "h100-sxm"),
        ("h100-sxm", "b200-sxm"),
        ("b200-sxm", "gb200"),
        ("t4", "l4"),
        ("rtx-2080-ti", "rtx-3090"),
        ("rtx-3090", "rtx-4090"),
        ("rtx-4090", "rtx-5090"),
        ("mi100", "mi300x"),
        ("mi300x", "mi355x"),
        ("gaudi-2", "gaudi-3"),
        ("tpu-v4", "tpu-v5p"),
        ("tpu-v5p", "tpu-v7"),
    ],
)
def test_generations_grow(older, newer):
    old, new = device(older), device(newer)
    assert new.launch_year >= old.launch_year
    assert new.memory_bytes >= 0.99 * old.memory_bytes  # drivers report slightly different totals for equal chips
    dtype = "bf16" if old.peak("bf16") else "fp16"
    assert new.peak(dtype) > old.peak(dtype)


@pytest.mark.parametrize("name", devices())
def test_values_are_plausible(name):
    """Wide bounds that only a slip of units leaves."""
    found = device(name)
    assert 2012 <= found.launch_year <= 2026
    assert all(5e10 < peak < 2e16 for peak in found.peaks.values())
    assert found.peaks
    assert found.memory_bandwidth_bytes_per_s is not None
    assert 5e10 < found.memory_bandwidth_bytes_per_s < 1e13
    if found.memory_bytes is not None:
        assert 2**31 <= found.memory_bytes <= 2**39
    if found.kind == "gpu" and found.vendor == "NVIDIA":
        assert found.memory_bytes is not None
        assert found.multiprocessors is not None
        assert found.max_warps_per_sm is not None
    for watts in (found.tdp_w, found.idle_w):
        assert watts is None or 5 <= watts <= 1500
    if found.idle_w and found.tdp_w:
        assert found.idle_w < found.tdp_w / 3
    if found.base_clock_hz and found.boost_clock_hz:
        assert 3e8 < found.base_clock_hz <= found.boost_clock_hz < 6.5e9
    if found.memory_bytes and found.l2_bytes:
        assert found.l2_bytes < found.memory_bytes / 20
    if found.price_usd_per_h:
        assert 0.2 < found.price_usd_per_h < 20
    tensor, vector = found.peak("fp16", "tensor"), found.peak("fp32", "vector")
    if tensor and vector:
        assert 1.9 < tensor / vector < 33


def test_nodes_are_plausible():
    for name in nodes():
        found = node(name)
        assert found.memory_bytes > 2**35
        assert found.topology != "single"
        if found.power_w and found.device.tdp_w:
            assert found.count * found.device.tdp_w < found.power_w
        if found.price_usd_per_h and found.device.price_usd_per_h:
            per_device = found.price_usd_per_h / found.count
            assert per_device == pytest.approx(found.device.price_usd_per_h, rel=1.6)


def test_bandwidths_of_known_fabrics():
    """GB/s each way per device, from the systems' own data sheets (which print both ways together)."""
    per_device = {"dgx-1v": 150, "dgx-a100": 300, "dgx-h100": 450, "dgx-b200": 900, "gb200-nvl72": 900, "hgx-h800": 200}
    for name, expected in per_device.items():
        assert node(name).link.total_bandwidth_bytes_per_s / 1e9 == expected
    assert node("mi300x-8x").link.total_bandwidth_bytes_per_s * 2 / 1e9 == 896  # "896 GB/s peak aggregate"
    assert cluster("2x dgx-h100").network.total_bandwidth_bytes_per_s == 400e9  # 8 × 400 Gb/s
    assert cluster("2x p5-48xlarge").network.total_bandwidth_bytes_per_s == 400e9  # "3200 Gbps"
    assert cluster("2x p4d-24xlarge").network.total_bandwidth_bytes_per_s == 50e9  # "400 Gbps"
