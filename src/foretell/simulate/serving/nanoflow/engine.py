"""`NanoFlow`: iterations of an engine whose layers run as a pipeline of nano-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from foretell.errors import InputError
from foretell.simulate.serving.batch import Batch
from foretell.simulate.serving.nanoflow.operations import Operation
from foretell.simulate.serving.nanoflow.schedule import Nano, Schedule, durations, links, nanos, replay, run
from foretell.simulate.serving.nanoflow.search import UNROLLED, Found, search
from foretell.simulate.serving.nanoflow.sharing import A100, KINDS, Sharing
from foretell.workload.llm import LLMConfig
from foretell.workload.llm.weights import layer_weights

Floats = npt.NDArray[np.float64]

__all__ = ["Base", "NanoFlow", "layer_of"]

#: What a layer's parts are, of those the iteration model names; the others are outside the layers.
_LAYER_PARTS = ("products", "experts", "elementwise", "attention", "communication")


class Base(Protocol):
    """What is asked of the iterations that are overlapped: `foretell.simulate.serving.iteration.Iterations`."""

    @property
    def config(self) -> LLMConfig:
        """The model."""
        ...

    @property
    def kv_capacity_tokens(self) -> int:
        """Cached tokens that one rank holds."""
        ...

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes a cached token takes on one device."""
        ...

    def parts(self, batch: Batch, /) -> Mapping[str, Floats]:
        """Seconds by part."""
        ...

    def time_s(self, batch: Batch, /) -> Floats:
        """Seconds of each iteration."""
        ...

    def power_w(self, batch: Batch, /) -> Floats:
        """Mean watts of one device."""
        ...

    def bound(self, batch: Batch, /) -> Sequence[str]:
        """What limits each iteration."""
        ...


@dataclass(frozen=True, slots=True)
class _Layer:
    """Operations of a layer of each of many batches: `work` and `fixed` seconds, `stop` of decoding rows, (rows,)."""

    work: tuple[Floats, ...]
    fixed: tuple[Floats, ...]
    decoding: Floats


@cache
def _attention_share(config: LLMConfig) -> tuple[float, float]:
    """What part of the products with dense weights are those before attention and the one after it."""
    before = after = whole = 0.0
    for group in config.groups:
        for weight in layer_weights(config, group):
            if weight.kind != "matrix":
                continue
            size = float(group.layers * weight.elements)
            whole += size
            if "o_proj" in weight.name:
                after += size
            elif "attn" in weight.name:
                before += size
    if not whole:
        raise InputError("its layers have no matrices", config.name)
    return before / whole, after / whole


def _measure(base: Base, batch: Batch) -> _Layer:
    """Operations of a layer from what iterations take on the whole batch and on half of it.

    What halving does not halve is paid by each nano-batch anew. Prefill and decode attention are told apart by asking
    without prompts. Small kernels go with the products beside them.
    """
    config, rows = base.config, len(batch)
    still = replace(
        batch, prefill_seqs=0.0 * batch.prefill_seqs, prefill_tokens=0.0 * batch.prefill_tokens,
        prefill_pairs=0.0 * batch.prefill_pairs, prefill_cached=0.0 * batch.prefill_cached,
    )  # fmt: skip
    asked = [batch, still, *(_scaled(b, 0.5) for b in (batch, still))]
    joined = Batch(*(np.concatenate([getattr(b, f) for b in asked]) for f in Batch.__dataclass_fields__))
    found = base.parts(joined)
    zero = np.zeros(4 * rows)

    def part(name: str) -> Floats:
        return np.reshape(np.asarray(found.get(name, zero)), (4, rows)) / config.layers

    products, attention = part("products") + part("elementwise"), part("attention")
    first, second = _attention_share(config)
    whole: list[Floats] = []
    for i, j in ((0, 1), (2, 3)):
        decode = np.minimum(attention[j], attention[i])
        whole += [np.stack([
            first * products[i], decode, attention[i] - decode, second * products[i], part("communication")[i] / 2.0,
            (1.0 - first - second) * products[i] + part("experts")[i], part("communication")[i] / 2.0,
        ])]  # fmt: skip
    full, half = whole
    fixed = np.clip(2.0 * half - full, 0.0, full)
    return _Layer(tuple(full - fixed), tuple(fixed), batch.decode_seqs / np.maximum(batch.tokens, 1.0))


#: Operations of a layer: name, kind, what they follow.
_CHAIN: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("qkv", "compute", ()),
    ("decode attention", "memory", ("qkv",)),
    ("prefill attention", "compute", ("qkv",)),
    ("o", "compute", ("decode attention", "prefill attention")),
    ("sum after o", "network", ("o",)),
    ("mlp", "compute", ("sum after o",)),
    ("sum after mlp", "network", ("mlp",)),
)


def _scaled(batch: Batch, by: float) -> Batch:
    return Batch(*(getattr(batch, name) * by for name in Batch.__dataclass_fields__))


def layer_of(base: Base, batch: Batch) -> tuple[Operation, ...]:
    """A layer of one batch as operations by what bounds them; the decoding rows come first."""
    if len(batch) != 1:
        raise InputError(f"{len(batch)} batches", "nanoflow", "give the one to search for")
    layer = _measure(base, batch)
    border = min(max(float(layer.decoding[0]), 1e-6), 1.0 - 1e-6)
    ends = {"decode attention": (0.0, border), "prefill attention": (border, 1.0)}
    return tuple(
        Operation(name, kind, float(work[0]), float(fixed[0]), after, *ends.get(name, (0.0, 1.0)))
        for (name, kind, after), work, fixed in zip(_CHAIN, layer.work, layer.fixed, strict=True)
    )


@dataclass(frozen=True)
class NanoFlow:
    """Iterations whose layers overlap as a found pipeline says; of the same use as those they are made of.

    The pipeline is searched for one batch, as the authors do for their fixed dense batch; other batches run in the
    same order with their own times, or in sequence where that is faster. The host's work is hidden behind the device's
    (the authors form batches one iteration ahead). Anything not overlapped is asked of `base`.
    """

    base: Base
    found: Found
    sharing: Sharing
    asynchronous: bool
    _parts: tuple[Nano, ...]
    _few: tuple[Schedule, tuple[tuple[int, ...], ...]]
    _many: tuple[Schedule, tuple[tuple[int, ...], ...]]

    @staticmethod
    def of(
        base: Base, batch: Batch, *, sharing: Sharing = A100, most: int = 4, asynchronous: bool = True
    ) -> NanoFlow:
        """Search a pipeline of up to `most` nano-batches for `batch`, one iteration such as the engine will run."""
        operations = layer_of(base, batch)
        found = search(operations, sharing=sharing, most=most)
        parts = nanos(operations, found.pipeline)
        seconds = durations(operations, parts, sharing)
        made = []
        for layers in (UNROLLED, 2 * UNROLLED):
            schedule = run(parts, seconds, layers)
            made.append((schedule, links(parts, schedule)))
        return NanoFlow(base, found, sharing, asynchronous, parts, made[0], made[1])

    @property
    def kv_capacity_tokens(self) -> int:
        """Cached tokens that one rank holds: nano-batches share the same cache."""
        return self.base.kv_capacity_tokens

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes a cached token takes on one device."""
        return self.base.kv_bytes_per_token

    def bound(self, batch: Batch) -> Sequence[str]:
        """What the operations wait for, overlapped or not."""
        return self.base.bound(batch)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.base, name)

    def parts(self, batch: Batch) -> dict[str, Floats]:
        """Seconds by part, (iterations,) each; ``layers`` are all overlapped operations together."""
        found = self.base.parts(batch)
        layers = sum((np.asarray(found[name]) for name in _LAYER_PARTS if name in found), np.zeros(len(batch)))
        rest = {name: np.asarray(value) for name, value in found.items() if name not in _LAYER_PARTS}
        made = {"layers": np.minimum(layers, self._layers_s(batch)), **rest}
        if self.asynchronous and "host" in made:
            device_s = sum((value for name, value in made.items() if name != "host"), np.zeros(len(batch)))
            made["host"] = np.maximum(made["host"] - device_s, 0.0)
        return made

    def time_s(self, batch: Batch) -> Floats:
        """Seconds of each iteration, (iterations,)."""
        return np.asarray(sum(self.parts(batch).values(), np.zeros(len(batch))))

    def power_w(self, batch: Batch) -> Floats:
        """Mean watts of one device: the same energy in less time, up to the device's limit where it is known."""
        drawn = self.base.power_w(batch) * self.base.time_s(batch) / np.maximum(self.time_s(batch), 1e-12)
        limit = getattr(getattr(self.base, "device", None), "tdp_w", None)
        return np.asarray(drawn if limit is None else np.minimum(drawn, float(limit)))

    def _layers_s(self, batch: Batch) -> Floats:
        layer = _measure(self.base, batch)
        seconds = []
        for nano in self._parts:
            low, high = self._rows(nano, layer.decoding)
            whole = self._whole(nano, layer.decoding)
            share = np.where(whole > 0.0, np.clip(high - low, 0.0, None) / np.where(whole > 0.0, whole, 1.0), 0.0)
            speed = self.sharing.of(KINDS[nano.kind], nano.tenths)
            fixed, work = layer.fixed[nano.operation], layer.work[nano.operation]
            seconds.append(np.where(share > 0.0, fixed + work * share, 0.0) / speed)
        few, many = (replay(schedule, held, seconds) for schedule, held in (self._few, self._many))
        period = np.maximum((many - few) / UNROLLED, self._bound(layer))
        return np.asarray(few + (self.base.config.layers - UNROLLED) * period)

    @staticmethod
    def _rows(nano: Nano, decoding: Floats) -> tuple[Floats, Floats]:
        name = _CHAIN[nano.operation][0]
        low, high = np.full_like(decoding, nano.low), np.full_like(decoding, nano.high)
        if name == "decode attention":
            high = np.minimum(high, decoding)
        elif name == "prefill attention":
            low = np.maximum(low, decoding)
        return low, high

    @staticmethod
    def _whole(nano: Nano, decoding: Floats) -> Floats:
        name = _CHAIN[nano.operation][0]
        if name == "decode attention":
            return decoding
        return 1.0 - decoding if name == "prefill attention" else np.ones_like(decoding)

    def _bound(self, layer: _Layer) -> Floats:
        """The least a layer takes by any schedule, as `lower_bound_s`."""
        each = [(kind, fixed + work) for (_, kind, _), fixed, work in zip(_CHAIN, layer.fixed, layer.work, strict=True)]
        busiest = [_sum(t for other, t in each if other == kind) for kind in KINDS]
        area = _sum(t * self.sharing.cheapest(kind) for kind, t in each)
        return np.asarray(np.maximum.reduce([*busiest, area]), dtype=np.float64)


def _sum(values: Any) -> Floats:
    listed: Sequence[Floats] = list(values)
    return np.asarray(sum(listed[1:], listed[0]))
