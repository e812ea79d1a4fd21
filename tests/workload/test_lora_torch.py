"""Adapters in captured modules: the parametric path, our capture and peft do the same work."""

from __future__ import annotations

from typing import Any

import pytest

import foretell
from foretell.errors import ForetellError, InputError, UnknownNameError
from foretell.graph import Graph
from foretell.workload import llm
from foretell.workload.lora import LoRA

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from foretell.workload.lora_torch import Adapted, adapted  # noqa: E402

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 320, "max_position_embeddings": 128,
    "pad_token_id": 0,
}
TARGETS = [("q_proj", "v_proj"), ("all-linear",)]


def model(**changes: Any) -> Any:
    data = CONFIG | changes
    config = transformers.AutoConfig.for_model(str(data.pop("model_type")), **data)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def held(graph: Graph, role: str) -> int:
    return sum(s.nbytes for s in graph.storages if s.role == role)


def captured(module: Any, **settings: Any) -> Graph:
    ids = torch.zeros((2, 24), dtype=torch.int64)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    return foretell.capture(module, inputs, train=True, optimizer="adamw", **settings)


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "bf16"])
@pytest.mark.parametrize("targets", TARGETS, ids="-".join)
def test_the_parametric_path_equals_the_capture(targets: tuple[str, ...], precision: str) -> None:
    lora = LoRA(4, targets)
    parametric = llm.graph(llm.from_hf_config(CONFIG), phase="train", batch=2, seq_len=24, precision=precision,
                           optimizer="adamw", lora=lora)
    truth = captured(model(), precision=precision, lora=lora)
    for phase in ("forward", "backward"):
        assert parametric.macs(phase=phase) == truth.macs(phase=phase)
    assert parametric.parameters == truth.parameters
    assert parametric.trainable_parameters == truth.trainable_parameters
    assert parametric.parameter_bytes == truth.parameter_bytes
    assert held(parametric, "gradient") == held(truth, "gradient") == 4 * truth.trainable_parameters
    assert held(parametric, "optimizer") == pytest.approx(held(truth, "optimizer"), rel=5e-3)  # step counters


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize("targets", TARGETS, ids="-".join)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_capture_equals_that_of_peft(targets: tuple[str, ...], precision: str) -> None:
    peft = pytest.importorskip("peft")
    wanted = targets[0] if targets == ("all-linear",) else list(targets)
    theirs = peft.get_peft_model(model(), peft.LoraConfig(r=4, target_modules=wanted, task_type="CAUSAL_LM"))
    theirs.enable_input_require_grads()
    ours, truth = captured(model(), precision=precision, lora=LoRA(4, targets)), captured(theirs, precision=precision)
    for phase in ("forward", "backward", "optimizer"):
        assert ours.macs(phase=phase) == truth.macs(phase=phase)
    assert ours.parameters == truth.parameters
    assert ours.trainable_parameters == truth.trainable_parameters == theirs.get_nb_trainable_parameters()[0]
    assert held(ours, "gradient") == held(truth, "gradient")
    assert held(ours, "optimizer") == held(truth, "optimizer")
    for kind in ("matmul", "softmax", "normalization"):
        assert [op.name for op in ours.ops if op.kind == kind] == [op.name for op in truth.ops if op.kind == kind]


def test_a_module_is_afterwards_as_it_was() -> None:
    module = model()
    names = [name for name, _ in module.named_modules()]
    module.lm_head.weight.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in module.named_parameters()}
    with adapted(module, LoRA(4)):
        assert sum(isinstance(m, Adapted) for m in module.modules()) == 4
        trained = [name for name, p in module.named_parameters() if p.requires_grad]
        assert len(trained) == 8
        assert all("lora_" in name for name in trained)
    assert [name for name, _ in module.named_modules()] == names
    assert {name: p.requires_grad for name, p in module.named_parameters()} == flags
    assert not module.get_input_embeddings()._forward_hooks


def test_any_module_takes_adapters() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    graph = foretell.capture(module, torch.zeros(3, 8), train=True, lora="rank=2,targets=0")
    assert graph.trainable_parameters == 2 * (8 + 16)
    # forward: both layers and A, B; backward: the head's input gradient, then B's and A's, down to no input
    low = 3 * 2 * (8 + 16)
    assert graph.macs(phase="forward") == 3 * (8 * 16 + 16 * 4) + low
    assert graph.macs(phase="backward") == 3 * 16 * 4 + low + 3 * 2 * 16


def test_shared_layers_are_adapted_once_and_only_linear_ones_count() -> None:
    layer = torch.nn.Linear(8, 8)
    tied = torch.nn.ModuleDict({"first": layer, "second": layer})
    with adapted(tied, LoRA(2, ("all-linear",))):
        assert isinstance(tied["first"], Adapted)
        assert tied["first"] is tied["second"]
    assert tied["first"] is tied["second"] is layer
    with pytest.raises(InputError, match=r"no nn\.Linear"), adapted(torch.nn.Sequential(torch.nn.ReLU()), LoRA(2)):
        pass


def test_attention_whose_projection_is_never_called_is_left_alone() -> None:
    attention = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    graph = foretell.capture(attention, torch.zeros(2, 4, 16), train=True, lora="rank=2,targets=all-linear")
    assert graph.trainable_parameters == 2 * 2 * (16 + 32)
    with pytest.raises(UnknownNameError):
        foretell.capture(attention, torch.zeros(2, 4, 16), train=True, lora="rank=2,targets=out_proj")


def test_unknown_targets_and_wide_ranks_are_refused_and_nothing_changes() -> None:
    module = model()
    with pytest.raises(UnknownNameError, match="did you mean 'q_proj'"):
        captured(module, lora="rank=4,targets=q_prj")
    with pytest.raises(InputError, match="rank 33 exceeds"):
        captured(module, lora="rank=33")
    assert not any(isinstance(m, Adapted) for m in module.modules())
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("settings", [
    {"quantize": "nf4", "lora": "rank=2"}, {"optimizer": "paged-adamw"}, {"optimizer": "adamw-8bit"},
], ids=str)
def test_what_only_parametric_workloads_have_is_refused(settings: dict[str, Any]) -> None:
    module = torch.nn.Linear(8, 8)
    with pytest.raises(InputError, match="llm:"):
        foretell.capture(module, torch.zeros(3, 8), train=True, **settings)
    with pytest.raises(InputError, match="llm:"):
        foretell.capture("zoo:hardnet68", train=True, **settings)


def test_exported_programs_take_no_adapters() -> None:
    with pytest.raises(ForetellError, match="takes no adapters"):
        foretell.capture("pt2:none.pt2", train=True, lora="rank=2")
