"""A server whose iterations take time by a formula, so that steady states can be written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from foretell.simulate.serving import Batch, Requests


@dataclass(frozen=True)
class Fake:
    """An iteration takes `base` seconds, `each` for a decoding sequence, `token` for a prompt's token."""

    base: float = 0.01
    each: float = 0.0
    token: float = 0.0
    kv_capacity_tokens: float = 1e6
    kv_bytes_per_token: float = 1000.0
    weights_bytes: float = 1e9
    watts: float = 100.0
    plan: Any = None

    def time_s(self, batch: Batch) -> Any:
        return self.base + self.each * batch.decode_seqs + self.token * batch.prefill_tokens

    def power_w(self, batch: Batch) -> Any:
        return np.full(len(batch), self.watts)


@pytest.fixture
def fake() -> type[Fake]:
    return Fake


@pytest.fixture
def makes() -> Callable[..., Any]:
    """A maker of fakes: each GPU type by its name has the figures given, and tensor parallelism divides its times."""

    def maker(**by_gpu: Fake) -> Callable[..., Any]:
        def make(config: Any, plan: Any, machine: Any) -> Fake:
            one = by_gpu[machine.nodes[0].device.name.replace("-", "_")]
            faster = plan.tp**0.5
            return replace(one, base=one.base / faster, each=one.each / faster, token=one.token / faster, plan=plan)

        return make

    return maker


@pytest.fixture
def poisson() -> Callable[..., Requests]:
    """Requests of a few sizes at random times."""

    def make(count: int = 2000, rate: float = 10.0, sizes: Any = ((100, 50), (1000, 100)), seed: int = 0) -> Requests:
        rng = np.random.default_rng(seed)
        which = rng.integers(0, len(sizes), count)
        inputs, outputs = np.array(sizes).T
        return Requests.of(np.cumsum(rng.exponential(1 / rate, count)), inputs[which], outputs[which])

    return make
