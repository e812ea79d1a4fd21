"""HELP's tables: read in seconds, on the GPUs they name, and refused where malformed."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from foretell.accuracy.help_nas import read
from foretell.accuracy.spaces import nasbench201
from foretell.errors import InputError

ARCH = "|nor_conv_3x3~0|+|none~0|skip_connect~1|+|none~0|none~1|avg_pool_3x3~2|"
DATA = Path(os.environ.get("FORETELL_DATA", "../shared/data"))


def folder(tmp_path, text, space="nasbench201"):
    (tmp_path / "help-nas").mkdir()
    with gzip.open(tmp_path / "help-nas" / f"{space}_gpu_latency_ms.csv.gz", "wt", encoding="utf-8") as file:
        file.write(text)
    return tmp_path


def test_a_table_is_read_in_seconds(tmp_path):
    small, large = read(folder(tmp_path, f"index,arch,titanx_1,2080ti_32\n7,{ARCH},8.5,9.0\n8,{ARCH},4,5\n"))
    assert (small.name, large.name) == ("help-nas-nasbench201-titanx-1", "help-nas-nasbench201-2080ti-32")
    assert (small.device.name, large.device.name) == ("titan-x-pascal", "rtx-2080-ti")
    assert list(small.measured_s) == [0.0085, 0.004]
    assert list(small.group) == ["nasbench201:7", "nasbench201:8"]
    table = small.program.table
    expected = sum(row.macs for row in nasbench201.rows(ARCH, 1))
    assert np.add.reduceat(table.macs * table.repeat, small.starts).tolist() == [expected, expected]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arch,index\n", "does not begin with the columns"),
        ("index,arch,k80_1\n", "column 'k80_1'"),
        (f"index,arch,1080ti_1\n0,{ARCH},1\n1,{ARCH},0\n", ":3: latency 0.0 ms"),
        (f"index,arch,1080ti_1\n0,{ARCH},soon\n", ":2: .*no latency"),
        ("index,arch,1080ti_1\n0,|none~0|,1\n", ":2: no architecture of this space"),
    ],
)
def test_malformed_tables_are_refused_with_their_row(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        read(folder(tmp_path, text))


def test_what_is_not_there_is_not_read(tmp_path):
    assert read(tmp_path) == []


@pytest.mark.skipif(not (DATA / "help-nas").is_dir(), reason="no folder of measurements: set FORETELL_DATA")
def test_the_published_tables_are_read():
    tables = read(DATA, every=1000)
    assert len(tables) >= 30
    assert all(1e-3 < table.measured_s.min() < table.measured_s.max() < 0.2 for table in tables)


OFA = (
    '{""ks"": [3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3], '
    '""e"": [3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3], ""d"": [2, 2, 2, 2, 2], ""r"": 160}'
)


@pytest.mark.parametrize("column", ["1080ti_0", "1080ti_" + "9" * 30, "v100_²", "v100_", "v100_-1"])
def test_a_batch_size_is_a_number_that_cards_hold(tmp_path, column):
    with pytest.raises(InputError, match=r"nasbench201_gpu_latency_ms\.csv\.gz: column .* is no GPU_BATCH"):
        read(folder(tmp_path, f"index,arch,{column}\n0,{ARCH},1\n"))


def test_a_network_of_the_ofa_space_is_read(tmp_path):
    assert len(read(folder(tmp_path, f'index,arch,v100_1\n0,"{OFA}",1\n', "ofa"))) == 1


@pytest.mark.parametrize(
    ("space", "arch"),
    [
        ("fbnet", "[" * 100_000),
        ("fbnet", "[" * 50 + "]" * 50),
        ("fbnet", str([0.5] * 22)),
        ("ofa", OFA.replace("[3, ", "[1e300, ", 1)),
        ("ofa", OFA.replace("160", "0")),
        ("ofa", OFA.replace("160", "9" * 30)),
        ("ofa", OFA.replace("[2, ", "[-1, ")),
        ("ofa", "[]"),
        ("nasbench201", "|" * 50),
    ],
)
def test_what_is_no_architecture_is_refused_by_row(tmp_path, space, arch):
    with pytest.raises(InputError, match=rf"{space}_gpu_latency_ms\.csv\.gz:2: no architecture"):
        read(folder(tmp_path, f'index,arch,v100_1\n0,"{arch}",1\n', space))
