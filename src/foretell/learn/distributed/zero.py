"""`Unit`: the weights of one part of the model, shared out between data-parallel ranks as ZeRO's stages do.

Rajbhandari et al., arXiv 1910.02054. Stage 0 keeps all on every rank; 1 shares out the optimiser's state; 2 the
gradients too, which are reduced after each backward pass; 3 the weights too, which are gathered for each pass and
dropped after it. Weights lie in one flat array, padded to a multiple of the ranks, of which rank i owns the i-th piece.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from foretell.learn.distributed.model import SPLIT
from foretell.learn.distributed.wire import Group

__all__ = ["Unit"]


class Unit:
    """Flat weights, gradients and momentum; `weights` are views into the first, by name.

    `partial` says that gradients of weights which are not split between tensor-parallel ranks (norms, positions) are
    sums over a part of the sequence and want summing over `tensor`.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], data: Group, tensor: Group, *, stage: int, partial: bool
    ) -> None:
        self.stage, self.data, self.tensor, self.partial = stage, data, tensor, partial
        count = sum(weight.numel() for weight in weights.values())
        self._part = -(-count // data.size)
        any_weight = next(iter(weights.values()))
        self._full = any_weight.new_zeros(self._part * data.size)
        self.weights: dict[str, Tensor] = {}
        self._places: dict[str, slice] = {}
        start = 0
        for name, weight in weights.items():
            self._places[name] = place = slice(start, start + weight.numel())
            self._full[place] = weight.reshape(-1)
            # `.data`, so that refilling the array is not taken for a change of tensors that autograd keeps.
            self.weights[name] = self._full[place].data.view(weight.shape).requires_grad_()
            start += weight.numel()
        self._replicated = [name for name in weights if name not in SPLIT]
        own = slice(data.index * self._part, (data.index + 1) * self._part)
        self._shard = self._full[own] if stage < 3 else self._full[own].clone()
        self._size = self._full.untyped_storage().nbytes()
        self._grads: Tensor | None = None
        self._grad_shard: Tensor | None = self._shard.new_zeros(self._part) if stage >= 2 else None
        self._momentum = torch.zeros_like(self._full if stage == 0 else self._shard)
        self.release()

    @property
    def storage(self) -> Tensor:
        """The array the weights lie in."""
        return self._full

    def gather(self) -> None:
        """Have the weights here."""
        if self.stage == 3 and not self._full.untyped_storage().nbytes():
            gathered = self.data.all_gather(self._shard)
            self._full.untyped_storage().resize_(self._size)
            self._full.copy_(gathered)

    def release(self) -> None:
        """They are not needed for now."""
        if self.stage == 3:
            self._full.untyped_storage().resize_(0)

    def open_gradients(self) -> None:
        """Have room for gradients, zero at first."""
        if self._grads is None:
            self._grads = self._shard.new_zeros(self._part * self.data.size)
            for name, weight in self.weights.items():
                weight.grad = self._grads[self._places[name]].view(weight.shape)

    def close_pass(self) -> None:
        """A backward pass is done: with stages 2 and 3 its gradients are shared out at once."""
        if self.stage >= 2 and self._grads is not None:
            assert self._grad_shard is not None
            self._sum_partial()
            self._grad_shard += self.data.reduce_scatter(self._grads)
            self._drop_gradients()

    def close_step(self) -> None:
        """All backward passes are done: stages 0 and 1 sum the gradients now."""
        if self.stage >= 2:
            return
        self.open_gradients()
        assert self._grads is not None
        self._sum_partial()
        if self.stage == 0:
            self._grads.copy_(self.data.all_reduce(self._grads))
        else:
            self._grad_shard = self.data.reduce_scatter(self._grads).clone()
            self._drop_gradients()

    def update(self, rate: float, momentum: float) -> None:
        """A step of gradient descent with momentum, of what this rank owns; stages 1 and 2 then gather the weights."""
        own, grads = (self._full, self._grads) if self.stage == 0 else (self._shard, self._grad_shard)
        assert grads is not None
        self._momentum.mul_(momentum).add_(grads)
        own.sub_(self._momentum, alpha=rate)
        if self.stage in (1, 2):
            self._full.copy_(self.data.all_gather(self._shard.clone()))
        grads.zero_()
        if self.stage == 1:
            self._grad_shard = None

    def held(self) -> dict[str, int]:
        """Bytes of weights, gradients and momentum that are here now."""
        shard = 0 if self.stage < 3 else self._shard.untyped_storage().nbytes()
        return {
            "parameters": self._full.untyped_storage().nbytes() + shard,
            "gradients": sum(t.untyped_storage().nbytes() for t in (self._grads, self._grad_shard) if t is not None),
            "optimizer": self._momentum.untyped_storage().nbytes(),
        }

    def gradients(self) -> dict[str, Tensor]:
        """All gradients of this tensor-parallel rank, by name: after `close_step` and before `update`."""
        with self.data.wire.uncounted():
            flat = self._grads if self.stage == 0 else self.data.all_gather(_present(self._grad_shard))
        return self._named(_present(flat))

    def parameters(self) -> dict[str, Tensor]:
        """All weights of this tensor-parallel rank, by name."""
        with self.data.wire.uncounted():
            return self._named(self._full if self.stage < 3 else self.data.all_gather(self._shard))

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: flat[place].reshape(self.weights[name].shape).clone() for name, place in self._places.items()}

    def _sum_partial(self) -> None:
        if not self.partial:
            return
        assert self._grads is not None
        together = torch.cat([self._grads[self._places[name]] for name in self._replicated])
        summed = self.tensor.all_reduce(together)
        sizes = [self.weights[name].numel() for name in self._replicated]
        for name, piece in zip(self._replicated, torch.split(summed, sizes), strict=True):
            self._grads[self._places[name]] = piece

    def _drop_gradients(self) -> None:
        self._grads = None
        for weight in self.weights.values():
            weight.grad = None


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
