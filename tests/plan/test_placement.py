"""Ranks on links: the latency model against an event simulation, the annealer against every permutation."""

import itertools

import numpy as np
import pytest

from foretell.errors import InputError
from foretell.hardware import cluster
from foretell.plan.training.placement import Latency, Work, _anneal, place
from foretell.plan.training.units import place_plan, work_of
from foretell.simulate.training import TrainingPlan
from foretell.simulate.training.step import step
from foretell.workload import llm
from foretell.workload.llm.weights import count_parameters


def pipeline(f: np.ndarray, b: np.ndarray, hops: np.ndarray, micro_batches: int) -> list[float]:
    """When each stage ends its last backward pass in 1F1B, messages taking `hops` on their way."""
    stages = len(f)
    orders = []
    for s in range(stages):
        warm = min(micro_batches, stages - 1 - s)
        order = [("f", k) for k in range(warm)]
        for k in range(micro_batches - warm):
            order += [("f", warm + k), ("b", k)]
        orders.append(order + [("b", k) for k in range(micro_batches - warm, micro_batches)])
    done: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * stages, [0] * stages
    while any(at[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            while at[s] < len(orders[s]):
                kind, k = orders[s][at[s]]
                ready = 0.0
                if kind == "f" and s > 0:
                    if ("f", s - 1, k) not in done:
                        break
                    ready = done["f", s - 1, k] + hops[s - 1]
                if kind == "b" and s < stages - 1:
                    if ("b", s + 1, k) not in done:
                        break
                    ready = done["b", s + 1, k] + hops[s]
                free[s] = done[kind, s, k] = max(free[s], ready) + (f[s] if kind == "f" else b[s])
                at[s] += 1
    return free


def uneven(rng: np.random.Generator, nodes: int) -> np.ndarray:
    """Attained bandwidths between machines: some pairs far below what they should reach."""
    shape = (nodes, nodes)
    half = np.where(rng.random(shape) < 0.3, rng.uniform(1, 4, shape), rng.uniform(8, 12, shape))
    links = np.triu(half, 1) + np.triu(half, 1).T
    np.fill_diagonal(links, 100.0)
    return links


def job(stages: int, micro_batches: int = 8) -> Work:
    return Work((1.0,) * stages, (2.0,) * stages, micro_batches, 4.0, (20.0,) * stages)


@pytest.mark.parametrize(("m", "most", "mean"), [(1, 1e-9, 1e-9), (2, 0.26, 0.07), (8, 0.08, 0.03), (32, 0.025, 0.01)])
def test_the_pipeline_is_exact_without_hops_and_close_with_them(m: int, most: float, mean: float) -> None:
    rng = np.random.default_rng(m)
    errors = []
    for _ in range(100):
        stages = int(rng.integers(2, 7))
        work = job(stages, m)
        latency = Latency(work, np.full((stages, stages), 10.0), block=1, per_node=1, data=1)
        f, b = np.array(work.forward_s), np.array(work.backward_s)
        bare = latency.pipeline(np.zeros((1, stages - 1)))[0]
        assert bare == pytest.approx(pipeline(f, b, np.zeros(stages), m)[0])
        hops = rng.uniform(0, 1.5, stages - 1) * (rng.random(stages - 1) < 0.7)
        errors.append(latency.pipeline(hops[None])[0] / pipeline(f, b, hops, m)[0] - 1)
    assert np.abs(errors).max() < most
    assert np.abs(errors).mean() < mean


def test_a_slow_link_costs_every_micro_batch_though_messages_overlap_with_work() -> None:
    """The hidden critical path: hiding a message behind other work still delays the next round."""
    long, short = 512, 256
    stages, hop = 4, np.array([0.0, 0.6, 0.0])
    latency = {m: Latency(job(stages, m), np.ones((4, 4)), block=1, per_node=1, data=1) for m in (long, short)}
    f, b = np.ones(stages), 2 * np.ones(stages)
    for model in (
        lambda m, h: latency[m].pipeline(h[None])[0],
        lambda m, h: pipeline(f, b, h, m)[0],
    ):
        slope = [(model(long, h) - model(short, h)) / (long - short) for h in (0 * hop, hop)]
        # Two neighbouring stages take 2 · (1 + 2) + 2 · 0.6 seconds for two micro-batches.
        assert slope == pytest.approx([3.0, 3.6])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("stages", "data"), [(2, 3), (3, 2), (6, 1), (1, 6)])
def test_finds_what_trying_every_permutation_finds(seed: int, stages: int, data: int) -> None:
    links = uneven(np.random.default_rng(seed), 6)
    latency = Latency(job(stages), links, block=1, per_node=1, data=data)
    best = min(latency(np.array(order).reshape(stages, data)) for order in itertools.permutations(range(6)))
    found = place(job(stages), links, block=1, per_node=1, data=data, steps=4000, seed=seed)
    assert found.time_s == pytest.approx(best)
    assert latency(found.order) == found.time_s <= found.default_s


def test_finds_the_best_of_40320_orders_of_eight_machines() -> None:
    links = uneven(np.random.default_rng(100), 8)
    latency = Latency(job(4), links, block=8, per_node=8, data=2)
    best = min(latency(np.array(order).reshape(4, 2)) for order in itertools.permutations(range(8)))
    found = place(job(4), links, block=8, per_node=8, data=2)
    assert found.time_s == pytest.approx(best)


def test_the_same_seed_gives_the_same_placement_and_never_one_worse_than_the_default() -> None:
    links = uneven(np.random.default_rng(1), 16)
    tried = [place(job(4), links, block=4, per_node=8, data=8, steps=300, seed=seed) for seed in (3, 3, 4)]
    assert (tried[0].order == tried[1].order).all()
    assert (tried[0].order != tried[2].order).any()
    for found in tried:
        assert found.time_s <= found.default_s
        assert found.speedup >= 1
    none = place(job(4), links, block=4, per_node=8, data=8, steps=0)
    assert none.time_s <= none.default_s


def test_annealing_leaves_a_local_optimum() -> None:
    """One order of 5,040 is better than the first, and all others are a little worse: only uphill moves lead there."""
    target = [3, 6, 0, 5, 2, 4, 1]

    def latency(order: np.ndarray) -> float:
        flat = order.reshape(-1).tolist()
        return 0.5 if flat == target else 1.0 if flat == list(range(7)) else 1.02

    found, found_s, _ = _anneal(latency, np.arange(7).reshape(7, 1), 100_000, np.random.default_rng(0))  # type: ignore[arg-type]
    assert found_s == 0.5
    assert found.reshape(-1).tolist() == target


def test_equal_links_leave_nothing_to_gain_but_keeping_neighbours_inside_machines() -> None:
    equal = np.full((6, 6), 10.0)
    assert place(job(3), equal, block=1, per_node=1, data=2, steps=500).speedup == pytest.approx(1.0)


def test_blocks_stay_whole_and_inside_a_machine_and_every_device_runs_one_rank() -> None:
    links = uneven(np.random.default_rng(2), 4)
    found = place(job(4), links, block=2, per_node=8, data=4, steps=500)
    ranks = found.ranks()
    assert sorted(ranks.tolist()) == list(range(32))
    groups = ranks.reshape(-1, 2)
    assert (groups[:, 1] == groups[:, 0] + 1).all()
    assert (groups // 8 == (groups // 8)[:, :1]).all()


def test_bandwidths_of_devices_say_what_those_of_machines_say() -> None:
    nodes = uneven(np.random.default_rng(3), 4)
    devices = np.kron(nodes, np.ones((4, 4)))
    order = np.random.default_rng(4).permutation(8).reshape(2, 4)
    by_node = Latency(job(2), nodes, block=2, per_node=4, data=4)
    by_device = Latency(job(2), devices, block=2, per_node=4, data=4)
    assert by_node(order) == pytest.approx(by_device(order))
    # One slow pair of devices slows the two blocks that it joins.
    devices[0, 8] = devices[8, 0] = 0.01
    slower = Latency(job(2), devices, block=2, per_node=4, data=4)
    assert slower.seconds_per_byte[0, 4] == pytest.approx(100.0)
    assert slower.seconds_per_byte[1, 5] == by_device.seconds_per_byte[1, 5]


def test_gradients_are_reduced_while_earlier_stages_still_work() -> None:
    """By hand: two stages, one replica each side; the last stage has b of the first stage to hide its reduction in."""
    links = np.full((4, 4), 10.0)
    work = Work((1.0, 1.0), (2.0, 2.0), 4, 0.0, (0.0, 20.0))
    latency = Latency(work, links, block=1, per_node=1, data=2)
    pipe = (4 + 2 - 1) * 3.0
    assert latency.rings(latency.default()).tolist() == [0.0, 2.0]  # 2 · 1/2 · 20 bytes at 10 bytes/s
    assert latency(latency.default()) == pytest.approx(pipe)  # 2 s after the last backward pass, 2 s before the end
    more = Latency(Work((1.0, 1.0), (2.0, 2.0), 4, 0.0, (0.0, 50.0)), links, block=1, per_node=1, data=2)
    assert more(more.default()) == pytest.approx(pipe + 3.0)


def test_faster_links_never_hurt() -> None:
    rng = np.random.default_rng(9)
    links = uneven(rng, 8)
    for _ in range(20):
        order = rng.permutation(8).reshape(4, 2)
        slow = Latency(job(4), links, block=1, per_node=1, data=2)(order)
        assert Latency(job(4), 2 * links, block=1, per_node=1, data=2)(order) < slow


@pytest.mark.parametrize(
    ("links", "change", "words"),
    [
        (np.ones((3, 4)), {}, "square"),
        (np.ones((3, 3)), {}, "give 4 machines or 32 devices"),
        (np.zeros((4, 4)), {}, "positive"),
        (np.ones((4, 4)), {"block": 3}, "let the block divide"),
        (np.ones((4, 4)), {"restarts": 0}, "restarts"),
    ],
)
def test_wrong_questions_are_refused(links: np.ndarray, change: dict, words: str) -> None:
    asked = {"block": 4, "per_node": 8, "data": 4, **change}
    with pytest.raises(InputError, match=words):
        place(job(2), links, **asked)


def test_wrong_work_is_refused() -> None:
    with pytest.raises(InputError, match="for each stage"):
        Work((1.0,), (1.0, 2.0), 1, 0.0, (0.0,))
    with pytest.raises(InputError, match="not negative"):
        Work((-1.0,), (1.0,), 1, 0.0, (0.0,))
    with pytest.raises(InputError, match="micro-batches"):
        Work((1.0,), (1.0,), 0, 0.0, (0.0,))
    alone = place(Work((1.0,), (2.0,), 4, 0.0, (0.0,)), np.ones((1, 1)), block=8, per_node=8, data=1)
    assert alone.ranks().tolist() == list(range(8))
    assert alone.time_s == alone.default_s == 12.0


def test_a_plans_work_is_that_of_its_step() -> None:
    config, on = llm.config("opt-13b"), cluster("8x dgx-a100")
    plan = TrainingPlan(64, 2048, tp=8, pp=4, dp=2, recompute="full", overlap_grad_reduce=False)
    work = work_of(config, plan, on)
    assert work.message_bytes == 2 * 2048 * config.hidden / 8
    assert sum(work.gradient_bytes) == pytest.approx(4 * count_parameters(config) / 8, rel=0.01)
    fast = np.full((8, 8), 1e15)
    placed = place_plan(config, plan, on, fast, steps=0)
    found = step(config, plan, on)
    # Without messages and gradients; the step also has the host's part between steps.
    bare = float((found.time_s - found.dp_s - found.pp_s - found.optimizer_s)[0])
    assert placed.default_s == pytest.approx(bare, rel=0.03)
    with pytest.raises(InputError, match="virtual stages"):
        work_of(config, plan.replace(vp=2, schedule="interleaved"), on)


def test_a_plan_is_placed_around_a_slow_pair_of_machines() -> None:
    config, on = llm.config("opt-13b"), cluster("8x dgx-a100")
    plan = TrainingPlan(64, 2048, tp=8, pp=8)
    links = np.full((8, 8), 20e9)
    links[3, 4] = links[4, 3] = 0.2e9
    found = place_plan(config, plan, on, links, steps=4000)
    neighbours = set(zip(found.order[:-1, 0].tolist(), found.order[1:, 0].tolist(), strict=True))
    assert not neighbours & {(3, 4), (4, 3)}
    assert found.speedup > 1.01
