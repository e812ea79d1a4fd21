"""``foretell devices`` of machines and networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foretell.hardware import networks, node, nodes

Run = Callable[..., Any]


def test_machines_and_networks_are_listed_at_80_columns(run: Run) -> None:
    result = run("devices", "--machines")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    first = {line.split()[0] for line in lines if line.strip()}
    assert first >= {*nodes(), *networks()}
    (row,) = [line for line in lines if line.startswith("dgx-a100 ")]
    # Twelve third-generation NVLinks of 25 GB/s in a direction; eight ports of HDR InfiniBand.
    assert row.split() == ["dgx-a100", "8", "×", "a100-sxm4-80gb", "300", "8", "×", "infiniband", "HDR"]
    assert "foretell devices --machines" in run("devices").stdout


@pytest.mark.parametrize("name", ["dgx-a100", "DGX A100", "g5-48xlarge", "gb200-nvl72", "hgx-h100"])
def test_a_machine_is_shown_by_its_name(run: Run, name: str) -> None:
    result = run("devices", name)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    found = node(name)
    assert found.title in result.stdout
    assert f"{found.count} × {found.device.name} [1]" in result.stdout
    assert all(source.split()[0] in result.stdout for source in found.sources.values())


@pytest.mark.parametrize("name", nodes())
def test_every_machine_can_be_shown(run: Run, name: str) -> None:
    result = run("devices", name)
    assert result.exit_code == 0, result.output
    assert result.stdout.count(" × ") >= 1 + len(node(name).nics)


def test_what_is_no_name_is_refused_with_the_nearest_machine(run: Run, failed: Callable[[Any], str]) -> None:
    result = run("devices", "dgx-a10")
    assert result.exit_code == 2
    assert "or name a machine (dgx-a100)" in failed(result)
    result = run("devices", "dgx-a100", "--machines")
    assert result.exit_code == 2
    assert "--machines: lists them all" in failed(result)


def test_help_names_its_argument_once(run: Run) -> None:
    for command, name in (("devices", "[NAME]"), ("claims", "[ID]...")):
        text = run(command, "--help").stdout
        assert f"[OPTIONS] {name} " in text
        assert "[[" not in text
