"""`Wire`: messages between ranks, each counted, and collectives made of them.

Collectives are rings, so what a rank sends is known to the byte: of a buffer of N bytes on n ranks, (n-1)/n·N for an
all-gather and for a reduce-scatter, twice that for an all-reduce (Patarasuk and Yuan, 2009). That gloo has no
reduce-scatter in some versions does not matter: messages are all that is used of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, distributed

from foretell.errors import InputError

__all__ = ["Group", "Wire"]

_RING = 1 << 24  # tags from here on belong to collectives; those below to the caller


class Wire:
    """This rank's connection to the others; `sent` counts bytes by purpose, `messages` their number."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sent: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self._pending: list[tuple[distributed.Work, Tensor]] = []
        self._counting = True

    def send(self, tensor: Tensor, to: int, purpose: str, tag: int) -> None:
        """Send without waiting (`flush` does); until then `tensor` must not change. The receiver asks for `tag`."""
        self._pending.append(self._start(tensor, to, purpose, tag))

    def _start(self, tensor: Tensor, to: int, purpose: str, tag: int) -> tuple[distributed.Work, Tensor]:
        """A message on its way, and the tensor that must live until then. Gloo takes one wait for it, no more."""
        tensor = tensor.detach().contiguous()
        work = distributed.isend(tensor, to, tag=tag)
        assert work is not None
        if self._counting:
            self.sent[purpose] += tensor.numel() * tensor.element_size()
            self.messages[purpose] += 1
        return work, tensor

    def receive(self, like: Tensor, source: int, tag: int) -> Tensor:
        """A tensor of the shape and type of `like`, waited for."""
        found = torch.empty_like(like, memory_format=torch.contiguous_format)
        distributed.recv(found, source, tag=tag)
        return found

    def exchange(self, tensor: Tensor, to: int, like: Tensor, source: int, purpose: str, tag: int) -> Tensor:
        """Send and receive at once; `tensor` may change afterwards."""
        work, _ = self._start(tensor, to, purpose, tag)
        found = self.receive(like, source, tag)
        work.wait()
        return found

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        for work, _ in self._pending:
            work.wait()
        self._pending = []

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is sent in here serves a report, not the training."""
        self._counting = False
        try:
            yield
        finally:
            self._counting = True


class Group:
    """Some ranks in ring order, this one among them, and collectives between them; `purpose` names their bytes."""

    def __init__(self, wire: Wire, ranks: Sequence[int], purpose: str) -> None:
        self.wire, self.ranks, self.purpose = wire, list(ranks), purpose
        self.size = len(self.ranks)
        self.index = self.ranks.index(wire.rank)

    def reduce_scatter(self, tensor: Tensor, combine: Callable[..., Tensor] = torch.add) -> Tensor:
        """The sum over all ranks of this rank's part of `tensor`, which is cut evenly along its first axis."""
        return self._scatter(list(tensor.tensor_split(self.size)), combine)

    def all_gather(self, part: Tensor) -> Tensor:
        """The equal parts of all ranks, joined along the first axis."""
        parts: list[Tensor] = [part] * self.size
        self._spread(parts)
        return torch.cat(parts)

    def all_reduce(self, tensor: Tensor, combine: Callable[..., Tensor] = torch.add) -> Tensor:
        """The sum (or another combination) over all ranks: a reduce-scatter and an all-gather."""
        parts = list(tensor.reshape(-1).tensor_split(self.size))
        parts[self.index] = self._scatter(parts, combine)
        self._spread(parts)
        return torch.cat(parts).view(tensor.shape)

    def all_reduce_by_halving(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks by recursive halving and doubling (Thakur et al., 2005): as many bytes as a ring.

        Of messages it takes 2·log2 n, not 2·(n-1). Raises InputError unless n is a power of two.
        """
        if self.size & (self.size - 1):
            raise InputError(f"{self.size} ranks are no power of two", "halving and doubling", "use all_reduce")
        flat = tensor.reshape(-1).clone()
        start, end = 0, flat.numel()
        halves: list[tuple[int, slice, slice]] = []  # the partner, what it has in the end, what this rank has
        distance = self.size // 2
        while distance:
            middle = (start + end) // 2
            theirs, mine = slice(start, middle), slice(middle, end)
            if not self.index & distance:
                theirs, mine = mine, theirs
            halves.append((self.ranks[self.index ^ distance], theirs, mine))
            flat[mine] += self._swap(flat[theirs], flat[mine], halves[-1][0])
            start, end = mine.start, mine.stop
            distance //= 2
        for partner, theirs, mine in reversed(halves):
            flat[theirs] = self._swap(flat[mine], flat[theirs], partner)
        return flat.view(tensor.shape)

    def _swap(self, tensor: Tensor, like: Tensor, partner: int) -> Tensor:
        return self.wire.exchange(tensor, partner, like, partner, self.purpose, _RING)

    def _scatter(self, parts: list[Tensor], combine: Callable[..., Tensor]) -> Tensor:
        mine = parts[(self.index - 1) % self.size]
        for step in range(self.size - 1):
            own = parts[(self.index - step - 2) % self.size]
            mine = combine(own, self._pass_on(mine, own))
        return mine

    def _spread(self, parts: list[Tensor]) -> None:
        for step in range(self.size - 1):
            sent, got = (self.index - step) % self.size, (self.index - step - 1) % self.size
            parts[got] = self._pass_on(parts[sent], parts[got])

    def _pass_on(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Send to the next rank of the ring while the previous one's message comes in."""
        after, before = (self.ranks[(self.index + way) % self.size] for way in (1, -1))
        return self.wire.exchange(tensor, after, like, before, self.purpose, _RING)
