"""The batch and memory advisor against curves that can be written down."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foretell.errors import InfeasibleError, InputError
from foretell.plan.serving.bca import advise, knee
from foretell.plan.serving.load import Load
from foretell.simulate.serving import ServingPlan

PLAN = ServingPlan(max_num_seqs=512)
LOAD = Load.of(100, 100)  # 150 cached tokens a sequence on average


def test_the_knee_is_the_smallest_good_batch() -> None:
    b, rate, tpot = [1, 2, 4, 8, 16], [10.0, 18.0, 24.0, 25.0, 24.9], [1.0, 1.1, 1.6, 3.2, 6.4]
    assert knee(b, rate, tpot, 0.0, np.inf) == 3
    assert knee(b, rate, tpot, 0.05, np.inf) == 2
    assert knee(b, rate, tpot, 0.0, 2.0) == 2  # the best that the limit allows
    assert knee(b, rate, tpot, 0.5, 2.0) == 1
    assert knee(b, rate, tpot, 0.0, 0.5) == -1
    assert knee(b, [0.0] * 5, tpot, 0.0, np.inf) == -1


@pytest.mark.parametrize("loss", [0.01, 0.05, 0.2])
def test_a_saturating_server(fake: Any, loss: float) -> None:
    # base + each · b: throughput b / (base + each b) is a share x / (1 + x) of its limit at x = each b / base.
    found = advise(fake(base=0.01, each=1e-3, kv_capacity_tokens=512 * 150), PLAN, LOAD, loss=loss)
    x = np.arange(1, 513) * 1e-3 / 0.01
    share = x / (1 + x) / (51.2 / 52.2)
    least = int(np.argmax(share >= 1 - loss)) + 1
    assert least <= found.batch <= 1.06 * least + 1
    assert found.rate >= (1 - loss) * found.best_rate
    assert found.largest_batch == 512
    assert found.kv_bytes == pytest.approx(found.batch * 150 * 1000)
    assert found.saved == pytest.approx(1 - found.batch / 512)
    assert found.replicas == 1  # nothing waits for a host, so a second one adds nothing
    assert found.gain == pytest.approx(found.rate / found.largest_rate - 1)


def test_replicas_fill_what_the_host_leaves_idle(fake: Any) -> None:
    # Half of an iteration waits for the host: two replicas take turns, a third finds no idle device.
    server = fake(base=0.02, weights_bytes=1e6, kv_capacity_tokens=512 * 150)
    found = advise(server, ServingPlan(max_num_seqs=64), LOAD, loss=0.5, host_s=lambda batch: np.full(len(batch), 0.01))
    assert found.replicas == 2
    assert found.replicated_rate == pytest.approx(2 * found.rate)
    assert found.replicated_tpot_s == pytest.approx(0.02)
    # The other replicas have no room where weights are as large as the cache.
    tight = advise(fake(base=0.02, weights_bytes=1e9, kv_capacity_tokens=512 * 150), ServingPlan(max_num_seqs=64), LOAD,
                   loss=0.5, host_s=lambda batch: np.full(len(batch), 0.01))  # fmt: skip
    assert tight.fitting == tight.replicas == 1


def test_what_cannot_be_advised(fake: Any) -> None:
    with pytest.raises(InputError, match=r"a loss of 1 is no share"):
        advise(fake(), PLAN, LOAD, loss=1.0)
    with pytest.raises(InfeasibleError, match=r"one sequence alone gets a token every 10 ms, over the limit of 5 ms"):
        advise(fake(), PLAN, LOAD, tpot_s=0.005)
    with pytest.raises(InfeasibleError, match=r"does not hold one request"):
        advise(fake(kv_capacity_tokens=100), PLAN, LOAD)
