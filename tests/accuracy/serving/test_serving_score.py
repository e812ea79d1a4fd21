"""Loads in closed form, errors and bars, against what can be worked out by hand."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest

from foretell.accuracy.serving.row import LOADS, Row, devices
from foretell.accuracy.serving.score import BARS, errors, grouped, judge, verdicts
from foretell.accuracy.serving.steady import Steady, predict, steady
from foretell.errors import InfeasibleError, UnknownNameError
from foretell.simulate.serving import Batch, Requests, ServingPlan
from foretell.simulate.serving.simulator import serve
from foretell.workload import llm

Floats = npt.NDArray[np.float64]
MS = 1e-3


@dataclasses.dataclass(frozen=True)
class Fixed:
    """An iteration takes 10 ms, 0.1 ms a sequence and 0.02 ms a token of a prompt; a device takes 100 W, 300 beside."""

    kv_capacity_tokens: int = 10**9
    kv_bytes_per_token: float = 1.0

    def time_s(self, batch: Batch) -> Floats:
        return np.asarray((10 + 0.1 * batch.decode_seqs + 0.02 * batch.prefill_tokens) * MS)

    def power_w(self, batch: Batch) -> Floats:
        return np.where(batch.prefill_tokens > 0, 300.0, 100.0)


def row(load: str = "concurrency", amount: float = 1.0, *, plan: ServingPlan | None = None, **figures: float) -> Row:
    plan = plan or ServingPlan()
    lengths = {"isl": 1000.0, "osl": 101.0} | {k: figures.pop(k) for k in ("isl", "osl") if k in figures}
    machine, config = devices(plan.devices, "h100-sxm"), llm.config("llama-3.1-8b")
    label = f"{load} {amount} {figures}"
    return Row("test", label, config, plan, machine, load, amount, lengths["isl"], lengths["osl"], "a", **figures)


def test_one_request_at_a_time() -> None:
    """No other prompt: an iteration of one sequence. Its own prompt of 1,000 tokens takes 20 ms more."""
    one = steady(row(), Fixed())
    assert one.tpot_s == pytest.approx(10.1 * MS)
    assert one.prompt_s == pytest.approx(20 * MS, rel=0.01)
    assert 0.03 < one.ttft_s < 0.035


def test_others_bring_their_prompts() -> None:
    """Eleven sequences: ten prompts of 20 ms over a hundred iterations of 11.1 ms, so 13.1 ms a token."""
    one = steady(row("batch", 11.0, itl_s=1.0), Fixed())
    assert one.decode_s == pytest.approx(11.1 * MS)
    assert one.itl_s == one.decode_s  # the median gap has no prompt in it
    assert one.tpot_s == pytest.approx(13.1 * MS, rel=1e-3)
    assert one.tokens_per_s == pytest.approx(11 / 0.0131, rel=1e-3)


def test_prompts_are_cut_into_chunks() -> None:
    """Each chunk's iteration would have run anyway, so that chunks cost no more than the whole, however many."""
    plan = ServingPlan(max_num_batched_tokens=256)
    assert steady(row("batch", 8.0, plan=plan, itl_s=1.0), Fixed()).prompt_s == pytest.approx(20 * MS, rel=1e-3)
    # One sequence alone waits for four iterations of its own prompt.
    assert steady(row("batch", 1.0, plan=plan), Fixed()).ttft_s == pytest.approx((4 * 10 + 20) * MS)


def test_a_closed_loop_is_what_the_simulator_makes_of_it() -> None:
    """Lengths drawn apart, as the closed form takes requests to come and go evenly."""
    rng = np.random.default_rng(0)
    for amount, osl in ((4, 200), (16, 400)):
        requests = Requests.of(np.zeros(40 * amount), 1000, rng.integers(osl // 2, 3 * osl // 2, 40 * amount))
        served = serve(Fixed(), ServingPlan(), requests, concurrency=amount)
        tokens = served.output_tokens - 1
        measured = float((served.finished_s - served.first_token_s).sum() / tokens.sum())
        one = steady(row(amount=float(amount), isl=1500.0, osl=1.5 * osl, shortest=1 / 3), Fixed())
        assert one.tpot_s == pytest.approx(measured, rel=0.03)
        rate = float(served.output_tokens.sum() / served.finished_s.max())
        assert one.tokens_per_s == pytest.approx(rate, rel=0.06)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("amount", [4, 16, 32])
def test_requests_of_one_length_come_together(engine: str, amount: int) -> None:
    """Two prompts of 1,000 fit into an iteration; SGLang processes all of them before it decodes on."""
    plan = ServingPlan(engine=engine, max_num_batched_tokens=2048, prefix_cache=False)
    requests = Requests.of(np.zeros(20 * amount), 1000, np.full(20 * amount, 101))
    served = serve(Fixed(), plan, requests, concurrency=amount)
    measured = float((served.finished_s - served.first_token_s).mean() / 100)
    assert steady(row(amount=float(amount), plan=plan), Fixed()).tpot_s == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("amount", [2, 4, 8, 16])
def test_first_tokens_of_a_closed_loop_wait_as_in_the_simulator(amount: int) -> None:
    """Ten times as many requests as are under way, the first of which come at once."""
    rng = np.random.default_rng(1)
    lengths = (rng.integers(int(0.8 * n), n + 1, 10 * amount) for n in (1000, 400))
    plan = ServingPlan(max_num_batched_tokens=8192, prefix_cache=False)
    served = serve(Fixed(), plan, Requests.of(np.zeros(10 * amount), *lengths), concurrency=amount)
    measured = float((served.first_token_s - served.arrival_s).mean())
    one = steady(row(amount=float(amount), osl=400.0, shortest=0.8, plan=plan), Fixed())
    assert one.ttft_s == pytest.approx(measured, rel=0.25)


def test_cached_prompts_cost_their_last_block() -> None:
    one = steady(row("batch", 11.0, itl_s=1.0, cached_isl=900.0), Fixed())
    assert one.prompt_s == pytest.approx(2 * MS, rel=1e-3)


def test_the_cache_limits_what_runs() -> None:
    one = steady(row(amount=64.0), Fixed(kv_capacity_tokens=10_505))  # ten times 1,000 and half of 101 tokens
    assert one.running == pytest.approx(10.0)
    assert one.ttft_s > 5.0  # the others wait for several of the ten that run before them, 1.3 s each


def test_all_at_once_runs_in_waves() -> None:
    """Room for ten: 25 requests are two waves of ten and one of five, and 25 prompts of 20 ms."""
    one = steady(row("requests", 25.0), Fixed(kv_capacity_tokens=11_010))
    seconds = (2 * 101 * 11.0 + 101 * 10.5 + 25 * 20) * MS
    assert one.tokens_per_s == pytest.approx(25 * 101 / seconds, rel=1e-6)
    both = steady(row("requests", 50.0, plan=ServingPlan(dp=2)), Fixed(kv_capacity_tokens=11_010))
    assert both.tokens_per_s == pytest.approx(2 * one.tokens_per_s)


def test_power_is_of_all_devices() -> None:
    one = steady(row("batch", 11.0, plan=ServingPlan(tp=2), power_w=500.0, itl_s=1.0), Fixed())
    share = 11 * 20 / (11 * 20 + 100 * 11.1)  # of the time there is a prompt
    assert one.power_w == pytest.approx(2 * (100 * (1 - share) + 300 * share), rel=1e-3)


def test_models_are_made_once() -> None:
    made = []

    def iterations_of(one: Row) -> Fixed:
        made.append(one.plan)
        if one.plan.tp == 4:
            raise InfeasibleError("does not fit")
        return Fixed()

    plans = [ServingPlan(max_num_seqs=n, tp=tp) for tp, n in itertools.product((1, 4), (8, 16))]
    found = predict([row(plan=plan, tpot_s=0.02) for plan in plans], iterations_of)
    assert len(made) == 2
    assert [isinstance(one, Steady) for one in found] == [True, True, False, False]


def test_errors_are_of_what_a_row_states() -> None:
    found = [row(tpot_s=10 * MS), row(ttft_s=1.0), row(tpot_s=1.0)]
    predicted = [steady(one, Fixed()) for one in found[:2]] + [InfeasibleError("no")]
    error = errors(found, predicted, "tpot_s")
    assert error[0] == pytest.approx(0.01)
    assert np.isnan(error[1])
    assert np.isinf(error[2])
    with pytest.raises(UnknownNameError, match=r"tpot.*tpot_s"):
        errors(found, predicted, "tpot")
    assert grouped(found, "tp") == {"1": [0, 1, 2]}
    assert grouped(found, "gpu") == {"h100-sxm": [0, 1, 2]}
    with pytest.raises(UnknownNameError, match="field"):
        grouped(found, "colour")


def test_bars_can_be_missed() -> None:
    for bar in BARS:
        rows = [dataclasses.replace(row(), source=bar.source, label=str(i), **{bar.figure: 1.0}) for i in range(4)]
        exact = dataclasses.replace(steady(rows[0], Fixed()), **{bar.figure: 1.0})
        off = dataclasses.replace(exact, **{bar.figure: 1.0 + 1.01 * bar.limit})
        good, bad = judge(rows, [exact] * 4, bar), judge(rows, [off] * 4, bar)
        assert good is not None
        assert bad is not None
        assert good.met
        assert not bad.met
        # What is not answered counts as wholly wrong.
        none = judge(rows, [InfeasibleError("no")] * 4, bar)
        assert none is not None
        assert none.value == 1.0
        assert judge([dataclasses.replace(rows[0], source="other")], [exact], bar) is None
    answered = verdicts(rows, [exact, exact, exact, InfeasibleError("no")])[-1]
    assert (answered.name, answered.value, answered.met) == ("share not answered", 0.25, False)


def test_loads_are_checked() -> None:
    assert LOADS == ("concurrency", "batch", "requests")
    with pytest.raises(ValueError, match="load is 'rate'"):
        row("rate")
    with pytest.raises(ValueError, match="2 devices planned, 1 there"):
        Row("s", "l", llm.config("llama-3.1-8b"), ServingPlan(tp=2), devices(1, "h100-sxm"), "batch", 1, 1, 1, "f")


def benchmark() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "serving_accuracy.py"
    spec = importlib.util.spec_from_file_location("serving_accuracy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_says_when_a_bar_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel"
    (tmp_path / "splitwise").mkdir()
    (tmp_path / "splitwise" / "perf_model.csv").write_text(f"{head}\nllama2-70b,a100-80gb,512,1,128,9000,900,8\n")
    arguments = ["serving_accuracy.py", "splitwise", "--data", str(tmp_path), "--by", "tp", "--rows", "--left-out"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert benchmark().main() == 1
    printed = capsys.readouterr().out
    assert "splitwise: token time, mean" in printed
    assert "MISSED" in printed
    assert "  tp 8" in printed
    assert max(len(text) for text in printed.splitlines() if "h100" not in text and "a100" not in text) <= 90
