"""Shapes of transformers: products, rules, and the search for better ones."""

from __future__ import annotations

import math

import jsonschema
import pytest

from foretell.advise.transformer import (
    ATTENTIONS,
    Setting,
    alignment,
    nearby,
    shapes,
    training_graph,
    unfused,
    violations,
)
from foretell.errors import InputError, UnknownNameError
from foretell.hardware import device
from foretell.report import json_text, schema
from foretell.workload import llm

A100 = device("a100-sxm4-40gb")
GPT = llm.config("opt-2.7b")


def _broken(config: llm.LLMConfig, setting: Setting) -> set[str]:
    return {v.size for v in violations(config, setting)}


@pytest.mark.parametrize(
    ("change", "setting", "broken"),
    [
        ({"vocab": 50_304, "heads": 20, "kv_heads": 0, "head_dim": 0}, Setting(), set()),
        ({"heads": 20, "kv_heads": 0, "head_dim": 0}, Setting(), {"vocabulary"}),
        ({"vocab": 50_304}, Setting(), {"size of a head"}),
        ({"vocab": 50_304, "intermediate": 10_000}, Setting(), {"size of a head", "intermediate / t"}),
        ({"vocab": 50_304}, Setting(stages=5), {"size of a head", "layers"}),
        ({"vocab": 50_304}, Setting(batch=1, seq_len=1000), {"size of a head", "tokens b · s"}),
        ({"vocab": 50_304}, Setting(tensor_parallel=32), {"size of a head", "hidden / t"}),
    ],
)
def test_each_rule_is_broken_by_its_size_alone(change: dict[str, int], setting: Setting, broken: set[str]) -> None:
    # hidden 2560 / 32 GPUs is 80; intermediate 10,240 / 32 is 320.
    assert _broken(GPT.replace(**change), setting) == broken


def test_alignment_is_the_power_of_two_in_all_lengths() -> None:
    assert [alignment(n) for n in (1, 2, 12, 80, 96, 128, 50_257, 50_304)] == [1, 2, 4, 16, 32, 64, 1, 64]


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_products_are_those_of_the_layer(attention: str) -> None:
    found = shapes(GPT, A100, Setting(batch=2, seq_len=1024, attention=attention), count=1)
    sizes = {p.name: (p.batch, p.m, p.n, p.k, p.count) for p in found.products}
    rows, h, a = 2048, 2560, 32
    assert sizes == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (1, rows, h, h, 32)),
        "up_proj": (1, rows, 4 * h, h, 32),
        "down_proj": (1, rows, h, 4 * h, 32),
        "lm_head": (1, rows, GPT.vocab, h, 1),
        "scores": (2 * a, 1024, 1024, h // a, 32),
        "mix": (2 * a, 1024, h // a, 1024, 32),
    }
    for p in found.products:
        assert 0 < p.efficiency <= 1
        if p.tile is not None:
            assert p.fill is not None
            assert p.waves is not None
            tiles = p.batch * math.ceil(p.m / p.tile[0]) * math.ceil(p.n / p.tile[1])
            assert p.fill == pytest.approx(p.batch * p.m * p.n / (tiles * math.prod(p.tile)))
            assert p.waves >= tiles / 108 - 1e-9
            assert 0 < p.wave_fill <= 1


def test_attention_as_products_does_the_same_arithmetic() -> None:
    fused = training_graph(GPT, Setting(batch=1, seq_len=512))
    apart = unfused(fused)
    assert all(op.kind != "attention" for op in apart.ops)
    attention = {phase: sum(o.macs * o.repeat for o in fused.ops if o.kind == "attention" and o.phase == phase)
                 for phase in ("forward", "backward")}  # fmt: skip
    for phase, macs in attention.items():
        assert apart.macs(phase=phase) - (fused.macs(phase=phase) - macs) == pytest.approx(macs)
    # The gradient of a softmax that was kept takes no product to make it anew.
    assert attention["backward"] == 2 * attention["forward"]


def test_a_share_of_the_model_does_a_share_of_the_arithmetic() -> None:
    whole, part = (training_graph(GPT, Setting(batch=1, seq_len=512, tensor_parallel=t)) for t in (1, 4))
    assert part.macs() == pytest.approx(whole.macs() / 4, rel=1e-3)
    moe = llm.config("mixtral-8x7b")
    whole, part = (training_graph(moe, Setting(batch=1, seq_len=512, tensor_parallel=t)) for t in (1, 8))
    assert part.macs() == pytest.approx(whole.macs() / 8, rel=0.01)


@pytest.mark.parametrize("name", ["opt-2.7b", "llama-3.1-8b", "gpt2-xl", "mixtral-8x7b", "deepseek-v2-lite", "phi-2"])
def test_shapes_nearby_are_alike_and_break_no_new_rule(name: str) -> None:
    config, setting = llm.config(name), Setting(tensor_parallel=1, stages=2)
    found = list(nearby(config, setting, 0.02))
    assert len(set(map(repr, found))) == len(found)
    assert config not in found
    for other in found:
        assert abs(other.parameters / config.parameters - 1) <= 0.02
        assert _broken(other, setting) <= _broken(config, setting)
        assert other.heads % other.kv_heads == 0
        assert other.vocab >= config.vocab


def test_better_shapes_are_sorted_and_count_parameters() -> None:
    found = shapes(GPT, A100, Setting(attention="products"), count=8)
    assert [s.gain for s in found.better] == sorted((s.gain for s in found.better), reverse=True)
    for shape in found.better:
        size = shape.config.parameters / GPT.parameters
        assert shape.gain == pytest.approx(shape.tokens_per_s / found.tokens_per_s * size - 1)
        assert shape.tokens_per_s * shape.time_s == pytest.approx(4 * 2048)
    assert {"heads", "head_dim"} <= set(found.better[0].changes)
    assert found.better[0].config.head_dim % 64 == 0  # 80 is the size that the paper warns of
    jsonschema.validate(found.to_dict(), schema("foretell.shapes/1"))
    assert json_text(found.to_dict())


def test_a_good_shape_has_less_to_gain_than_a_bad_one() -> None:
    setting = Setting(attention="products")
    good = GPT.replace(heads=20, kv_heads=0, head_dim=0, vocab=50_304)
    gains = [max((s.gain for s in shapes(c, A100, setting).better), default=0.0) for c in (good, GPT)]
    assert gains[0] < gains[1]


@pytest.mark.parametrize(
    ("config", "setting", "on", "said"),
    [
        (GPT, Setting(tensor_parallel=3), "t4", "heads 32"),
        (llm.config("llama-3.1-8b"), Setting(tensor_parallel=32), "xeon-8480-plus", "is no GPU"),
        (llm.config("mixtral-8x7b").replace(heads=48, kv_heads=16, head_dim=128), Setting(tensor_parallel=3), "t4",
         "intermediate 14336"),
        (GPT, Setting(seq_len=4096), "t4", "learned positions"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(config: llm.LLMConfig, setting: Setting, on: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        shapes(config, device(on), setting)


def test_settings_are_checked() -> None:
    with pytest.raises(InputError, match="batch is 0"):
        Setting(batch=0)
    with pytest.raises(UnknownNameError, match="fused"):
        Setting(attention="fuse")
    with pytest.raises(InputError, match="give a share"):
        shapes(GPT, A100, within=0.5)
    with pytest.raises(UnknownNameError, match="bf16"):
        shapes(GPT, A100, Setting(precision="bf6"))


def test_a_gain_too_small_to_tell_is_not_shown() -> None:
    found = shapes(llm.config("llama-3-70b"), device("h100-sxm"), Setting(seq_len=1024), count=50)
    assert found.tried > 10
    assert found.better == ()
