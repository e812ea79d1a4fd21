"""Reading AIConfigurator's tables: what an op is, and what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from foretell.accuracy.aiconfigurator import read
from foretell.accuracy.columns import op_table
from foretell.errors import InputError, UnknownNameError

GEMM = "framework,version,device,op_name,kernel_source,gemm_dtype,m,n,k,latency\n"
PREFIX = "VLLM,0.14.0,NVIDIA L40S,"
DECODE = (
    "framework,version,device,op_name,kernel_source,batch_size,isl,num_heads,num_key_value_heads,head_dim,beam_width,"
    "attn_dtype,kv_cache_dtype,step,latency\n"
)


def place(folder: Path, table: str, text: str) -> Path:
    path = folder / f"l40s__vllm-0.14.0__{table}.csv.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(text)
    return path


def test_a_product_is_read_in_si_units_by_format(tmp_path: Path) -> None:
    rows = "gemm,vllm_default,bfloat16,2,32,64,0.5\n", "gemm,vllm_default,fp8,4,32,64,0.25\n"
    place(tmp_path, "gemm", GEMM + "".join(PREFIX + row for row in rows))
    wide, narrow = read(tmp_path)
    assert wide.device.name == "l40s"
    assert wide.measured_s.tolist() == [5e-4]
    assert wide.program.table.macs.tolist() == [2 * 32 * 64]
    assert wide.program.table.bytes_read.tolist() == [2 * (2 * 64 + 32 * 64)]
    assert narrow.program.table.bytes_read.tolist() == [2 * 4 * 64 + 32 * 64]
    assert wide.group.tolist() == ["32,64"]
    assert narrow.program.names == (("foretell.quantized_mm.tensor", "matmul"),)


def test_decoding_packs_the_queries_of_a_key_head(tmp_path: Path) -> None:
    row = "x,vllm_flash_attn,4,1,32,8,128,1,bfloat16,fp8,1023,0.1\n"
    place(tmp_path, "generation_attention", DECODE + PREFIX + row)
    table = read(tmp_path)[0].program.table
    assert [int(c[0]) for c in (table.gemm_batch, table.gemm_m, table.gemm_n, table.gemm_k)] == [32, 4, 1024, 128]
    assert not table.causal[0]
    cache = 2 * 4 * 8 * 1024 * 128
    assert table.bytes_read[0] == cache + 2 * 4 * 32 * 128


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("gemm,x,bfloat16,2,32,64,0\n", "latency is 0"),
        ("gemm,x,bfloat16,2,32,64,-1\n", "latency is -1"),
        ("gemm,x,bfloat16,2,32,64,1e9\n", "latency is 1e"),
        ("gemm,x,bfloat16,two,32,64,1\n", "no number"),
        ("gemm,x,bfloat17,2,32,64,1\n", "bfloat17"),
        ("gemm,x,bfloat16,2,32,64\n", "9 fields"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, row: str, said: str) -> None:
    place(tmp_path, "gemm", GEMM + PREFIX + "gemm,x,bfloat16,2,32,64,1\n" + PREFIX + row)
    with pytest.raises(InputError, match=said) as caught:
        read(tmp_path)
    assert "l40s__vllm-0.14.0__gemm.csv.gz" in str(caught.value)


def test_mixed_devices_missing_columns_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no table"):
        read(tmp_path)
    mixed = GEMM + PREFIX + "g,x,bfloat16,2,32,64,1\nVLLM,0.14.0,NVIDIA H200,g,x,bfloat16,2,32,64,1\n"
    place(tmp_path, "gemm", mixed)
    with pytest.raises(InputError, match="mixes devices"):
        read(tmp_path)
    place(tmp_path, "gemm", GEMM.replace("latency", "time") + PREFIX + "g,x,bfloat16,2,32,64,1\n")
    with pytest.raises(InputError, match="latency"):
        read(tmp_path)


def test_columns_are_broadcast_and_checked() -> None:
    table = op_table("aten.mm.default", ["bfloat16", "float32"], gemm_m=[1, 2], gemm_n=8)
    assert len(table) == 2
    assert table.gemm_n.tolist() == [8.0, 8.0]
    assert table.repeat.tolist() == [1.0, 1.0]
    assert np.unique(table.kind).tolist() == [0]
    with pytest.raises(UnknownNameError, match="gemm_m"):
        op_table("aten.mm.default", "bfloat16", gemm_mm=1)
    with pytest.raises(ValueError, match="rows where another has"):
        op_table("aten.mm.default", "bfloat16", gemm_m=[1, 2], gemm_n=[1, 2, 3])


ROW = PREFIX + "gemm,vllm_default,bfloat16,2,32,64,0.5\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no rows"),
        (GEMM, "holds no rows"),
        (GEMM + ROW.replace(",2,32,", ",inf,32,"), r":2: m is inf"),
        (GEMM + ROW.replace(",2,32,", ",1e300,32,"), r":2: m is 1e\+300"),
        (GEMM + ROW.replace(",2,32,", ",nan,32,"), r":2: m is nan"),
        (GEMM + ROW.replace(",2,32,", ",2.5,32,"), r":2: m is 2.5, no whole number"),
        (GEMM + ROW.replace("bfloat16", "fp9"), r":2: gemm_dtype is 'fp9'; known: bfloat16, float16"),
        (GEMM + ROW.replace("L40S", "L99"), "unknown device 'NVIDIA L99'"),
        (GEMM.replace(",n,", ",m,") + ROW, "column 'm' twice"),
        (GEMM + PREFIX + '"' + "x" * 200_000, "is damaged: field larger"),
    ],
)
def test_what_is_damaged_is_said_with_its_file(tmp_path: Path, text: str, said: str) -> None:
    place(tmp_path, "gemm", text)
    with pytest.raises(InputError, match=said) as caught:
        read(tmp_path)
    assert "l40s__vllm-0.14.0__gemm.csv.gz" in str(caught.value)


def test_an_oddly_named_table_is_refused(tmp_path: Path) -> None:
    place(tmp_path, "gemm", GEMM + ROW).rename(tmp_path / "x__gemm.csv.gz")
    with pytest.raises(InputError, match=r"x__gemm\.csv\.gz: is not named .*SYSTEM__FRAMEWORK-VERSION__TABLE"):
        read(tmp_path)
