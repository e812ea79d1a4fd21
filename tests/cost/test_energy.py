"""Power: closed forms of voltage and clock, limits that hold, and energy that is power times time."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from foretell.cli.app import app
from foretell.cost import Memory, Settings, estimate, models
from foretell.cost.calibration import load
from foretell.cost.energy import (
    Activity,
    Power,
    activity_of,
    check_limits,
    dram_energy,
    energy_of,
    power_of,
    sustained_clock,
    throttle,
)
from foretell.cost.program import Program
from foretell.errors import InputError
from foretell.graph import Graph, Storage, Tensor, make_op
from foretell.hardware import device

# Voltage 1 up to half the clock, twice as much at boost: in units of boost, 1/2 and 1.
CARD = Power(
    idle_w=50.0,
    leakage_w=30.0,
    core_w=300.0,
    vector_w=200.0,
    format_w=(),
    issue=0.0,
    dram_j_per_byte=1e-10,
    l2_j_per_byte=0.0,
    limit_w=400.0,
    knee=0.5,
    slope=2.0,
    memory_knee=0.4,
)


def work(compute: float, memory: float, core_j: float, memory_j: float) -> Activity:
    return Activity(*(np.array([x]) for x in (compute, memory, 0.0, core_j, memory_j)))


def product(m: int, n: int, k: int) -> Graph:
    tensors = [Tensor(shape, "bfloat16", i) for i, shape in enumerate(((m, k), (k, n), (m, n)))]
    ops = tuple(make_op("aten.mm.default", tensors, (0, 1), (2,)) for _ in range(20))
    storages = tuple(Storage(t.nbytes, "temporary") for t in tensors)
    return Graph("product", "inference", "bf16", ops, tuple(tensors), storages, 0, 0, {"products": 20})


def predicted(graph: Graph, name: str = "a100-sxm4-80gb", **limits: float):
    return estimate(graph, device(name), model="roofline", memory=Memory(0, 0, 0, {}, -1, None), **limits)


LARGE = product(8192, 8192, 8192)


def test_voltage_is_flat_and_then_linear():
    assert CARD.voltage(np.array([0.1, 0.5, 0.75, 1.0])) == pytest.approx([0.5, 0.5, 0.75, 1.0])
    assert CARD.clock_of(0.8) == pytest.approx(0.8)
    assert CARD.clock_of(0.1) == 0.5  # no voltage is lower, so the clock is what the lowest one allows
    assert CARD.clock_of(1.2) == 1.0


def test_the_settled_clock_solves_the_power_balance():
    # 50 + 30 v + 450 v² + 20 = 400 ⇒ v = (−30 + √(900 + 4·450·330)) / 900
    v = (-30 + (900 + 4 * 450 * 330) ** 0.5) / 900
    assert CARD.voltage(CARD.settled(450.0, 20.0, 400.0)) == pytest.approx(v)


def test_below_the_knee_power_falls_with_the_clock_alone():
    # Compute-bound, 300 J of core energy in 1 s at boost. At x = 1/4: v = 1/2, 4 s.
    activity = work(1.0, 0.0, 300.0, 0.0)
    settled = throttle(CARD, activity, clock=0.25)
    seconds = activity.time_s(settled.scale, settled.memory_slowdown)
    assert seconds == pytest.approx([4.0])
    assert energy_of(CARD, activity, settled, seconds) == pytest.approx([4 * (50 + 30 / 2) + 300 / 4])


def test_dram_keeps_its_pace_down_to_its_own_knee():
    activity = work(0.1, 1.0, 50.0, 60.0)
    for clock, expected in ((1.0, 1.0), (0.4, 1.0), (0.2, 2.0)):
        settled = throttle(CARD, activity, clock=clock)
        assert activity.time_s(settled.scale, settled.memory_slowdown) == pytest.approx([expected])


@given(st.floats(0.01, 2), st.floats(0.0, 2), st.floats(1, 900), st.floats(0, 200), st.floats(90, 400))
@settings(deadline=None)
def test_a_card_settles_where_power_is_the_limit(compute, memory, core, dram, limit):
    activity = work(compute, memory, core, dram)
    settled = throttle(CARD, activity, limit)
    seconds = activity.time_s(settled.scale, settled.memory_slowdown)
    power = float(energy_of(CARD, activity, settled, seconds).sum() / seconds.sum())
    if settled.notes:
        assert power >= limit * (1 - 1e-6)
    else:
        assert power <= limit * (1 + 1e-6)
    if settled.scale < 1.0 and not settled.notes:
        assert power == pytest.approx(limit, rel=1e-3)


def test_energy_is_power_times_time_and_lower_limits_take_longer():
    times, powers = [], []
    for limit in (400.0, 350.0, 300.0, 250.0, 200.0, 150.0):
        e = predicted(LARGE, power_limit_w=limit)
        assert e.energy_j == pytest.approx(e.power_w * e.time_s)
        assert e.energy_j == pytest.approx(e.ops.energy_j.sum())
        assert e.power_w <= limit * 1.0001
        times.append(e.time_s)
        powers.append(e.power_w)
    assert times == sorted(times)
    assert powers == sorted(powers, reverse=True)
    assert times[-1] > 1.5 * times[0]


def test_lower_clocks_take_longer_and_less_power_up_to_what_dram_bounds():
    clocks = (1410e6, 1200e6, 1000e6, 800e6)
    results = [predicted(LARGE, clock_hz=clock) for clock in clocks]
    assert [e.time_s for e in results] == sorted(e.time_s for e in results)
    assert [e.power_w for e in results] == sorted((e.power_w for e in results), reverse=True)
    stock, slow = predicted(product(16, 8192, 8192)), predicted(product(16, 8192, 8192), clock_hz=800e6)
    assert slow.time_s == pytest.approx(stock.time_s, rel=0.02)  # weights stream from DRAM
    assert slow.energy_j < stock.energy_j


@pytest.mark.parametrize("name", ["b200-sxm", "h200-sxm", "h100-sxm", "a40", "l4", "t4"])
def test_a_large_product_draws_the_limit(name):
    # A large GEMM holds each of these cards at its limit: AIConfigurator reads 0.98 of it on B200.
    card = device(name)
    assert predicted(LARGE, name).power_w == pytest.approx(card.tdp_w, rel=0.1)


def test_energies_stay_near_published_ones():
    # HBM3 with its path through the chip: 3.9 pJ/bit in the stack alone (O'Connor et al., MICRO 2017), twice that in
    # all. Tensor cores: H100's 700 W over its 0.99 PFLOP/s is 0.7 pJ/FLOP.
    constant = load("energy")
    assert 3.1e-11 < dram_energy("HBM3e", constant) < 1e-10
    assert dram_energy("HBM3e", constant) == dram_energy("HBM3", constant) < dram_energy("GDDR6X", constant)
    assert dram_energy(None, constant) == dram_energy("core rope", constant) == constant["dram.default"]
    h100 = device("h100-sxm")
    power = power_of(h100)
    voltage = float(power.voltage(sustained_clock(h100, constant)))
    assert power.core_w * voltage**2 / h100.peaks["bf16.tensor"] == pytest.approx(0.75e-12, rel=0.3)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"power_limit_w": 500.0}, "at most 400 W"),
        ({"power_limit_w": 40.0}, "more than 56 W"),
        ({"clock_hz": 2e9}, "1410 MHz (boost)"),
        ({"clock_hz": 1e6}, "141 MHz to"),
    ],
)
def test_impossible_limits_are_refused_with_the_range(limits, said):
    with pytest.raises(InputError, match="outside what the card allows") as error:
        predicted(LARGE, **limits)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--power-limit", "900W", "at most 400 W (TDP)"),
        ("--power-limit", "250", "no unit"),
        ("--clock", "3GHz", "1410 MHz (boost)"),
        ("--clock", "1W", "wrong unit"),
    ],
)
def test_the_command_refuses_them_before_it_captures(option, value, said):
    # The workload does not exist: reaching it would give another error.
    arguments = ["predict", "timm:no_such_network", "--on", "a100-sxm4-80gb", option, value]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_the_command_sets_the_limit():
    arguments = ["predict", "llm:llama-2-7b", "--precision", "bf16", "--on", "a100-sxm4-80gb", "--json"]
    limited = json.loads(CliRunner().invoke(app, [*arguments, "--power-limit", "250W"]).output)
    assert limited["power_w"] == pytest.approx(250.0, rel=0.01)
    assert limited["energy_j"] == pytest.approx(limited["power_w"] * limited["time_s"])


def test_limits_need_the_number_that_bounds_them():
    card = replace(device("a100-sxm4-80gb"), tdp_w=None, boost_clock_hz=None)
    assert power_of(card) is None
    check_limits(card, None, None)
    with pytest.raises(InputError, match="TDP is unknown"):
        check_limits(card, 200.0, None)
    with pytest.raises(InputError, match="boost clock is unknown"):
        check_limits(card, None, 1e9)


def test_a_hundred_thousand_ops_are_quick(within):
    program = Program.of(replace(LARGE, ops=LARGE.ops * 5000).table())
    card = device("a100-sxm4-80gb")
    model = models()["roofline"]
    times = model.op_times(program, card, Settings())
    step = model.step(program, times, Settings())
    power = power_of(card)
    within(0.2, lambda: throttle(power, activity_of(power, card, program, times, step), 250.0))
