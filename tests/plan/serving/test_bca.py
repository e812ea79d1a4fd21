"""The batch and memory advisor against curves that can be written down."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foretell.errors import InfeasibleError, InputError
from foretell.plan.serving.bca import advise, knee, together_s
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
    # 10 ms on the device, 10 ms at the host. Mean value analysis by hand: cycles of 20, 25, 32 and 40.625 ms for one to
    # four replicas, which serve 60 %, 17 % and 5.03 % more than one fewer; a fifth would add less than 2 %.
    server = fake(base=0.02, weights_bytes=1e6, kv_capacity_tokens=512 * 150)
    found = advise(server, ServingPlan(max_num_seqs=64), LOAD, loss=0.5, host_s=lambda batch: np.full(len(batch), 0.01))
    assert [together_s(0.01, 0.01, n) for n in (1, 2, 3, 4)] == pytest.approx([0.02, 0.025, 0.032, 0.040625])
    assert 4 * 0.032 / 3 / 0.040625 >= 1.05
    assert found.replicas == 4
    assert found.replicated_rate == pytest.approx(4 * found.rate * 0.02 / 0.040625)
    assert found.replicated_tpot_s == pytest.approx(0.040625)
    short = advise(server, ServingPlan(max_num_seqs=64), LOAD, loss=0.5, tpot_s=0.03,
                   host_s=lambda batch: np.full(len(batch), 0.01))  # fmt: skip
    assert short.replicas == 2  # a third would take tokens over the limit
    # The other replicas have no room where weights are as large as the cache.
    tight = advise(fake(base=0.02, weights_bytes=1e9, kv_capacity_tokens=512 * 150), ServingPlan(max_num_seqs=64), LOAD,
                   loss=0.5, host_s=lambda batch: np.full(len(batch), 0.01))  # fmt: skip
    assert tight.fitting == tight.replicas == 1


def test_replicas_on_one_gpu_as_they_were_measured() -> None:
    """OPT-1.3B on an H100, 96 sequences each: mean ms between tokens of one, two and four replicas, from the results
    that the authors of BCA publish (definitive_results/replication/overall_metrics). One unknown, two figures.
    """
    one, two, four = 14.156, 19.054, 31.744
    device = 7.9
    assert together_s(one - device, device, 2) == pytest.approx(two, rel=0.03)
    assert together_s(one - device, device, 4) == pytest.approx(four, rel=0.01)


def test_what_cannot_be_advised(fake: Any) -> None:
    with pytest.raises(InputError, match=r"a loss of 1 is no share"):
        advise(fake(), PLAN, LOAD, loss=1.0)
    with pytest.raises(InfeasibleError, match=r"one sequence alone gets a token every 10 ms, over the limit of 5 ms"):
        advise(fake(), PLAN, LOAD, tpot_s=0.005)
    with pytest.raises(InfeasibleError, match=r"does not hold one request"):
        advise(fake(kv_capacity_tokens=100), PLAN, LOAD)
