"""``foretell occupancy`` from what is typed to what is printed."""

from __future__ import annotations

import json
import os
import random
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


def log(count: int, seed: int = 1) -> str:
    """What ptxas might print of `count` kernels of three architectures."""
    chance = random.Random(seed)
    lines = []
    for i in range(count):
        name = f"gemm{i:05d}"
        mangled = f"_ZN4math{len(name)}{name}EPf"
        lines += [
            f"ptxas info    : Compiling entry function '{mangled}' for 'sm_{chance.choice((80, 90, 120))}'",
            "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
            f"ptxas info    : Used {chance.randint(16, 255)} registers, {chance.randrange(0, 49152, 4)} bytes smem",
        ]
    return "\n".join(lines)


def test_a_long_list_shows_the_least_occupied_of_each_place(run: Run, tmp_path: Path, within: Any) -> None:
    path = tmp_path / "log.txt"
    path.write_text(log(20_000))
    text = printed(within(2, lambda: run("occupancy", "--ptxas", path, "--block", 256)))
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("compute")] == [
        f"compute capability {capability}" for capability in ("8.0", "9.0", "12.0")
    ]
    rows = [line for line in lines if "math::gemm" in line]
    assert len(rows) == 3 * 13
    data = json.loads(within(3, lambda: run("occupancy", "--ptxas", path, "--block", 256, "--json")).stdout)["launches"]
    assert len(data) == 20_000
    for capability in ("8.0", "9.0", "12.0"):
        of_it = sorted(one["occupancy"] for one in data if one["compute_capability"] == capability)
        assert f"  and {len(of_it) - 13:,} more" in text
        assert of_it[12] < 0.2  # so that all shown are the worst
    assert all(" 12 % " in row or " 17 % " in row for row in rows)
    assert "The least occupied are shown, 19,961 kernels are not; --json has all." in text


def test_a_short_list_shows_all_of_it(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(log(15))
    text = printed(run("occupancy", "--ptxas", path, "--block", 256))
    assert text.count("math::gemm") == 15
    assert "more" not in text
    assert "not; --json" not in text
    path.write_text(log(41))
    on_one = printed(run("occupancy", "--ptxas", path, "--block", 256, "--cc", "9.0"))
    assert ("and 1 more" in on_one) == (on_one.count("math::gemm") == 40)


def test_files_without_an_end(run: Run, failed: Callable[[Any], str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for option in ("--ptxas", "--cubin"):
        for path, what in ((tmp_path / "pipe", "a named pipe"), ("/dev/zero", "a device"), (tmp_path, "a directory")):
            result = run("occupancy", option, path, "--block", 128)
            assert f"{path}: is {what}, not a regular file" in failed(result)
            assert result.exit_code == 2


def test_errors_name_the_file(run: Run, failed: Callable[[Any], str], tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    for text, arguments, message in (
        (PTXAS.replace("sm_80", "sm_99"), ("--block", 128), "compiled for compute capability 9.9, which is not known"),
        (PTXAS, (), "kernel _ZN4math4gemmIfEEvPKfS2_Pf: no block size"),
        (PTXAS.replace("128 registers", "999999999 registers"), ("--block", 128), "has 999,999,999 registers a thread"),
        ("", (), "no kernel in it"),
    ):
        path.write_text(text)
        result = run("occupancy", "--ptxas", path, *arguments)
        assert result.exit_code == 2
        line = failed(result)
        assert message in line
        assert f"error: {path}" in line
    path.write_text(PTXAS.replace("sm_80", "sm_99"))
    assert run("occupancy", "--ptxas", path, "--block", 128, "--cc", "8.0").exit_code == 0


def test_standard_input_of_any_bytes(failed: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from foretell.cli.app import app
    from foretell.cost import binaries

    arguments = ["occupancy", "--ptxas", "-", "--block", "128"]
    assert CliRunner().invoke(app, arguments, input=b"\xff\xfe\n" + PTXAS.encode()).exit_code == 0
    monkeypatch.setattr(binaries, "MOST_CHARACTERS", 100)
    result = CliRunner().invoke(app, arguments, input=PTXAS)
    assert "standard input: is longer than 100 bytes" in failed(result)
    assert result.exit_code == 2


def test_a_carveout_of_fixed_shared_memory_changes_nothing(run: Run) -> None:
    launch = ("occupancy", "--registers", 32, "--shared", "48KiB", "--block", 128, "--cc", "6.0", "--json")
    one = json.loads(printed(run(*launch)))
    for carveout in ("16KiB", "1MiB", "1GiB"):
        assert json.loads(printed(run(*launch, "--carveout", carveout))) == one
    assert one["launches"][0]["occupancy"] == 0.0625  # a block of 48 KiB in 64, four warps of 64


@pytest.mark.parametrize("value", [2**31, 2**63, 2**64, 10**4000])
@pytest.mark.parametrize(
    ("option", "unit", "allowed"),
    [
        ("--registers", "", "give 0 to 255"),
        ("--block", "", "give 1 to 1,024"),
        ("--shared", "B", "give 0 to 65,536"),
        ("--carveout", "B", "give 0 to 65,536"),
        ("--grid", "", "give 1 to 9,223,090,559,730,712,575"),
    ],
)
def test_absurd_numbers(
    run: Run, failed: Callable[[Any], str], option: str, unit: str, allowed: str, value: int
) -> None:
    given = {"--registers": 32, "--block": 128, "--on": "t4", option: f"{value}{unit}"}
    result = run("occupancy", *(part for pair in given.items() for part in pair))
    if option == "--grid" and value < 2**63:  # there are such grids
        assert result.exit_code == 0
        return
    line = failed(result)
    assert result.exit_code == 2
    assert allowed in line or (unit and value > 2**64 and "too large" in line)
    assert len(line) < 200 or "too large" in line


def test_what_a_damaged_log_holds_is_printed_or_refused(run: Run, tmp_path: Path) -> None:
    chance = random.Random(5)
    path = tmp_path / "log.txt"
    codes = set()
    for _ in range(30):
        text = list(PTXAS)
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(text))
            text[at] = chance.choice(("0", "9", "999", "'", "\n", "\x1b[2J", "\0", "[bold]", "é", "", text[at] * 50))
        path.write_text("".join(text), encoding="utf-8")
        result = run("occupancy", "--ptxas", path, "--block", 256)
        codes.add(result.exit_code)
        assert result.exit_code in (0, 2), result.stderr
        assert "\x1b" not in result.stdout + result.stderr
        assert max(map(len, result.stdout.splitlines()), default=0) <= 80
    assert codes == {0, 2}


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
        (("--cubin", "none.cubin", "--block", 128), 2, "none.cubin: no such file"),
        (("--ptxas", "none.txt", "--block", 128), 2, "none.txt: no such file"),
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
