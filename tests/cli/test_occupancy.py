"""``foretell occupancy`` from what is typed to what is printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

PTXAS = """ptxas info    : Compiling entry function '_ZN4math4gemmIfEEvPKfS2_Pf' for 'sm_80'
ptxas info    : Function properties for _ZN4math4gemmIfEEvPKfS2_Pf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 49152 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'add' for 'sm_80'
ptxas info    : Used 16 registers, used 0 barriers, 368 bytes cmem[0]
"""


def printed(result: Any) -> str:
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert max(map(len, result.stdout.splitlines())) <= 80
    return str(result.stdout)


def test_one_launch(run: Run) -> None:
    text = printed(run("occupancy", "--registers", 72, "--shared", "32KiB", "--block", 256, "--cc", "9.0"))
    assert "Occupancy on compute capability 9.0" in text
    # 72 registers are 2,304 a warp: 7 warps in each quarter of 65,536, so 28 warps, 3 blocks of 8: 24 of 64.
    assert "38 %" in text
    assert "3 blocks, 24 of 64 warps" in text
    assert "registers           3  ◀ limits" in text
    assert "at most 64 registers a thread  50 %" in text


def test_a_grid_on_a_device(run: Run) -> None:
    arguments = ("occupancy", "--registers", 32, "--block", 256, "--on", "a100-sxm4-40gb", "--grid", 1728)
    text = printed(run(*arguments))
    assert "2 waves" in text  # 1,728 blocks, 8 on each of 108
    data = json.loads(printed(run(*arguments, "--json")))
    assert data["schema"] == "foretell.occupancy/1"
    (one,) = data["launches"]
    assert (one["blocks"], one["occupancy"], one["waves"]) == (8, 1.0, 2.0)
    low, high = one["achieved_interval"]
    assert low < one["achieved"] < high <= 1
    assert one["limiting"] == ["warps", "registers"]


def test_what_ptxas_printed(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(PTXAS)
    text = printed(run("occupancy", "--ptxas", path, "--block", 256))
    lines = [line.split() for line in text.splitlines()]
    assert next(c for c in lines if "math::gemm" in c)[:7] == ["math::gemm", "128", "48", "KiB", "256", "25", "%"]
    assert ["add", "16", "0", "B", "256", "100", "%", "warps"] in lines
    data = json.loads(printed(run("occupancy", "--ptxas", path, "--block", 256, "--shared", "64 KiB", "--json")))
    # 112 KiB and the reserved one leave room for one block of 164 KiB.
    assert [one["blocks"] for one in data["launches"]] == [1, 2]


def test_standard_input(run: Run) -> None:
    from typer.testing import CliRunner

    from foretell.cli.app import app

    result = CliRunner().invoke(app, ["occupancy", "--ptxas", "-", "--block", "128", "--json"], input=PTXAS)
    assert [one["name"] for one in json.loads(result.stdout)["launches"]] == ["_ZN4math4gemmIfEEvPKfS2_Pf", "add"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--cc", "9.0"), 2, "no kernel; give one of --registers N, --ptxas FILE, --cubin FILE"),
        (("--registers", 32, "--cubin", "x", "--cc", "9.0"), 2, "--registers, --cubin: several kernels"),
        (("--registers", 32, "--cc", "9.0"), 2, "no block size; give --block N"),
        (("--registers", 32, "--block", 128), 2, "no place to run on; give --cc 9.0"),
        (("--registers", 32, "--block", 128, "--cc", "9.9"), 2, "unknown compute capability '9.9'; did you mean"),
        (("--registers", 32, "--block", 128, "--cc", "9.0", "--on", "t4"), 2, "give one of them"),
        (("--registers", 32, "--block", 128, "--cc", "9.0", "--grid", 4), 2, "a grid needs a device"),
        (("--registers", 32, "--block", 128, "--on", "t4", "--grid", 0), 2, "a grid of 0 blocks"),
        (("--registers", 32, "--block", 128, "--cc", "9.0", "--shared", 32768), 2, "'32768' has no unit"),
        (("--registers", -3, "--block", 128, "--cc", "9.0"), 2, "less than nothing"),
        (("--cubin", "none.cubin", "--block", 128), 2, "cannot be read"),
        (("--ptxas", "none.txt", "--block", 128), 2, "cannot be read"),
        (("--registers", 300, "--block", 128, "--cc", "9.0"), 3, "registers in the way; at most 255 registers"),
        (("--registers", 32, "--block", 2048, "--cc", "9.0"), 3, "warps in the way; blocks of 1024 threads"),
        (("--registers", 32, "--block", 128, "--cc", "9.0", "--shared", "300KiB"), 3, "shared in the way"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    run: Run, failed: Callable[[Any], str], arguments: tuple[object, ...], code: int, message: str
) -> None:
    result = run("occupancy", *arguments)
    assert message in failed(result)
    assert result.exit_code == code
