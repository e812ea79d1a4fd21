"""Configurations: the catalogue against published counts, and every way a file can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretell.errors import ForetellError, InputError, UnknownNameError
from foretell.workload import llm
from foretell.workload.llm.hf import from_hf_config

TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
}

# Counts of the published weight files, or of model cards that print every digit.
EXACT = {
    "bloom-176b": 176_247_271_424,
    "bloom-7b1": 7_069_016_064,
    "deepseek-v2-lite": 15_706_484_224,
    "falcon-7b": 6_921_720_704,
    "gemma-2-27b": 27_227_128_320,
    "gpt-neox-20b": 20_554_567_680,
    "gpt-oss-120b": 116_829_156_672,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mpt-7b": 6_649_286_656,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}


def test_the_catalogue_is_wide() -> None:
    assert len(llm.catalogue()) >= 24
    assert set(EXACT) <= set(llm.catalogue())


@pytest.mark.parametrize("name", llm.catalogue())
def test_parameters_are_the_published_ones(name: str) -> None:
    """Within 0.5 %, or within the rounding of a figure given to two digits (OPT-1.3B has 1.316e9)."""
    config = llm.config(name)
    published = config.published_parameters
    assert config.source
    assert config.published_source
    assert published is not None
    assert abs(config.parameters - published) <= max(0.005 * published, rounding(published))
    if config.published_active_parameters is not None:
        # Authors differ in whether the embedding of a token is active, and some cut digits off instead of rounding.
        counts = [llm.count_parameters(config, active=True, lookups=lookups) for lookups in (True, False)]
        wanted = config.published_active_parameters
        assert min(abs(count - wanted) for count in counts) <= max(0.005 * wanted, 2 * rounding(wanted))


def rounding(figure: int) -> float:
    """Half a unit of the last digit that is not zero."""
    digits = str(figure)
    return 0.5 * 10.0 ** (len(digits) - len(digits.rstrip("0")))


@pytest.mark.parametrize(("name", "parameters"), EXACT.items())
def test_parameters_are_exact(name: str, parameters: int) -> None:
    assert llm.config(name).parameters == parameters


@pytest.mark.parametrize("name", llm.catalogue())
def test_graphs_hold_every_parameter(name: str) -> None:
    config = llm.config(name)
    graph = llm.graph(config, phase="decode", context=16)
    assert graph.parameter_bytes == 2 * config.parameters == 2 * graph.parameters
    assert sum(group.layers for group in config.groups) == config.layers
    assert not graph.not_counted
    assert {op.kind for op in graph.ops}.isdisjoint({"other"})


def test_layers_fall_into_groups() -> None:
    gemma = llm.config("gemma-3-27b").groups
    assert [(g.layers, g.window, g.moe) for g in gemma] == [(52, 1024, False), (10, None, False)]
    deepseek = llm.config("deepseek-v3").groups
    assert [(g.layers, g.window, g.moe) for g in deepseek] == [(3, None, False), (58, None, True)]
    assert [g.name for g in deepseek] == ["layers.dense", "layers.experts"]
    every_other = llm.config("mixtral-8x7b").replace(moe=llm.MoE(8, 2, 14336, every=2))
    assert [g.layers for g in every_other.groups] == [16, 16]


def test_unknown_names_list_near_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"llama-3-8bb.*llama-3-8b") as caught:
        llm.config("llama-3-8bb")
    assert caught.value.exit_code == 2
    assert llm.config("llm:Llama-3-8B") is llm.config("llama-3-8b")


def test_a_file_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('layers = 2\nhidden = 64\nheads = 4\nintermediate = 128\nvocab = 1000\n[moe]\nexperts = 4\n'
                    'top_k = 2\nintermediate = 32\n')
    config = llm.config(str(path))
    assert config.name == "mine"
    # embedding + head, final norm, and in each layer: 4 projections, 2 norms, router, 4 experts of 3 matrices
    assert config.parameters == 2 * 64_000 + 64 + 2 * (4 * 64 * 64 + 2 * 64 + 4 * 64 + 4 * 3 * 64 * 32)
    assert config.active_parameters == config.parameters - 2 * 2 * 3 * 64 * 32
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    assert llm.config(str(path)).parameters == llm.from_hf_config(TINY).parameters


BASE = "layers = 2\nhidden = 64\nheads = 4\nintermediate = 128\nvocab = 1000\n"


@pytest.mark.parametrize(("text", "message"), [
    ("layers = ", "malformed"),
    ("layers = 2\nhidden = 64\n", "'heads' is missing"),
    (BASE + "hiden = 3\n", "unknown key.*'hiden'.*'hidden'"),
    (BASE.replace("64", '"64"'), "'hidden' is '64', want a count"),
    (BASE.replace("64", "-64"), "'hidden' is -64, want a count"),
    (BASE + "gated = 1\n", "'gated' is 1, want true or false"),
    (BASE + "norm = 3\n", "'norm' is 3, want a string"),
    (BASE + "attention_pattern = 3\n", "want a list of strings"),
    (BASE + "attention_pattern = []\n", "attention_pattern is empty"),
    (BASE + 'attention_pattern = ["sliding"]\n', "sliding_window is missing"),
    (BASE + 'attention_pattern = ["slid"]\n', "did you mean 'sliding'"),
    (BASE + 'norm = "rmsnorm"\n', "norm of llm config.*'rmsnorm'"),
    (BASE + 'positions = "learned"\n', "position_rows is missing"),
    (BASE + "kv_heads = 3\n", "no multiple of kv_heads 3"),
    (BASE.replace("heads = 4", "heads = 3"), "no multiple of heads 3"),
    (BASE.replace("layers = 2", "layers = 0"), "layers is 0"),
    (BASE + "moe = 3\n", r"\[moe\]: is not a table"),
    (BASE + "[moe]\nexperts = 4\n", r"\[moe\]: 'top_k' is missing"),
    (BASE + "[moe]\nexperts = 4\ntop_k = 5\nintermediate = 3\n", "top_k 5 is not between"),
    (BASE + '[moe]\nexperts = 4\ntop_k = 2\nintermediate = 3\nscoring = "soft"\n', "did you mean 'softmax'"),
])
def test_a_malformed_file_says_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(text)
    with pytest.raises(ForetellError, match=message) as caught:
        llm.config(str(path))
    assert "broken" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ForetellError, match=r"none\.toml"):
        llm.config(str(tmp_path / "none.toml"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InputError, match=r"bad\.json: not JSON"):
        llm.config(str(tmp_path / "bad.json"))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(InputError, match="not a JSON object"):
        llm.config(str(tmp_path / "list.json"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot be read"):
        llm.config(str(tmp_path / "bytes.toml"))


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                                   "intermediate_size", "model_type"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(InputError, match=f"config.json: '{field}' is missing"):
        llm.from_hf_config({k: v for k, v in TINY.items() if k != field})


def test_odd_fields_are_named() -> None:
    with pytest.raises(UnknownNameError, match=r"'lama'.*'llama'"):
        llm.from_hf_config(TINY | {"model_type": "lama"})
    with pytest.raises(InputError, match="'hidden_size' is 'big', want a count"):
        llm.from_hf_config(TINY | {"hidden_size": "big"})
    with pytest.raises(UnknownNameError, match="hidden_act"):
        llm.from_hf_config(TINY | {"hidden_act": "sill"})
    with pytest.raises(InputError, match="layer type 'linear_attention'"):
        llm.from_hf_config(TINY | {"model_type": "gemma2", "layer_types": ["linear_attention"]})
    with pytest.raises(InputError, match="'text_config' is missing"):
        llm.from_hf_config({"model_type": "gemma3"})
    with pytest.raises(InputError, match=r"text_config: 'hidden_size' is missing"):
        llm.from_hf_config({"model_type": "gemma3", "text_config": {"num_hidden_layers": 2}})
    with pytest.raises(InputError, match="text_config' is not a table"):
        llm.from_hf_config({"model_type": "gemma3", "text_config": 3})


@pytest.mark.parametrize(("data", "message"), [
    ({"model_type": "opt", "hidden_size": 64, "do_layer_norm_before": False}, "do_layer_norm_before"),
    ({"model_type": "opt", "hidden_size": 64, "word_embed_proj_dim": 32}, "word_embed_proj_dim"),
    (TINY | {"model_type": "phi", "qk_layernorm": True}, "qk_layernorm"),
    ({"model_type": "mpt", "d_model": 64, "n_heads": 4, "attn_config": {"qk_ln": True}}, "multi-head"),
    (TINY | {"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "not the first layers"),
])
def test_layouts_we_lack_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        llm.from_hf_config(data)
    assert "hf:" in str(caught.value)


def test_layer_types_become_the_shortest_pattern() -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    data = TINY | {"model_type": "gemma2", "num_hidden_layers": 6, "sliding_window": 8, "layer_types": kinds}
    assert llm.from_hf_config(data).attention_pattern == ("sliding", "full")
    data["layer_types"] = [*kinds[:4], "full_attention", "full_attention"]
    assert llm.from_hf_config(data).attention_pattern == ("sliding", "full", "sliding", "full", "full", "full")
    windowed = TINY | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}
    assert llm.from_hf_config(windowed).attention_pattern == ("full", "sliding")


@pytest.mark.parametrize(("quantization", "weights"), [
    (None, ""),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    ({"quant_method": "mxfp4", "modules_to_not_convert": []}, "mxfp4"),
    ({"quant_method": "awq", "bits": 4}, "int4"),
    ({"quant_method": "gptq", "bits": 8}, "w8a16"),
    ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}},
     "int4"),
    ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float"}}}},
     "fp8"),
    # As llm-compressor writes W8A8: RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8, config.json.
    ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}}}}, "int8"),
    ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "weights": {"num_bits": 8, "type": "int"}, "input_activations": None}}}, "w8a16"),
    ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "weights": {"num_bits": 4, "type": "int"}, "input_activations": {"num_bits": 8, "type": "int"}}}}, "int4"),
    ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8, "type": "float"}}}}, "fp8"),
    ({"quant_method": "compressed-tensors", "config_groups": [1]}, ""),
    ({"quant_method": "bitsandbytes"}, ""),
    ("fp8", ""),
])  # fmt: skip
def test_the_format_of_published_weights(quantization: Any, weights: str) -> None:
    assert from_hf_config({**TINY, "quantization_config": quantization}).published_weights == weights


def test_a_format_of_weights_that_is_none() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'fp8'"):
        llm.config("llama-3.1-8b").replace(published_weights="fp9")
