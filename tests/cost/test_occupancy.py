"""Occupancy against NVIDIA's own calculator, its documents, and a profiler's table."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretell.accuracy import occupancy as table
from foretell.accuracy.slices import data_folder
from foretell.cost import occupancy as oc
from foretell.errors import InputError, UnknownNameError
from foretell.hardware import device
from foretell.hardware.loader import compute_capabilities

# Asks cuda_occupancy.h, which comes with CUDA, for every line "registers shared block barriers" it reads.
PROGRAM = """
#include <climits>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include "cuda_occupancy.h"
int main(int, char** v) {
  cudaOccDeviceProp p; cudaOccFuncAttributes a; cudaOccDeviceState s; cudaOccResult r;
  p.computeMajor = atoi(v[1]); p.computeMinor = atoi(v[2]); p.maxThreadsPerBlock = atoi(v[3]);
  p.maxThreadsPerMultiprocessor = atoi(v[4]); p.regsPerBlock = atoi(v[5]); p.regsPerMultiprocessor = atoi(v[6]);
  p.warpSize = 32; p.sharedMemPerBlock = 48 << 10; p.sharedMemPerMultiprocessor = atoi(v[7]); p.numSms = 1;
  p.sharedMemPerBlockOptin = atoi(v[8]); p.reservedSharedMemPerBlock = atoi(v[9]);
  s.carveoutConfig = atoi(v[10]); s.cacheConfig = (cudaOccCacheConfig)atoi(v[11]);
  int regs, shared, block, barriers;
  while (scanf("%d %d %d %d", &regs, &shared, &block, &barriers) == 4) {
    a.maxThreadsPerBlock = INT_MAX; a.numRegs = regs; a.sharedSizeBytes = 0;
    a.partitionedGCConfig = PARTITIONED_GC_OFF; a.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    a.maxDynamicSharedSizeBytes = shared; a.numBlockBarriers = barriers; a.virtualResourceCount = 0;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &a, &s, block, shared) != CUDA_OCC_SUCCESS) return 1;
    printf("%d\\n", r.activeBlocksPerMultiprocessor);
  }
}
"""


def _header() -> Path | None:
    places = [
        Path("/usr/local").glob("cuda*/include"),
        Path(sys.prefix).glob("lib/python*/site-packages/triton/**/include"),
    ]
    return next((p for place in places for p in place if (p / "cuda_occupancy.h").is_file()), None)


@pytest.fixture(scope="module")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    header, compiler = _header(), shutil.which("g++")
    if header is None or compiler is None:
        pytest.skip("needs g++ and cuda_occupancy.h, which comes with CUDA and with Triton")
    folder = tmp_path_factory.mktemp("calculator")
    (folder / "ask.cpp").write_text(PROGRAM)
    subprocess.run([compiler, "-w", f"-I{header}", "ask.cpp", "-o", "ask"], cwd=folder, check=True)
    return folder / "ask"


def asked(
    calculator: Path, limits: oc.Limits, rows: tuple[np.ndarray, ...], carveout: int = -1, cache: int = 0
) -> np.ndarray:
    """Blocks by NVIDIA's calculator; `carveout` in per cent and `cache` (1 shared, 2 L1, 3 equal) are preferences."""
    assert limits.capability is not None
    major, minor = limits.capability.split(".")
    arguments = (
        *(major, minor, limits.max_threads_per_block, limits.max_warps * 32, limits.max_registers_per_block),
        *(limits.registers, limits.shared, limits.shared_per_block, limits.shared_reserved, carveout, cache),
    )
    lines = "\n".join(" ".join(map(str, row)) for row in zip(*rows, strict=True))
    answer = subprocess.run(
        [str(calculator), *map(str, arguments)], input=lines, capture_output=True, text=True, check=False
    )
    if answer.returncode:
        pytest.skip(f"this cuda_occupancy.h does not know {limits.capability}")
    return np.array(answer.stdout.split(), dtype=int)


def drawn(limits: oc.Limits, n: int) -> tuple[np.ndarray, ...]:
    """Registers, shared memory, block and barriers of `n` launches."""
    random = np.random.default_rng(7)
    shared = random.integers(0, limits.shared_per_block + 1024, n)
    return (
        random.integers(0, 256, n),
        np.where(random.random(n) < 0.3, 0, shared),
        random.integers(1, 1025, n),
        random.integers(0, 17, n),
    )


@pytest.mark.parametrize("capability", compute_capabilities())
def test_blocks_are_those_of_nvidias_calculator(calculator: Path, capability: str) -> None:
    limits = oc.limits(capability)
    rows = drawn(limits, 3000)
    found = oc.occupancy(limits, *rows[:3], barriers=rows[3])
    np.testing.assert_array_equal(found.blocks, asked(calculator, limits, rows))


@pytest.mark.parametrize("capability", compute_capabilities())
def test_carveouts_are_those_of_nvidias_calculator(calculator: Path, capability: str) -> None:
    limits = oc.limits(capability)
    rows = drawn(limits, 500)
    # Before 7.0 the preference is one of three; for L1 leaves 32 KiB less than is left without it.
    for percent, cache, bytes_less in ((0, 2, 32 << 10), (50, 3, 16 << 10), (87, 0, 0), (100, 1, 0)):
        recent = float(capability) >= 7
        preferred = percent * limits.shared // 100 if recent else limits.shared - bytes_less
        expected = asked(calculator, limits, rows, percent if recent else -1, 0 if recent else cache)
        found = oc.occupancy(limits, *rows[:3], barriers=rows[3], carveout_bytes=preferred)
        np.testing.assert_array_equal(found.blocks, expected)


@pytest.mark.parametrize(
    ("capability", "registers", "shared", "block", "blocks", "occupancy", "limiting"),
    [
        # CUDA C++ Best Practices Guide, "Calculating Occupancy": 37 registers, of 7.0's 65,536.
        ("7.0", 37, 0, 128, 12, 0.75, "registers"),
        ("7.0", 37, 0, 320, 4, 0.625, "registers"),
        # CUDA C++ Programming Guide, "Device Memory Accesses" on maxrregcount: 32 registers fill an SM of 2,048.
        ("8.0", 32, 0, 1024, 2, 1.0, "warps"),
        ("8.0", 33, 0, 1024, 1, 0.5, "registers"),
        # Hopper tuning guide: 228 KiB an SM, 227 KiB a block and 1 KiB reserved.
        ("9.0", 32, 227 << 10, 1024, 1, 0.5, "shared"),
        ("9.0", 32, 75 << 10, 256, 3, 0.375, "shared"),
        ("7.5", 16, 0, 32, 16, 0.5, "blocks"),
    ],
)
def test_published_examples(
    capability: str, registers: int, shared: int, block: int, blocks: int, occupancy: float, limiting: str
) -> None:
    one = oc.calculate(oc.limits(capability), registers, shared, block)
    assert (one.blocks, one.occupancy) == (blocks, occupancy)
    assert limiting in one.limiting


@pytest.mark.parametrize("capability", ["6.0", "7.5", "8.6", "9.0", "12.0"])
@pytest.mark.parametrize(("registers", "shared", "block"), [(72, 32 << 10, 256), (255, 0, 96), (40, 48 << 10, 1024)])
def test_changes_lift_and_are_the_least(capability: str, registers: int, shared: int, block: int) -> None:
    limits = oc.limits(capability)
    now = oc.calculate(limits, registers, shared, block)
    given = {"registers": registers, "shared_bytes": shared, "block": block}

    def at(knob: str, value: int) -> float:
        launch = given | {"shared_bytes" if knob == "shared" else knob: value}
        return float(oc.occupancy(limits, **launch).occupancy[0])

    seen: set[str] = set()
    for change in now.changes:
        assert at(change.knob, change.value) == change.occupancy > now.occupancy
        if change.knob not in seen and change.knob != "block":  # nothing nearer lifts it
            top, step = (registers, 1) if change.knob == "registers" else (shared, 64)
            assert all(at(change.knob, v) <= now.occupancy for v in range(change.value + 1, top, step))
        seen.add(change.knob)
    for knob, values in (
        ("registers", range(16, registers)),
        ("shared", range(0, shared, 128)),
        ("block", range(32, 1025, 32)),
    ):
        best = max([now.occupancy, *(at(knob, v) for v in values)])
        assert best == max([now.occupancy, *(c.occupancy for c in now.changes if c.knob == knob)])


def test_the_carveout_limits_what_is_shared() -> None:
    limits = oc.limits("8.0")
    assert oc.calculate(limits, 32, 15 << 10, 128).blocks == 10  # 164 KiB / 16 KiB
    assert oc.calculate(limits, 32, 15 << 10, 128, carveout_bytes=64 << 10).blocks == 4
    # A preference below what one block needs is raised to the next size that holds it.
    assert oc.calculate(limits, 32, 99 << 10, 128, carveout_bytes=8 << 10).blocks == 1
    one = oc.calculate(limits, 32, 15 << 10, 512)
    assert (one.blocks, one.carveout_bytes, one.l1_bytes) == (4, 64 << 10, 128 << 10)


@pytest.mark.parametrize(
    ("capability", "shared_kib", "carveout_kib", "blocks"),
    [
        ("5.0", 48, 1024, 1),  # 64 KiB of shared memory, fixed: one block of 48 however much is preferred
        ("5.0", 16, 16, 4),  # and four of 16, however little
        ("5.2", 48, 1024, 2),  # 96 KiB
        ("6.0", 48, 1 << 20, 1),
        ("6.0", 32, 8, 2),
        ("6.1", 32, 0, 3),
        ("3.5", 16, 16, 1),  # 16, 32 or 48 KiB of the 64 that it shares with L1
        ("3.5", 16, 17, 2),
        ("3.5", 16, 33, 3),
        ("3.5", 16, 1024, 3),
        ("3.5", 20, 16, 2),  # a block that the preference does not hold gets all 48
        ("3.7", 16, 0, 5),  # 80, 96 or 112 KiB
        ("3.7", 16, 90, 6),
        ("3.7", 16, 200, 7),
        ("9.0", 75, 1024, 3),  # 228 KiB hold three of 76
    ],
)
def test_a_carveout_is_one_that_the_hardware_has(
    capability: str, shared_kib: int, carveout_kib: int, blocks: int
) -> None:
    limits = oc.limits(capability)
    one = oc.calculate(limits, 16, shared_kib << 10, 128, carveout_bytes=carveout_kib << 10)
    assert one.blocks == one.limits["shared"] == blocks
    fixed = capability[0] in "56"
    assert one.carveout_bytes is None if fixed else one.carveout_bytes in limits.carveouts


def test_many_at_once_are_as_one_by_one() -> None:
    limits = oc.limits("8.6")
    columns = [column.tolist() for column in drawn(limits, 300)]
    columns[2][:3] = [1, 2000, 1024]
    columns[0][:3] = [400, 0, 255]
    together = oc.calculations(limits, *columns)
    assert together == [oc.calculate(limits, r, s, b, barriers=n) for r, s, b, n in zip(*columns, strict=True)]


def test_twenty_thousand_kernels_take_no_time(within: Any) -> None:

    limits = oc.limits("9.0")
    columns = [column.tolist() for column in drawn(limits, 20_000)]
    assert len(within(1.5, lambda: oc.calculations(limits, *columns))) == 20_000


def test_achieved_occupancy_of_grids_that_can_be_told_by_hand() -> None:
    limits, c = oc.limits("8.0"), oc.constants()

    def share(grid: int, block: int, blocks: int) -> float:
        return float(oc.achieved(limits, grid, block, blocks, 108)[0])

    assert share(1, 128, 16) == pytest.approx(4 / 64 / (1 + 4 * c["launch"]))  # one block: its warps of 64
    assert share(108, 128, 16) == share(1, 128, 16)  # one on each multiprocessor; idle ones do not count
    # Two waves: two rounds, with 16 residents that are not in step, one relaunch and one drain.
    busy = 2 + c["skew"] * 15 / 16 + 4 * c["launch"] + c["relaunch"] + c["drain"]
    assert share(108 * 16 * 2, 128, 16) == pytest.approx(2 / busy)
    grids = np.array([1, 200, 2_000, 20_000, 2_000_000])
    rising = oc.achieved(limits, grids, 128, 16, 108)
    assert (np.diff(rising) > 0).all()
    assert rising[-1] == pytest.approx(1 / (1 + c["relaunch"]), abs=1e-3)


def test_a_hundred_thousand_launches_take_no_time(within: Any) -> None:

    random = np.random.default_rng(1)
    columns = (
        random.integers(16, 256, 100_000),
        random.integers(0, 100_000, 100_000),
        random.integers(32, 1025, 100_000),
    )
    limits = oc.limits("9.0")
    shares = within(0.2, lambda: oc.achieved(limits, 1000, columns[2], oc.occupancy(limits, *columns).blocks, 132))
    assert len(shares) == 100_000


def test_what_cannot_be_answered_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean '8\.9'"):
        oc.limits("8.8")
    with pytest.raises(InputError, match="by another rule"):
        oc.limits_of(device("mi300x"))
    with pytest.raises(InputError, match="less than nothing"):
        oc.calculate(oc.limits("8.0"), -1, 0, 128)


@pytest.mark.parametrize("value", [1 << 31, 1 << 63, 1 << 64, 10**400, -1 << 70])
@pytest.mark.parametrize(
    ("knob", "allowed"),
    [
        ("registers", "give 0 to 255"),
        ("shared_bytes", "give 0 to 166,912"),
        ("block", "give 1 to 1,024"),
        ("carveout_bytes", "give 0 to 167,936"),
    ],
)
def test_absurd_counts_are_refused_with_what_is_allowed(knob: str, value: int, allowed: str) -> None:
    launch = {"registers": 32, "shared_bytes": 0, "block": 128}
    with pytest.raises(InputError) as caught:
        oc.calculate(oc.limits("8.0"), **launch | {knob: value})
    assert str(caught.value).endswith(allowed)
    assert len(str(caught.value)) < 120


def test_the_largest_counts_that_are_worked_out_do_not_overflow() -> None:
    for capability in ("6.0", "9.0"):
        most = oc.MOST
        assert oc.calculate(oc.limits(capability), most, most, most, carveout_bytes=most).blocks == 0


def _data() -> Path:
    try:
        folder = data_folder()
    except InputError as error:
        pytest.skip(str(error))
    if not (folder / table.SOURCE / table.FILE).is_file():
        pytest.skip(f"{folder} has no {table.SOURCE}")
    return folder


def test_the_profilers_theoretical_occupancy() -> None:
    """All but one row, which the profiler has wrong: it ran, yet is printed with 0 %, being given no block."""
    kernels = table.configured(table.read(_data()))
    found = table.theoretical(kernels)
    wrong = np.flatnonzero(np.abs(found.occupancy - kernels["theoretical"]) > 0.005)
    assert len(kernels) - len(wrong) >= len(kernels) - 1
    for i in wrong:
        assert kernels.kernel[i].startswith("ampere_fp16_s16816gemm_fp16_64x64_sliced1x2_ldg8")
        assert kernels["theoretical"][i] == 0 < kernels["achieved"][i] < found.occupancy[i]


def test_achieved_occupancy_of_kernels_that_were_held_out() -> None:
    kernels = table.configured(table.read(_data()))
    predicted = table.held_out(kernels)
    assert np.abs(predicted - kernels["achieved"]).mean() <= 0.04
    low, high = oc.constants().intervals["default"]
    inside = (kernels["achieved"] >= low * predicted) & (kernels["achieved"] <= high * predicted)
    assert 0.75 <= inside.mean() <= 0.9
    shipped = [oc.constants()[name] for name in table.NAMES]
    assert table.fit(kernels) == pytest.approx(shipped, rel=1e-3)  # the shipped file is what the fit gives


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("128,", "x,"), "t.csv:2: Block Size [] is 'x', not a number"),
        (("128,", "-128,"), "t.csv:2: Block Size [] is -128"),
        ((",62.5", ",6250"), "t.csv:2: Achieved Occupancy [%] is above 100"),
        (("Grid Size []", "Grid"), "t.csv: lacks the column 'Grid Size []'"),
    ],
)
def test_a_malformed_table_is_refused_by_line(change: tuple[str, str], message: str) -> None:
    header = ",".join(["kernel", *table._COLUMNS.values()])
    text = f"{header}\nk,100,128,32,0,0,12800,75,62.5\n"
    assert len(table.configured(table.parse(text, "t.csv"))) == 1
    with pytest.raises(InputError) as caught:
        table.parse(text.replace(*change), "t.csv")
    assert message in str(caught.value)
