"""Any architecture of transformers, from a configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import foretell  # noqa: E402
from foretell.errors import CaptureError, InputError, UnknownNameError  # noqa: E402
from foretell.graph import Graph  # noqa: E402

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen3_moe": SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "gemma3_text": SMALL | {"head_dim": 16},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100},
}


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETELL_CACHE", "off")


def write(tmp_path: Path, data: Any) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    return f"hf:{path}"


def capture(tmp_path: Path, model_type: str, **settings: Any) -> Graph:
    workload = write(tmp_path, CONFIGS[model_type] | {"model_type": model_type})
    return foretell.capture(workload, batch=2, seq_len=32, **settings)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_phases(tmp_path: Path, model_type: str) -> None:
    forward = capture(tmp_path, model_type)
    prefill = capture(tmp_path, model_type, phase="prefill")
    decode = capture(tmp_path, model_type, phase="decode", context=48)
    train = capture(tmp_path, model_type, train=True, precision="bf16", optimizer="adamw")
    assert forward.items == {"sequences": 2, "tokens": 64}
    assert decode.items == {"tokens": 2}
    for graph in (forward, prefill, decode, train):
        assert not graph.not_counted
        assert graph.parameters == forward.parameters
    # only the last position's logits are made
    assert forward.macs() - prefill.macs() == 2 * 31 * 64 * 100
    assert train.macs(phase="backward") == 2 * train.macs(phase="forward") == 2 * forward.macs()
    assert all(s.role != "kv_cache" for s in forward.storages)
    assert sum(s.nbytes for s in decode.storages if s.role == "kv_cache") > 0


def test_decode_reads_the_whole_cache(tmp_path: Path) -> None:
    decode = capture(tmp_path, "llama", phase="decode", context=48)
    cached = sum(s.nbytes for s in decode.storages if s.role == "kv_cache" and s.born < 0)
    grown = sum(s.nbytes for s in decode.storages if s.role == "kv_cache" and s.born >= 0)
    assert grown * 48 == cached * 49  # the step makes it anew, one token longer
    memory = foretell.predict(decode, on="h100-sxm").memory
    assert memory.breakdown["kv_cache"] <= cached + grown
    assert memory.breakdown["temporaries"] < cached
    prefill = capture(tmp_path, "llama", phase="prefill")
    assert sum(s.nbytes for s in prefill.storages if s.role == "kv_cache") == 2 * 2 * 2 * 2 * 32 * 16 * 4
    assert cached == 2 * 2 * 2 * 2 * 48 * 16 * 4  # layers, k and v, batch, kv heads, positions, depth, bytes
    attention = [op for op in decode.ops if op.kind == "attention"]
    assert [op.macs for op in attention] == [2 * 2 * 4 * 49 * 16] * 2
    first = capture(tmp_path, "llama", phase="decode", context=0)
    assert [op.macs for op in first.ops if op.kind == "attention"] == [2 * 2 * 4 * 1 * 16] * 2


def test_experts_cost_what_the_tokens_choose(tmp_path: Path) -> None:
    graph = capture(tmp_path, "qwen3_moe")
    experts = [op for op in graph.ops if op.kind == "grouped_matmul"]
    assert sum(op.macs for op in experts) == 2 * 64 * 2 * 3 * 64 * 32  # layers, tokens, chosen, products, widths


@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointing(tmp_path: Path, checkpointing: bool) -> None:
    graph = capture(tmp_path, "llama", train=True, checkpointing=checkpointing)
    again = graph.macs(phase="backward") - 2 * graph.macs(phase="forward")
    # all but the head, and each layer's last product: recomputation stops once everything saved is there again
    layers = graph.macs(phase="forward") - 64 * 64 * 100 - 2 * 64 * 64 * 96
    assert again == (layers if checkpointing else 0)


@pytest.mark.parametrize(
    ("data", "main"),
    [
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 64,
          "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}, (2, 3, 224, 224)),
        ({"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "d_model": 64,
          "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
          "vocab_size": 51865}, (2, 80, 3000)),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_kv": 16,
          "num_layers": 1, "num_heads": 4, "d_ff": 96, "vocab_size": 100}, (2, 512)),
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"], **SMALL}, (2, 512)),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_other_modalities(tmp_path: Path, data: dict[str, Any], main: tuple[int, ...]) -> None:
    workload = write(tmp_path, data)
    graph = foretell.capture(workload, batch=2)
    assert main in {graph.tensors[t].shape for t in graph.inputs}
    assert not graph.not_counted
    assert foretell.capture(workload, batch=2, train=True).mode == "train"


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        ({"hidden_size": 64}, InputError, "model_type"),
        ({"model_type": "lama"}, UnknownNameError, "did you mean 'llama'"),
        ({"model_type": "llama", "architectures": ["LamaForCausalLM"]}, UnknownNameError, "LlamaForCausalLM"),
        ({"model_type": "llama", "hidden_size": "wide"}, InputError, "hidden_size"),
        ({"model_type": "llama", **SMALL, "num_attention_heads": 5}, InputError, "attention heads|num_attention_heads"),
        ([1], InputError, "not a JSON object"),
    ],
)
def test_wrong_configs(tmp_path: Path, data: Any, error: type[Exception], text: str) -> None:
    with pytest.raises((error, CaptureError), match=text):
        foretell.capture(write(tmp_path, data), seq_len=8)


def test_a_sequence_beyond_the_positions(tmp_path: Path) -> None:
    workload = write(tmp_path, CONFIGS["gpt2"] | {"model_type": "gpt2"})
    with pytest.raises(InputError, match="1024 positions"):
        foretell.capture(workload, seq_len=2000)


def test_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        foretell.capture(f"hf:{path}")
    with pytest.raises(InputError, match="has no decode phase"):
        foretell.capture(write(tmp_path, {"model_type": "vit"}), phase="decode")
