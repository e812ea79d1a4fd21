"""What requests ask for, by size."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from foretell.errors import InputError
from foretell.plan.serving.load import Load, buckets, mixture
from foretell.simulate.serving import Requests


def test_buckets_hold_every_request_once(poisson: Callable[..., Requests]) -> None:
    requests = poisson(500, sizes=((10, 10), (100, 50), (100, 400), (9000, 1)))
    load, group = buckets(requests)
    assert len(load) == 4
    assert load.rate.sum() == pytest.approx(10.0, rel=0.15)
    for bucket in range(4):
        mine = group == bucket
        assert len(set(requests.input_tokens[mine])) == 1
        assert load.input_tokens[bucket] == requests.input_tokens[mine][0]
        assert load.rate[bucket] / load.rate.sum() == pytest.approx(mine.mean())


def test_the_mixture_weighs_by_how_long_a_request_decodes() -> None:
    # In a batch, requests of 30 tokens are met three times as often as those of 10.
    requests = Requests.of([0.0, 1.0], [100, 200], [10, 30])
    load = mixture(requests, rate=4.0)
    assert load.rate.tolist() == [4.0]
    assert load.context[0] == pytest.approx((10 * 105 + 30 * 215) / 40)
    assert load.pairs[0] == pytest.approx((100 * 101 / 2 + 200 * 201 / 2) / 2)
    assert load.largest.tolist() == [230.0]
    assert load.tokens_per_s == pytest.approx(80.0)


def test_equal_requests_are_a_group_of_one_size() -> None:
    requests = Requests.of(np.arange(5.0), 100, 20)
    mine, same = mixture(requests, rate=2.0), Load.of(100, 20, 2.0)
    for name in Load.__slots__:
        assert getattr(mine, name) == pytest.approx(getattr(same, name)), name


def test_requests_all_at_once_have_no_rate() -> None:
    with pytest.raises(InputError, match="all requests arrive at once"):
        mixture(Requests.of([0.0, 0.0], 10, 10))
    with pytest.raises(InputError, match="one request has no rate"):
        mixture(Requests.of([0.0], 10, 10))


def test_buckets_mixed_again_are_the_mixture(poisson: Callable[..., Requests]) -> None:
    requests = poisson(800, sizes=((10, 10), (100, 50), (100, 400), (9000, 1), (90, 60)))
    load, _ = buckets(requests, rate=3.0)
    mine, same = load.mixed(), mixture(requests, rate=3.0)
    for name in Load.__slots__:
        assert getattr(mine, name) == pytest.approx(getattr(same, name)), name
    assert load.mixed([1]).input_tokens == pytest.approx(load.input_tokens[1])


@pytest.mark.parametrize("seed", [0, 1])
def test_buckets_ask_for_what_their_requests_ask_for(seed: int) -> None:
    """No mean is that of a bucket's edge or middle: over all buckets tokens, pairs and contexts are the requests'."""
    rng = np.random.default_rng(seed)
    inputs, outputs = (np.ceil(rng.lognormal(mean, 1.2, 3000)).astype(np.int64) for mean in (6.5, 4.5))
    requests = Requests.of(np.cumsum(rng.exponential(0.2, 3000)), inputs, outputs)
    load, _ = buckets(requests, rate=7.0)
    assert len(load) > 20
    one = load.mixed()
    assert one.rate[0] == pytest.approx(7.0)
    assert one.input_tokens[0] == pytest.approx(inputs.mean())
    assert one.output_tokens[0] == pytest.approx(outputs.mean())
    assert one.pairs[0] == pytest.approx((inputs * (inputs + 1) / 2).mean())
    assert one.context[0] == pytest.approx((outputs * (inputs + outputs / 2)).sum() / outputs.sum())
    assert one.largest[0] == (inputs + outputs).max()
