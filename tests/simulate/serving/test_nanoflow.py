"""Nano-batches: schedules that keep to the device, a search held to trying everything, and iterations made shorter."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.errors import InputError, UnknownNameError
from foretell.simulate.serving import Batch, Requests, ServingPlan
from foretell.simulate.serving.nanoflow import (
    A100,
    PAPER,
    NanoFlow,
    Operation,
    Pipeline,
    Sharing,
    exhaustive,
    layer_of,
    layer_s,
    lower_bound_s,
    search,
    sequential_s,
)
from foretell.simulate.serving.nanoflow.schedule import durations, links, nanos, replay, run
from foretell.simulate.serving.simulator import serve
from foretell.workload import llm

#: Kernels of two kinds that do not get in each other's way at all, but for the least share there is.
FREE = Sharing(
    MappingProxyType({"compute": (0.0, *(0.1 * i for i in range(1, 10)), 1.0), "memory": (0.0, *(1.0,) * 10),
                      "network": (0.0, *(1.0,) * 10)}),
    "made up",
)  # fmt: skip


def chain(*work: tuple[str, str, float], fixed: float = 0.0) -> tuple[Operation, ...]:
    made: list[Operation] = []
    for name, kind, seconds in work:
        made.append(Operation(name, kind, seconds, fixed, (made[-1].name,) if made else ()))
    return tuple(made)


TWO = chain(("products", "compute", 6.0), ("attention", "memory", 3.0))
THREE = chain(("products", "compute", 6.0), ("attention", "memory", 3.0), ("sum", "network", 2.0))


def test_sequence_is_the_sum_and_so_is_its_schedule() -> None:
    assert sequential_s(THREE) == 11.0
    assert layer_s(THREE, Pipeline.sequential(3)) == pytest.approx(11.0)


def test_halves_of_a_batch_hide_all_but_the_fullest_resource() -> None:
    # Attention takes a tenth of the device for its 3 s: at best the products lose 0.3 s. Cuts are at sixteenths.
    found = search(TWO, sharing=FREE)
    assert found.interference_bound_s == pytest.approx(6.3)
    assert 6.3 <= found.layer_s < 6.35
    assert found.pipeline.nano_batches >= 2


def test_bounds_by_hand() -> None:
    assert lower_bound_s(THREE) == 6.0
    # 0.1 of the device gives attention 0.25 and the network 0.4 of its speed.
    assert lower_bound_s(THREE, A100) == pytest.approx(6.0 + 3.0 * 0.1 / 0.25 + 2.0 * 0.1 / 0.4)


operations = st.lists(
    st.tuples(st.sampled_from(["compute", "memory", "network"]), st.floats(0.1, 5.0), st.floats(0.0, 0.5)),
    min_size=2,
    max_size=5,
).map(
    lambda rows: tuple(
        Operation(f"op{i}", kind, work, fixed, (f"op{i - 1}",) if i else ())
        for i, (kind, work, fixed) in enumerate(rows)
    )
)


@settings(max_examples=25, deadline=None)
@given(operations)
def test_never_slower_than_in_sequence_never_faster_than_the_bound(layer: tuple[Operation, ...]) -> None:
    found = search(layer, most=2)
    assert found.interference_bound_s <= found.layer_s * (1 + 1e-9)
    assert found.lower_bound_s <= found.interference_bound_s
    assert found.layer_s <= found.sequential_s * (1 + 1e-9)


@pytest.mark.parametrize(
    "layer",
    [
        TWO,
        chain(("products", "compute", 4.0), ("attention", "memory", 6.0), fixed=0.2),
        chain(("products", "compute", 5.0), ("sum", "network", 1.0), fixed=0.1),
        chain(("qkv", "compute", 1.0), ("attention", "memory", 3.0), ("mlp", "compute", 5.0), fixed=0.05),
    ],
)
def test_search_is_as_good_as_trying_everything(layer: tuple[Operation, ...]) -> None:
    tenths = (1, 2, 3, 5, 7, 8, 9, 10) if len(layer) == 2 else (1, 2, 8, 9, 10)
    best = exhaustive(layer, most=2, grid=4, tenths=tenths)
    assert best.layer_s < best.sequential_s  # there is something to find
    assert search(layer, most=2).layer_s <= best.layer_s * 1.001


def test_too_costly_splits_are_left_alone() -> None:
    found = search(chain(("products", "compute", 1.0), ("attention", "memory", 1.0), fixed=5.0))
    assert found.pipeline.nano_batches == 1
    assert found.layer_s == found.sequential_s == 12.0


@settings(max_examples=30, deadline=None)
@given(operations, st.data())
def test_schedules_keep_to_the_device(layer: tuple[Operation, ...], data: st.DataObject) -> None:
    """Whatever the pipeline: dependencies hold, kinds take turns, shares never exceed the device."""
    count = data.draw(st.integers(1, 3))
    cuts = tuple((i + 1) / count for i in range(count - 1))
    splits = tuple(tuple(c for c in range(count - 1) if data.draw(st.booleans())) for _ in layer)
    shares = tuple(tuple(data.draw(st.integers(1, 10)) for _ in range(len(s) + 1)) for s in splits)
    parts = nanos(layer, Pipeline(cuts, splits, shares, data.draw(st.sampled_from([0.0, 1.0, 8.0]))))
    seconds = durations(layer, parts, A100)
    schedule = run(parts, seconds, 3)
    assert sorted(schedule.started) == list(range(3 * len(parts)))
    for j in range(3 * len(parts)):
        nano, base = parts[j % len(parts)], j // len(parts) * len(parts)
        sources = [base + s for s in nano.after] + ([base - len(parts) + s for s in nano.before] if base else [])
        assert all(schedule.end_s[s] <= schedule.start_s[j] + 1e-9 for s in sources)
        at = schedule.start_s[j] + 1e-9
        running = [k for k in range(3 * len(parts)) if schedule.start_s[k] <= at < schedule.end_s[k] - 1e-9]
        assert sum(parts[k % len(parts)].tenths for k in running) <= 10
        kinds = [parts[k % len(parts)].kind for k in running]
        assert len(kinds) == len(set(kinds))
    # With its own times, the fixed order takes as long as the schedule it is from.
    again = replay(schedule, links(parts, schedule), [np.array([s, 2.0 * s]) for s in seconds])
    assert again == pytest.approx([schedule.span_s, 2.0 * schedule.span_s])
    assert replay(schedule, links(parts, schedule), [np.array([s]) for s in seconds]) == pytest.approx(again[:1])


def test_dependencies_follow_rows() -> None:
    layer = (
        Operation("qkv", "compute", 1.0),
        Operation("decode", "memory", 1.0, 0.0, ("qkv",), 0.0, 0.5),
        Operation("o", "compute", 1.0, 0.0, ("decode",)),
    )
    parts = nanos(layer, Pipeline((0.25, 0.5), ((0, 1), (1,), ()), ((5, 5, 5), (4, 4), (9,))))
    assert [(n.operation, n.after) for n in parts] == [
        (0, ()), (0, ()), (0, ()), (1, (0, 1)), (1, (2,)), (2, (3, 4)),
    ]  # fmt: skip
    assert all(n.before == (5,) for n in parts[:3])  # the next layer's first operations follow this one's last
    assert durations(layer, parts, A100)[3:5] == [1.0 / 0.6, 0.0]  # no decoding row beyond the middle


@pytest.mark.parametrize("table", [A100, PAPER])
def test_tables_give_more_than_their_share(table: Sharing) -> None:
    for kind in ("memory", "network"):
        assert all(table.of(kind, r) >= r / 10 for r in range(1, 11))


def test_bad_input_says_what() -> None:
    with pytest.raises(UnknownNameError, match="compute"):
        search((Operation("a", "computes", 1.0),))
    with pytest.raises(InputError, match="not before it"):
        search((Operation("a", "compute", 1.0, after=("b",)),))
    with pytest.raises(InputError, match="this name"):
        search((Operation("a", "compute", 1.0), Operation("a", "memory", 1.0)))
    with pytest.raises(InputError, match="without operations"):
        search(())
    with pytest.raises(InputError, match="0 or more"):
        search((Operation("a", "compute", float("nan")),))
    with pytest.raises(InputError, match="rising shares"):
        search((Operation("a", "compute", 1.0, start=0.5, stop=0.5),))
    with pytest.raises(InputError, match="1 to grid"):
        search(TWO, most=0)
    with pytest.raises(InputError, match="11"):
        Sharing(MappingProxyType({"compute": (0.0, 1.0)}), "made up")
    with pytest.raises(InputError, match="does not rise"):
        Sharing(MappingProxyType({**A100.performance, "memory": (0.0, *(0.9,) * 9, 0.5)}), "made up")


@dataclass(frozen=True)
class Fake:
    """Iterations in proportion to tokens, with a fixed part of a fifth of 1,000 tokens."""

    config: llm.LLMConfig
    kv_capacity_tokens: int = 200_000
    kv_bytes_per_token: float = 1.0

    def parts(self, batch: Batch) -> dict[str, np.ndarray]:
        rows = batch.tokens / 1000.0
        return {
            "products": np.where(rows > 0, 0.1 * rows + 0.002, 0.0),
            "attention": 0.04 * batch.decode_tokens / 1e6 + 0.02 * batch.prefill_pairs / 1e6,
            "communication": 0.03 * rows,
            "logits": np.full(len(batch), 0.001),
            "host": np.full(len(batch), 0.005),
        }

    def time_s(self, batch: Batch) -> np.ndarray:
        return np.asarray(sum(self.parts(batch).values()))

    def power_w(self, batch: Batch) -> np.ndarray:
        return np.full(len(batch), 300.0)

    def bound(self, batch: Batch) -> list[str]:
        return ["compute"] * len(batch)


BASE = Fake(llm.config("llama-2-70b"))
DENSE = Batch.of(decode_seqs=1000, decode_tokens=1_000_000, prefill_seqs=2, prefill_tokens=1000)


@pytest.fixture(scope="module")
def engine() -> NanoFlow:
    return NanoFlow.of(BASE, DENSE)


def test_a_layer_is_what_iterations_say() -> None:
    layer = {operation.name: operation for operation in layer_of(BASE, DENSE)}
    total = sum(op.work_s + op.fixed_s for op in layer.values()) * BASE.config.layers
    parts = BASE.parts(DENSE)
    assert total == pytest.approx(float(parts["products"][0] + parts["attention"][0] + parts["communication"][0]))
    assert layer["decode attention"].work_s * BASE.config.layers == pytest.approx(0.04)
    assert layer["prefill attention"].work_s * BASE.config.layers == pytest.approx(0.02 * 0.2505)
    assert layer["decode attention"].stop == layer["prefill attention"].start == 0.5
    products = [op for name, op in layer.items() if name in ("qkv", "o", "mlp")]
    assert sum(op.fixed_s for op in products) * BASE.config.layers == pytest.approx(0.002)
    # Llama 2 70B: 8192 · (8192 + 2 · 1024), 8192² and 3 · 8192 · 28672 weights of a layer.
    assert layer["qkv"].work_s / layer["o"].work_s == pytest.approx(10240 / 8192)
    assert layer["mlp"].work_s / layer["o"].work_s == pytest.approx(3 * 28672 / 8192)


def test_shorter_where_there_is_something_to_overlap(engine: NanoFlow) -> None:
    parts = engine.parts(DENSE)
    assert engine.time_s(DENSE)[0] == pytest.approx(sum(float(v[0]) for v in parts.values()))
    base = BASE.parts(DENSE)
    layers = float(base["products"][0] + base["attention"][0] + base["communication"][0])
    assert engine.found.speedup > 1.05
    # All layers, with the filling of the first, but for a layer or two as the search has it.
    assert float(parts["layers"][0]) == pytest.approx(layers / engine.found.speedup, rel=0.03)
    assert parts["host"][0] == 0.0  # hidden behind the device
    assert parts["logits"][0] == 0.001


def test_other_batches_never_take_longer_than_without(engine: NanoFlow) -> None:
    rng = np.random.default_rng(0)
    batch = Batch.of(
        decode_seqs=rng.integers(0, 1500, 300), decode_tokens=rng.integers(0, 10**6, 300),
        prefill_seqs=1, prefill_tokens=rng.integers(1, 3000, 300),
    )  # fmt: skip
    new, old = engine.time_s(batch), BASE.time_s(batch)
    assert (new <= old).all()
    assert (new < 0.97 * old).any()
    one = np.array([float(engine.time_s(batch.take([i]))[0]) for i in range(20)])
    assert one == pytest.approx(new[:20])


def test_energy_stays_and_the_rest_is_the_engines_own(engine: NanoFlow) -> None:
    joules = engine.power_w(DENSE) * engine.time_s(DENSE)
    assert joules == pytest.approx(300.0 * BASE.time_s(DENSE))
    assert (engine.kv_capacity_tokens, engine.kv_bytes_per_token) == (200_000, 1.0)
    assert engine.bound(DENSE) == ["compute"]
    with pytest.raises(AttributeError):
        _ = engine.no_such_thing


def test_an_engine_that_is_simulated_with_them_serves_more(engine: NanoFlow) -> None:
    requests = Requests.of(np.zeros(60), 512, 64)
    plan = ServingPlan(max_num_batched_tokens=2048)
    new, old = (serve(costs, plan, requests, offline=True) for costs in (engine, BASE))
    assert (new.output_tokens == 64).all()
    assert new.end_s < 0.99 * old.end_s


def test_host_shows_where_it_is_not_formed_ahead() -> None:
    assert NanoFlow.of(BASE, DENSE, most=1, asynchronous=False).parts(DENSE)["host"][0] == 0.005


def test_one_batch_to_search_for() -> None:
    with pytest.raises(InputError, match="2 batches"):
        layer_of(BASE, Batch.of(decode_seqs=[1, 2]))
