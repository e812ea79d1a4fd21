"""NeuSight's tables: op lists against what was traced, and refusal of damaged rows."""

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from foretell.accuracy.neusight import read_models, read_operators
from foretell.accuracy.neusight_models import graph
from foretell.errors import InputError, UnknownNameError

FOLDER = Path(os.environ.get("FORETELL_DATA", Path(__file__).parents[3] / "shared" / "data")) / "neusight"
needs_data = pytest.mark.skipif(not FOLDER.is_dir(), reason="no folder of measurements: set FORETELL_DATA")

GPT2 = {"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 32,
        "vocab_size": 100, "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
HEAD = "device,model,mode,seqlen,batch,option,num_layer,e2e_latency,fw_latency,bwall_latency\n"
ROW = "Tesla_T4,tiny,inf,16,2,,3,12.5,12.5,0\n"
OPERATORS = "OPName,Latency,Device,B,M,N,K\n"


def products(g):
    return [op for op in g.ops if op.kind in ("matmul", "batched_matmul")]


def test_a_transformers_arithmetic_is_the_textbooks():
    """2 · tokens · (12 d² + 2 S d) a layer, and the head; backward does twice that."""
    batch, tokens, width, layers, vocab = 2, 16, 64, 3, 100
    forward = 2 * batch * tokens * (layers * (12 * width**2 + 2 * tokens * width) + vocab * width)
    assert graph(GPT2, "inference", batch, tokens, "tiny").flops() == forward
    train = graph(GPT2, "train", batch, tokens, "tiny")
    assert train.flops() == 3 * forward
    assert train.parameters == 100 * 64 + 32 * 64 + layers * (12 * 64**2 + 13 * 64) + 2 * 64


@needs_data
def test_parameters_are_those_published():
    """Parameters of gpt2-large, bert-large (classifying two classes) and opt-1.3b as `transformers` counts them."""
    published = {"gpt2_large": 774_030_080, "bert_large": 335_143_938, "opt_13": 1_315_758_080}
    for model, count in published.items():
        config = json.loads((FOLDER / "DLmodel_configs" / f"{model}.json").read_text())
        assert graph(config, "inference", 1, 8, model).parameters == count


def test_training_draws_dropout_and_adds_every_gradient_once():
    g = graph(GPT2, "train", 2, 16, "tiny")
    names = Counter()
    for op in g.ops:
        names[op.name] += op.repeat
    assert names["aten.native_dropout.default"] == names["aten.native_dropout_backward.default"] == 3 * 3 + 1
    weights = 3 * 12 + 2 + 2  # of layers; final norm; embeddings
    assert names["aten.add_.Tensor"] == weights + 1  # the tied embedding gets one from either use
    assert not any(op.phase == "optimizer" for op in g.ops)
    assert not any("dropout" in op.name for op in graph(GPT2, "inference", 2, 16, "tiny").ops)


@needs_data
@pytest.mark.parametrize("model", ["bert_large", "gpt2_large", "opt_13"])
def test_op_lists_are_those_traced(model):
    """Shapes of every product, softmax, norm and large elementwise op of one layer and what surrounds it."""
    traced: Counter[tuple[str, int]] = Counter()
    size = None
    with gzip.open(FOLDER / "label_ops.csv.gz", "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if (row["device"], row["model"], row["mode"], row["option"]) != ("Tesla_T4", model, "inf", ""):
                continue
            size = size or (int(row["batch"]), int(row["seqlen"]))
            if (int(row["batch"]), int(row["seqlen"])) != size:
                continue
            name, target = row["Name"], row["target"]
            elements = int(np.prod(ast.literal_eval(row["output_shape"])))
            module = row["op"] == "call_module" and float(row["latency"]) > 0.3
            other = re.search("embed|wte|wpe|activation|drop", target.lower())
            if ".ln_" in target or "layer_norm" in name:
                traced["normalization", elements] += 1
            elif "softmax" in target:
                traced["softmax", elements] += 1
            elif re.search("bmm|matmul|addmm", target) or (module and not other):
                traced["product", elements] += 1
    assert size is not None
    assert len(traced) >= 4
    config = json.loads((FOLDER / "DLmodel_configs" / f"{model}.json").read_text())
    g = graph(config, "inference", *size, model)
    ours: Counter[tuple[str, int]] = Counter()
    for op in g.ops:
        kind = "product" if op.gemm else op.kind
        ours[kind, g.tensors[op.outputs[0]].elements] += 1
    missing = {key: count for key, count in traced.items() if ours[key] != count}
    assert not missing


@needs_data
def test_tables_are_read_whole():
    operators = read_operators(FOLDER)
    with gzip.open(FOLDER / "test" / "bmm.csv.gz", "rt") as file:
        lines = sum(1 for _ in file) - 1
    assert sum(len(table) for table in operators if table.source == "neusight/test/bmm.csv.gz") == lines
    bmm = next(table for table in operators if table.name == "neusight-test-bmm" and table.device.name == "l4")
    columns = bmm.program.table
    assert np.array_equal(columns.macs, columns.gemm_batch * columns.gemm_m * columns.gemm_n * columns.gemm_k)
    models = read_models(FOLDER)
    assert {m.settings.mode for m in models} == {"inference", "train"}
    assert all("switch" not in group for m in models for group in m.group)
    for m in models:  # a whole model's arithmetic at the fastest peak is a bound
        flops = np.add.reduceat(2 * m.program.table.macs * m.program.table.repeat, m.starts)
        assert np.all(flops / m.measured_s < max(m.device.peak("fp32", u) or 0 for u in ("vector", "tensor")))


def folder(tmp_path: Path, rows: str) -> Path:
    (tmp_path / "DLmodel_configs").mkdir()
    (tmp_path / "DLmodel_configs" / "tiny.json").write_text(json.dumps(GPT2))
    (tmp_path / "label_e2e.csv").write_text(HEAD + rows)
    return tmp_path


def test_rows_become_measurements(tmp_path):
    (table,) = read_models(folder(tmp_path, ROW + ROW.replace("12.5", "25") + ROW.replace("inf,16,2,", "inf,16,2,dp4")))
    assert table.device.name == "t4"
    assert table.measured_s.tolist() == [0.0125, 0.025]
    assert len(table.program) == 2 * table.starts[1]


@pytest.mark.parametrize(("bad", "says"), [
    (ROW.replace("12.5,12.5", "0,0"), "e2e_latency is 0"),
    (ROW.replace("12.5,12.5", "-3,-3"), "above 0"),
    (ROW.replace("12.5,12.5", "fast,1"), "not a number"),
    (ROW.replace("12.5,12.5", "nan,1"), "e2e_latency is nan"),
    (ROW.replace("Tesla_T4", "Tesla_T5"), "Tesla_T5"),
    (ROW.replace("inf", "eval"), "eval"),
    (ROW.replace("tiny", "huge"), "huge"),
    ("Tesla_T4,tiny\n", "cut short"),
])
def test_damaged_rows_are_named(tmp_path, bad, says):
    with pytest.raises(InputError, match=says) as caught:
        read_models(folder(tmp_path, ROW + bad))
    if says not in ("Tesla_T5", "huge"):
        assert "label_e2e.csv:3" in str(caught.value)


def test_damaged_operator_tables_are_named(tmp_path):
    (tmp_path / "test").mkdir()
    path = tmp_path / "test" / "bmm.csv.gz"

    def write(text: str) -> None:
        buffer = io.BytesIO()
        with gzip.open(buffer, "wt") as file:
            file.write(text)
        path.write_bytes(buffer.getvalue())

    write(OPERATORS + "bmm,1.0,Tesla T4,2,3,4,5\nbmm,1.0,Tesla T4,2,0,4,5\n")
    with pytest.raises(InputError, match="M is 0") as caught:
        read_operators(tmp_path)
    assert "bmm.csv.gz:3" in str(caught.value)
    write(OPERATORS.replace("Latency", "Time") + "bmm,1.0,Tesla T4,2,3,4,5\n")
    with pytest.raises(InputError, match="'Latency'"):
        read_operators(tmp_path)
    write(OPERATORS + "conv,1.0,Tesla T4,2,3,4,5\n")
    with pytest.raises(InputError, match="conv"):
        read_operators(tmp_path)
    path.unlink()
    with pytest.raises(InputError, match="no operator tables"):
        read_operators(tmp_path)


def test_unknown_architectures_are_refused():
    with pytest.raises(UnknownNameError, match="MambaForCausalLM"):
        graph({"architectures": ["MambaForCausalLM"]}, "inference", 1, 8, "mamba")
    with pytest.raises(InputError, match="n_head"):
        graph({k: v for k, v in GPT2.items() if k != "n_head"}, "inference", 1, 8, "tiny")


MODELS = "device,model,mode,seqlen,batch,option,e2e_latency\n"


def models(tmp_path: Path, row: str, config: str) -> Path:
    """A folder with one measurement of a model called ``tiny``."""
    folder(tmp_path, "")
    (tmp_path / "label_e2e.csv").write_text(MODELS + row + "\n")
    (tmp_path / "DLmodel_configs" / "tiny.json").write_text(config)
    (tmp_path / "outside.json").write_text(json.dumps(GPT2))
    return tmp_path


GOOD_ROW = "NVIDIA_L4,tiny,inf,16,1,,3.5"


def test_a_measured_model_is_read(tmp_path):
    assert len(read_models(models(tmp_path, GOOD_ROW, json.dumps(GPT2)))) == 1


@pytest.mark.parametrize(
    ("row", "config", "said"),
    [
        (GOOD_ROW.replace(",1,", ",0.5,"), GPT2, r"label_e2e\.csv:2: batch is 0.5, not a whole number"),
        (GOOD_ROW.replace("tiny", "../outside"), GPT2, r"label_e2e\.csv:2: model '\.\./outside' is no name"),
        (GOOD_ROW.replace("tiny", "..\\outside"), GPT2, r"label_e2e\.csv:2: model .* is no name"),
        (GOOD_ROW + ",9", GPT2, r"label_e2e\.csv:2: row has more fields"),
        (GOOD_ROW, "[" * 100_000, r"DLmodel_configs/tiny\.json: .*nested too deeply"),
        (GOOD_ROW, {**GPT2, "architectures": []}, r"DLmodel_configs/tiny\.json: lacks \"architectures\""),
        (GOOD_ROW, {**GPT2, "architectures": ["Other"]}, r"DLmodel_configs/tiny\.json: unknown architecture 'Other'"),
        (GOOD_ROW, {**GPT2, "n_head": 0}, r"DLmodel_configs/tiny\.json"),
        (GOOD_ROW, {**GPT2, "n_embd": "64"}, r"DLmodel_configs/tiny\.json"),
        (GOOD_ROW, {**GPT2, "n_layer": 1e300}, r"DLmodel_configs/tiny\.json: n_layer is 1e\+300"),
        (GOOD_ROW, {k: v for k, v in GPT2.items() if k != "n_embd"}, r"DLmodel_configs/tiny\.json: .*lacks 'n_embd'"),
    ],
)
def test_damaged_models_are_named(tmp_path, row, config, said):
    text = config if isinstance(config, str) else json.dumps(config)
    with pytest.raises(InputError, match=said):
        read_models(models(tmp_path, row, text))
