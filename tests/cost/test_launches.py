"""Kernels of a file on the place they would run on."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import jsonschema
import pytest

from foretell.cost.binaries import Kernel
from foretell.cost.launches import document, launch, launches, that_run_on
from foretell.errors import InputError
from foretell.hardware import device


def test_launch_bounds_hold() -> None:
    kernel = Kernel("k", 72, 0, max_block=256, capability="8.0")
    assert launch(kernel).calculation.block == 256  # the largest it allows, where none is given
    allowed = launch(kernel, block=192).calculation
    assert allowed.blocks > 0
    assert all(change.value <= 256 for change in allowed.changes if change.knob == "block")
    refused = launch(kernel, block=512).calculation
    assert (refused.blocks, refused.occupancy, refused.limiting) == (0, 0.0, ("launch bounds",))


def test_the_newest_binary_that_runs_is_taken() -> None:
    kernels = [Kernel("k", r, 0, capability=c) for r, c in ((1, "7.5"), (2, "8.0"), (3, "8.6"), (4, "9.0"))]

    def taken(capability: str | None) -> list[int]:
        return [kernel.registers for kernel in that_run_on(kernels, capability)]

    assert taken("8.9") == [3]
    assert taken("8.0") == [2]
    assert taken("9.0") == [4]
    assert taken("12.0") == taken(None) == [1, 2, 3, 4]


def test_dynamic_memory_comes_on_top_of_static() -> None:
    kernel = Kernel("k", 32, 16 << 10, capability="8.0")
    # 164 KiB hold two of 64 KiB and the reserved one each.
    assert launch(kernel, block=128, dynamic_bytes=48 << 10).calculation.blocks == 2
    with pytest.raises(InputError, match="no block size"):
        launch(kernel)


def test_many_launches_are_as_one_by_one_and_keep_their_order() -> None:
    kernels = [Kernel(f"k{i}", 24 + 7 * i, 1024 * i, i % 3, ("8.0", "9.0", "7.5")[i % 3], 128 + i) for i in range(30)]
    assert launches(kernels) == [launch(kernel) for kernel in kernels]
    on = {"device": device("a100-sxm4-40gb"), "grid": 700, "block": 150, "dynamic_bytes": 40 << 10}
    found = launches(kernels, **on)
    assert found == [launch(kernel, **on) for kernel in kernels]
    # Launch bounds of 128 to 149 refuse blocks of 150: no achieved occupancy then.
    assert [one.achieved is None for one in found] == [i < 22 for i in range(30)]


def test_errors_name_the_file_the_kernels_are_from() -> None:
    with pytest.raises(InputError, match=r"a\.cubin: compiled for compute capability 9\.9, .* by --cc or --on"):
        launches([Kernel("k", 32, 0, capability="9.9")], block=128, where="a.cubin")
    with pytest.raises(InputError, match=r"a\.cubin, kernel k: no block size"):
        launches([Kernel("k", 32, 0, capability="9.0")], where="a.cubin")


def test_the_document_keeps_its_schema() -> None:
    text = (files("foretell.report") / "schemas" / "occupancy-1.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(schema)
    launches = [
        launch(Kernel("k", 32, 1024, 1, "9.0", 256, 0)),
        launch(Kernel("", 32, 0), block=128, device=device("t4"), grid=100),
        launch(Kernel("k", 32, 0, capability="6.0"), block=128),
    ]
    data = json.loads(json.dumps(document(launches)))
    jsonschema.validate(data, schema)
    data["launches"][0]["extra"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema)
