"""Predictions against published measurements, and what their readers refuse."""

import os
from pathlib import Path

import numpy as np
import pytest

from foretell.accuracy.collectives import SOURCES, aiconfigurator, read, read_exchanges
from foretell.errors import InputError

DATA = Path(os.environ.get("FORETELL_DATA", "../shared/data"))
present = pytest.mark.skipif(
    not (DATA / "aiconfigurator-serving").is_dir(), reason="no measurements: set FORETELL_DATA to their folder"
)


@present
@pytest.mark.parametrize("source", sorted(SOURCES))
def test_nvswitch_and_infiniband_within_a_tenth(source: str):
    errors = []
    for table in SOURCES[source](DATA):
        if table.clear and table.nvswitch_or_infiniband:
            big = table.where(table.nbytes >= 2**20)
            errors.append(np.abs(big.fabric().time_s(big.kind, big.nbytes, big.size) / big.time_s - 1))
    assert np.median(np.concatenate(errors)) <= 0.10


@present
def test_deepep_within_its_bar():
    by_source: dict[str, list[np.ndarray]] = {}
    for table in read_exchanges(DATA):
        by_source.setdefault(table.source, []).append(np.abs(table.predicted_s() / table.time_s - 1))
    assert set(by_source) == {"DeepEP V1", "DeepEP V2", "aiconfigurator-deepep"}
    for errors in by_source.values():
        assert np.median(np.concatenate(errors)) <= 0.15


@present
def test_sizes_are_bytes():
    """A reading in elements would give NVLink 4 twice the bandwidth it has, or half."""
    for table in read(DATA):
        if table.system == "h100_sxm" and table.kind == "all_gather":
            row = np.argmax(table.nbytes * (table.size == 8))
            bus = table.nbytes[row] * 7 / 8 / table.time_s[row]
            assert 300e9 < bus < 450e9


HEAD = "system,nccl_dtype,op_name,num_gpus,message_size,latency\n"


@pytest.mark.parametrize("row", ["h100_sxm,half,all_reduce,1,256,0.1", "h100_sxm,half,all_reduce,8,256,-1"])
def test_damaged_rows_are_named(tmp_path: Path, row: str):
    import gzip

    (tmp_path / "aiconfigurator-serving").mkdir()
    path = tmp_path / "aiconfigurator-serving" / "comm_nccl.csv.gz"
    path.write_bytes(gzip.compress((HEAD + row + "\n").encode()))
    with pytest.raises(InputError, match=r"comm_nccl\.csv\.gz:2"):
        aiconfigurator(tmp_path)


def test_absent_tables_are_named(tmp_path: Path):
    with pytest.raises(InputError, match="comm_nccl"):
        aiconfigurator(tmp_path)
