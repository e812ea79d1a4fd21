"""The slices: what they read, and how they refuse what is malformed."""

from __future__ import annotations

import pytest

from foretell.accuracy import data_folder, slices
from foretell.accuracy.slices import Slice, Slices
from foretell.accuracy.timm import read_rows
from foretell.errors import InputError, UnknownNameError
from foretell.hardware import device

HEADER = "model,infer_img_size,infer_samples_per_sec,infer_step_time,infer_batch_size,param_count,infer_gmacs\n"


def table(tmp_path, text: str, name: str = "t.csv"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_are_read_in_seconds(tmp_path):
    path = table(tmp_path, HEADER + "resnet50,224,2000.0,128.0,256,25.56,4.11\nbroken,224,,,256,1.0,1.0\n")
    (row,) = read_rows(path, "infer", {"precision": "amp"}, tmp_path)
    assert row.workload == "timm:resnet50"
    assert row.options == {"precision": "amp", "image_size": 224}
    assert (row.batch, row.measured_s, row.source) == (256, 0.128, "t.csv:2")
    low, high = row.parameters
    assert low < 25_557_032 < high


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model,infer_img_size\n", "t.csv: lacks the column 'infer_step_time'"),
        (HEADER + "a,224,1,fast,256,1,1\n", "t.csv:2: row of 'a'"),
        (HEADER + "b,224,1,1.0,256,1,1\na,224,1,0,256,1,1\n", "t.csv:3: row of 'a' has step time 0.0 ms"),
        (HEADER + "a,224,1,-5,256,1,1\n", "above 0"),
    ],
)
def test_malformed_tables_are_refused(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        read_rows(table(tmp_path, text), "infer", {}, tmp_path)


@pytest.mark.parametrize("name", list(slices()))
def test_every_slice_names_a_device_and_files(name):
    entry = slices()[name]
    assert device(entry.device).name == entry.device
    assert entry.files
    assert entry.runtime in ("eager", "compiled")
    assert {"precision", "layout", "torch", "mode"} <= set(entry.conditions)


def test_the_registry_refuses_duplicates_and_names_near_ones():
    registry = Slices()
    entry = Slice("a-slice", "t4", "eager", ("x.csv",), lambda folder: [])
    registry.register(entry)
    with pytest.raises(ValueError, match="exists already"):
        registry.register(entry)
    with pytest.raises(UnknownNameError, match="a-slice"):
        registry["a-slic"]


def test_a_missing_data_folder_says_how_to_name_one(tmp_path, monkeypatch):
    monkeypatch.setenv("FORETELL_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="FORETELL_DATA"):
        data_folder()
    assert data_folder(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "UTF-8"),
        (b"model,infer_step_time,infer_batch_size,infer_img_size\n", "no rows"),
        (b"model,infer_step_time,infer_batch_size,infer_img_size\na,nan,1,224\n", "above 0"),
        (b"model,infer_step_time,infer_batch_size,infer_img_size\na,1.0,inf,224\n", "above 0"),
        (b"model,infer_step_time,infer_batch_size,infer_img_size\na,1.0,1\n", "not numbers"),
    ],
)
def test_a_damaged_table_is_named(tmp_path, content, message):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_rows(path, "infer", {}, tmp_path)
    assert "t.csv" in str(caught.value)
