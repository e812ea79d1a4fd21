"""`Activations`: what autograd keeps for the backward pass, by micro-batch and in bytes, as it really is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Activations"]


class Activations:
    """Counts saved tensors while they live; a storage that several nodes keep counts once.

    `peak_bytes` is the most held at once; `peak_passes[chunk]` the micro-batches of which a chunk held anything when
    most were held in all, at the first such moment. Storages given to `exclude` (parameters, masks, tokens) are none.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.peak_passes: Counter[int] = Counter()
        self._bytes = 0
        self._excluded: set[int] = set()
        self._kept: list[Tensor] = []
        self._users: Counter[int] = Counter()
        self._live: Counter[tuple[int, int]] = Counter()

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Count nothing that lies in the storage of these."""
        for tensor in tensors:
            self._kept.append(tensor)  # so that no other storage gets its address
            self._excluded.add(_storage(tensor))

    @contextmanager
    def of(self, chunk: int, micro_batch: int) -> Iterator[None]:
        """What is saved in here belongs to this pass of this chunk."""
        with saved_tensors_hooks(lambda tensor: self.hold(tensor, chunk, micro_batch), _held):
            yield

    def hold(self, tensor: Tensor, chunk: int, micro_batch: int) -> Tensor | Held:
        """`tensor`, counted until the result is dropped."""
        if _storage(tensor) in self._excluded:
            return tensor
        return Held(self, tensor.detach(), (chunk, micro_batch))

    def _add(self, held: Held) -> None:
        key = _storage(held.tensor)
        self._users[key] += 1
        if self._users[key] == 1:
            self._bytes += held.tensor.untyped_storage().nbytes()
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        self._live[held.whose] += 1
        if self._live[held.whose] == 1 and len(self._live) > self.peak_passes.total():
            self.peak_passes = Counter(chunk for chunk, _ in self._live)

    def _drop(self, held: Held) -> None:
        key = _storage(held.tensor)
        self._users[key] -= 1
        if not self._users[key]:
            self._bytes -= held.tensor.untyped_storage().nbytes()
        self._live[held.whose] -= 1
        if not self._live[held.whose]:
            del self._live[held.whose]


class Held:
    """A saved tensor; counted until it is garbage."""

    __slots__ = ("owner", "tensor", "whose")

    def __init__(self, owner: Activations, tensor: Tensor, whose: tuple[int, int]) -> None:
        self.owner, self.tensor, self.whose = owner, tensor, whose
        owner._add(self)

    def __del__(self) -> None:
        self.owner._drop(self)


def _held(kept: Any) -> Tensor:
    found: Tensor = kept.tensor if isinstance(kept, Held) else kept
    return found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
