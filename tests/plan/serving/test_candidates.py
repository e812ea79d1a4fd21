"""Which plans are simulated, and in which order."""

from __future__ import annotations

from typing import Any

from foretell.plan.serving.candidates import cost, ranked, runners_up
from foretell.plan.serving.options import Option
from foretell.simulate.serving import ServingPlan


def option(rate: float, share: float = 1.0, usd: float | None = None, **plan: Any) -> Option:
    made = ServingPlan(**plan)
    units = max(1, made.prefill_replicas + made.decode_replicas)
    price = float(made.tp * units) if usd is None else usd
    figures = (8, 0.02, 0.1, 1e3, 1e4, 500.0, "tpot", "", {})
    return Option("l4", made, "l4", made.tp * units, price, None, share, rate, *figures)  # type: ignore[arg-type]


def test_shapes_come_with_the_most_promising_first() -> None:
    split = option(44.0, prefill_replicas=1, decode_replicas=1, replicas=2)  # $1 for 22 requests/s
    wide, small = option(64.0, tp=4), option(12.0, tp=1)  # for 16, and 12
    small_too = option(11.5, tp=1, max_num_seqs=64)
    middle = option(30.0, tp=2)  # 15
    some = option(40.0, share=0.4, tp=8)
    full, part = ranked([small_too, middle, small, wide, split, some], "cost", 11.0)
    # The cheapest for any load that is not split; in whole units; then the rest by what a request costs.
    assert [group[0] for group in full] == [wide, small, split, middle]
    assert full[1] == (small, small_too)
    assert part == [(some,)]
    # For a large load whole units do not matter.
    assert [group[0] for group in ranked([small, middle, wide, split], "cost", 1e4)[0]] == [wide, split, middle, small]


def test_runners_up() -> None:
    group = [option(rate, max_num_batched_tokens=tokens, max_num_seqs=seqs) for rate, tokens, seqs in (
        (10.0, 2048, 256), (10.0, 2048, 1024), (9.0, 8192, 256), (8.0, 8192, 1024), (7.0, 512, 64),
    )]  # fmt: skip
    assert runners_up(group, near=True) == group[1:3]
    # Where the best fails: the best of each other token budget.
    assert runners_up(group, near=False) == [group[2], group[4]]
    assert runners_up(group[:1], near=True) == runners_up(group[:1], near=False) == []
    many = [option(10.0, max_num_seqs=64 + n) for n in range(20)]
    assert runners_up(many, near=True) == many[1:6]


def test_what_is_unknown_is_dearest() -> None:
    assert cost(option(1.0, usd=2.0), "cost") == 2.0
    assert cost(option(1.0, usd=2.0), "energy") == float("inf")
