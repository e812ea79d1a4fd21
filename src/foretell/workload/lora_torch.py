"""Low-rank adapters in a PyTorch module, for the time of a capture: the operations peft runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeGuard

import torch
from torch import nn

from foretell.errors import InputError
from foretell.workload.lora import ALL_LINEAR, LoRA

_SCALING = 2.0  # alpha over rank: a constant, which costs the same whatever it is


class AdapterWeight(nn.Parameter):
    """A trained matrix of low rank, (out, in): fp32 whatever the precision of the model, as peft keeps it."""


class Adapter(nn.Module):
    """x (…, in) to (…, out) through an `AdapterWeight`, multiplied in the element type of x."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        super().__init__()
        self.weight = AdapterWeight(torch.empty((outputs, inputs), dtype=torch.float32, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = nn.functional.linear(x, self.weight.to(x.dtype))
        return result


class Adapted(nn.Module):
    """y = W x + s·B (A x): a frozen linear layer with two trained matrices (rank, in) and (out, rank) beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        device = base.weight.device
        self.base_layer = base
        self.lora_A = Adapter(base.in_features, rank, device)
        self.lora_B = Adapter(rank, base.out_features, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (…, in) to (…, out)."""
        result: torch.Tensor = self.base_layer(x)
        update: torch.Tensor = self.lora_B(self.lora_A(x)) * _SCALING
        return result + update

    @property
    def weight(self) -> torch.Tensor:
        """The frozen matrix: some models look at its dtype."""
        return self.base_layer.weight


def _can_be_adapted(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Linear layers, but that inside ``nn.MultiheadAttention``: its weight is read, the layer never called."""
    return isinstance(module, nn.Linear) and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)


@contextmanager
def adapted(module: nn.Module, lora: LoRA) -> Iterator[None]:
    """`module` with adapters beside its linear layers and all else frozen; afterwards it is as it was.

    Where the module can make its embeddings require a gradient, they do, as adapters below checkpointed layers need.
    Raises InputError where it has no linear layer or one is too small, UnknownNameError for an unknown target.
    """
    modules = dict(module.named_modules(remove_duplicate=False))  # a shared layer stays shared
    layers = {name: m for name, m in modules.items() if name and _can_be_adapted(m)}
    head = getattr(module, "get_output_embeddings", lambda: None)()
    if ALL_LINEAR in lora.targets:  # one output or input is a gate, not a matrix
        layers = {n: m for n, m in layers.items() if m is not head and min(m.in_features, m.out_features) > 1}
    if not layers:
        raise InputError(f"{type(module).__name__} has no nn.Linear to adapt", "--lora", "leave --lora out")
    chosen = lora.choose(layers, type(module).__name__)
    adapters: dict[nn.Module, Adapted] = {}
    with ExitStack() as undo:
        for parameter in [p for p in module.parameters() if p.requires_grad]:
            parameter.requires_grad_(False)
            undo.callback(parameter.requires_grad_, True)
        for name in (name for name in layers if name in chosen):
            base = layers[name]
            lora.check(name, base.out_features, base.in_features)
            if base not in adapters:
                adapters[base] = Adapted(base, lora.rank)
            parent, _, child = name.rpartition(".")
            undo.callback(setattr, modules[parent], child, base)
            setattr(modules[parent], child, adapters[base])
        enable, disable = (getattr(module, f"{verb}able_input_require_grads", None) for verb in ("en", "dis"))
        if enable is not None and disable is not None:  # a model of transformers
            with suppress(NotImplementedError):  # it has no input embeddings
                enable()
                undo.callback(disable)
        yield
