"""Megatron-LM's own parser, for the tests of what is written for it."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from types import SimpleNamespace

import pytest

from foretell.plan.training.emit import megatron
from foretell.plan.training.emit.options import given


@pytest.fixture
def validated(monkeypatch):
    """Parse and validate options as ``pretrain_gpt.py`` does, up to the configuration of the transformer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = pytest.importorskip(
            "megatron.training.arguments", reason="megatron-core 0.19 with its training part wants Python 3.12"
        )
        optimizer = pytest.importorskip("megatron.core.optimizer.optimizer_config")
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda *_: 9)
    monkeypatch.setattr(arguments, "is_te_min_version", lambda *_: True)
    transformer = sys.modules["megatron.core.transformer.transformer_config"]
    monkeypatch.setattr(transformer, "is_te_min_version", lambda *_: True)

    def run(text: str) -> SimpleNamespace:
        found = given(text)
        own = ("--nnodes", "--nproc-per-node", "--world-size")
        words = [word for option in found if option.name not in own for word in (option.name, *option.values)]
        parsed, _ = megatron.arguments(text, "options")
        connections = "8" if "--use-megatron-fsdp" in words or "--use-torch-fsdp2" in words else "1"
        monkeypatch.setenv("WORLD_SIZE", str(parsed.number("--world-size") or 1))
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
        words.append("--no-rope-fusion")  # whose kernel is not installed here
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args = arguments.validate_args(arguments.parse_args())
            config = arguments.core_transformer_config_from_args(args)
            names = {field.name for field in dataclasses.fields(optimizer.OptimizerConfig)}
            try:
                optimizer.OptimizerConfig(**{name: getattr(args, name) for name in names if hasattr(args, name)})
            except RuntimeError as error:
                if "TransformerEngine" not in str(error):
                    raise
        return SimpleNamespace(args=args, config=config)

    return run
