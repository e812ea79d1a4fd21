"""Reading measured power: what is in the tables, and what malformed ones are told."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from foretell.accuracy.power import Shape, perseus, predicted, read_power, zeus
from foretell.cost.calibration import load
from foretell.cost.model import models
from foretell.errors import InputError

DATA = Path(os.environ.get("FORETELL_DATA", Path(__file__).parents[3] / "shared" / "data"))
HEAD = "framework,version,device,op_name,kernel_source,gemm_dtype,m,n,k,latency,power,power_limit"
needs_data = pytest.mark.skipif(not (DATA / "zeus").is_dir(), reason=f"no measurements in {DATA}")


def table(folder: Path, *rows: str) -> Path:
    path = folder / "h200_sxm__vllm-0.14.0__gemm.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("\n".join([HEAD, *(f"VLLM,0.14.0,NVIDIA H200,gemm,vllm_default,{row}" for row in rows)]) + "\n")
    return path


def test_watts_stay_beside_their_rows_when_formats_are_split(tmp_path):
    rows = ("fp8,64,4096,4096,0.01,301,700", "bfloat16,8192,8192,8192,1.6,690,700", "fp8,1,4096,4096,0.008,250,700")
    bf16, fp8 = read_power(table(tmp_path, *rows))
    assert bf16.power_w.tolist() == [690.0]
    assert fp8.power_w.tolist() == [301.0, 250.0]
    assert fp8.measured.program.table.gemm_m.tolist() == [64.0, 1.0]
    assert bf16.window_s == pytest.approx([3000 * 6 * 1.6e-3])
    # A table of a card that nothing was fitted on: a large product is held at its limit, none draws more.
    drawn, _ = bf16.predicted_w(models()["roofline"])
    assert drawn == pytest.approx([690.0], rel=0.05)
    assert all(150 < w < 700 for w in fp8.predicted_w(models()["roofline"])[0])


def test_no_power_is_refused_with_its_row(tmp_path):
    path = table(tmp_path, "bfloat16,8,8,8,0.01,300,700", "bfloat16,8,8,16,0.01,0,700")
    with pytest.raises(InputError, match=r"gemm\.csv\.gz:3: power is '0'"):
        read_power(path)


def test_an_unknown_card_is_refused(tmp_path):
    (tmp_path / "zeus").mkdir()
    (tmp_path / "zeus" / "summary_power_z80.csv").write_text("a\n1\n")
    with pytest.raises(InputError, match="z80"):
        zeus(tmp_path)


@needs_data
def test_responses_start_at_one_and_agree_with_the_measurements():
    # The whole table is judged by benchmarks/energy.py; a sample keeps the claim from drifting.
    for rows, bar in ((zeus(DATA)[::25], 0.1), (perseus(DATA)[::9], 0.1)):
        assert all(r.time[0] == r.energy[0] == 1.0 and (np.diff(r.setting) < 0).all() for r in rows)
        both = [(predicted(r, load("energy")), r) for r in rows]
        assert np.median(np.concatenate([abs(p[0] / r.time - 1)[1:] for p, r in both])) < bar
        assert np.median(np.concatenate([abs(p[1] / r.energy - 1)[1:] for p, r in both])) < bar


@needs_data
def test_more_arithmetic_makes_more_of_the_clock():
    stage = perseus(DATA)[0]
    fast, _ = predicted(stage, load("energy"), Shape(share=0.8, traffic=0.1))
    slow, _ = predicted(stage, load("energy"), Shape(share=0.8, traffic=2.0))
    assert fast[-1] > slow[-1] > 1.0
