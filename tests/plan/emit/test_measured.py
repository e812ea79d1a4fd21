"""Calibration from a user's own runs: factors that were put in are found again, and what they rest on is said."""

from __future__ import annotations

import dataclasses
import json
import math

import jsonschema
import numpy as np
import pytest

from foretell.accuracy.slices import data_folder
from foretell.errors import InputError, UnknownNameError
from foretell.hardware import cluster
from foretell.plan.training import emit
from foretell.plan.training.measured import SCHEMA, MeasuredRun, Scale, fit, read_runs, scaled
from foretell.report import schema
from foretell.simulate.training import PlanTable, TrainingPlan
from foretell.simulate.training.memory import memory
from foretell.simulate.training.step import PARTS, StepTable, step
from foretell.workload import llm

LLAMA = llm.config("llama-3-8b")


def table(plan: TrainingPlan) -> StepTable:
    """A step in round numbers: 10 s, of which tensor parallelism exposes a tenth for each rank beyond the first."""
    exposed = 1.0 * (plan.tp - 1)
    seconds = {
        "compute_s": 6.0, "recompute_s": 1.0, "host_s": 0.5, "tp_s": exposed, "optimizer_s": 0.5,
        "bubble_s": 0.5 * (plan.pp - 1), "hidden_s": 0.25,
    }  # fmt: skip
    columns = {field.name: np.array([seconds.get(field.name, 0.0)]) for field in dataclasses.fields(StepTable)}
    columns |= {"flops_per_device": np.array([1e12]), "peak_flops_per_s": np.array([1e12])}
    return StepTable(**columns | {"tokens": np.array([float(plan.tokens)])})


def predict(config, plan, on) -> StepTable:
    return table(plan)


def run(compute: float, communication: float, **degrees: int) -> MeasuredRun:
    """A run of a machine on which compute and communication take so many times the seconds predicted."""
    plan = TrainingPlan(64, 4096, **degrees)
    made = table(plan)
    time = scaled(made, Scale(compute, communication, True, 0.05, ())).time_s[0]
    return MeasuredRun(LLAMA, plan, cluster(f"{plan.devices}x h100-sxm"), float(time))


def test_one_run_gives_one_factor() -> None:
    found = fit([run(1.3, 1.3, tp=2, dp=2)], predict)
    assert found.compute == found.communication == pytest.approx(1.3)
    assert not found.separate
    assert found.memory is None


@pytest.mark.parametrize(("compute", "communication"), [(1.2, 2.0), (0.9, 0.5), (1.5, 1.0)])
def test_runs_that_differ_in_communication_tell_the_factors_apart(compute: float, communication: float) -> None:
    found = fit([run(compute, communication, tp=tp, dp=8 // tp) for tp in (1, 2, 4)], predict)
    assert found.separate
    assert found.compute == pytest.approx(compute, rel=0.02)
    assert found.communication == pytest.approx(communication, rel=0.1)  # drawn a little towards that of compute


def test_runs_that_do_not_differ_give_one_factor() -> None:
    found = fit([run(1.2, 2.0, tp=2, dp=dp) for dp in (1, 2, 4)], predict)
    assert not found.separate
    made = table(TrainingPlan(64, 4096, tp=2)).time_s[0]
    assert made * found.compute == pytest.approx(run(1.2, 2.0, tp=2).step_s)


def test_factors_that_explain_nothing_better_stay_one() -> None:
    odd = [run(1.0, 1.0, tp=tp, dp=8 // tp) for tp in (1, 2, 4)]
    noisy = [dataclasses.replace(item, step_s=item.step_s * by) for item, by in zip(odd, (1.1, 0.9, 1.1), strict=True)]
    found = fit(noisy, predict)
    assert not found.separate
    assert found.spread > 0.1  # what the runs leave of each other


def test_a_scaled_step_is_its_parts_scaled() -> None:
    plan = TrainingPlan(64, 4096, tp=2, pp=2)
    before = table(plan)
    after = scaled(before, Scale(2.0, 3.0, True, 0.05, ()))
    assert after.compute_s[0] == 12.0
    assert after.tp_s[0] == 3.0
    assert after.optimizer_s[0] == 1.0
    assert after.hidden_s[0] == 0.75
    busy = 6.0 + 1.0 + 0.5, 1.0
    assert after.bubble_s[0] == pytest.approx(0.5 * (2.0 * busy[0] + 3.0 * busy[1]) / sum(busy))
    assert after.time_s[0] == pytest.approx(sum(float(getattr(after, name)[0]) for name in PARTS))
    assert after.mfu[0] == pytest.approx(before.mfu[0] * before.time_s[0] / after.time_s[0])
    same = scaled(before, Scale(1.0, 1.0, False, 0.05, ()))
    assert all(getattr(same, f.name)[0] == getattr(before, f.name)[0] for f in dataclasses.fields(StepTable))


def test_a_table_of_many_plans_is_scaled_row_by_row() -> None:
    from foretell.simulate.training.step import steps

    plans = [TrainingPlan(64, 4096, tp=2, dp=4), TrainingPlan(64, 4096, dp=8), TrainingPlan(64, 4096, dp=4, pp=2)]
    on = cluster("1x dgx-h100")
    many = steps(LLAMA, PlanTable.of(plans), on)
    scale = Scale(1.1, 1.7, True, 0.05, ())
    whole = scaled(many, scale).time_s
    assert whole == pytest.approx([scaled(many.take([i]), scale).time_s[0] for i in range(3)])
    assert (whole > 1.1 * many.time_s - 1e-12).all()


def test_the_interval_is_wider_the_farther() -> None:
    near = run(1.2, 1.2, tp=2, dp=4)
    found = fit([near], predict)

    def width(config=LLAMA, on: str = "8x h100-sxm", **changes) -> float:
        low, high = found.interval(config, near.plan.replace(**changes), cluster(on))
        assert low == pytest.approx(1.0 / high)
        return math.log(high)

    here = width()
    assert here == pytest.approx(0.05)
    assert width(dp=32) == pytest.approx(here + 3 * 0.01)
    assert width(config=llm.config("llama-3-70b")) > here
    assert width(tp=1, dp=8) > width(dp=32)
    assert width(on="8x a100-sxm4-80gb") > width(tp=1, dp=8)


def test_what_it_rests_on_is_said() -> None:
    near = run(1.2, 1.2, tp=2, dp=4)
    found = fit([near, run(1.2, 1.2, tp=2, dp=1)], predict)
    on = cluster("8x h100-sxm")
    assert found.basis(LLAMA, near.plan, on) == "measured in your run of 8 devices"
    assert found.basis(LLAMA, near.plan.replace(dp=512, seq_len=8192), cluster("128x dgx-h100")) == (
        "extrapolated from your 2 runs, the nearest of 8 devices: devices 1,024, measured at 8; sequence 8,192, "
        "measured at 4,096"
    )
    alone = fit([near], predict)
    other = alone.basis(llm.config("llama-3-70b"), near.plan.replace(micro_batch=2), cluster("8x a100-sxm4-80gb"))
    assert other.startswith("extrapolated from your run of 8 devices: kind of device a100-sxm4-80gb, measured at h100")
    assert "model llama-3-70b, measured at llama-3-8b" in other
    assert alone.basis(LLAMA, near.plan.replace(global_batch=128), on) == (
        "extrapolated from your run of 8 devices, of another plan"
    )


def test_memory_gets_a_factor_of_its_own() -> None:
    item = run(1.0, 1.0, dp=8)
    device = cluster("8x h100-sxm").groups[0][1].device
    now = float(memory(LLAMA, PlanTable.of([item.plan]), device).reserved_bytes[0])
    found = fit([dataclasses.replace(item, memory_bytes=1.25 * now)], predict)
    assert found.memory == pytest.approx(1.25)


@pytest.mark.parametrize("times", [25.0, 1 / 25.0])
def test_a_run_out_of_all_proportion_is_refused(times: float) -> None:
    item = run(1.0, 1.0, dp=8)
    with pytest.raises(InputError, match=r"run 2: a step of .* predicted; check its unit, plan and devices"):
        fit([item, dataclasses.replace(item, step_s=item.step_s * times)], predict)
    with pytest.raises(InputError, match="holds no run"):
        fit([], predict)


# --- reading ----------------------------------------------------------------------------------------------------------

PLAN = {"global_batch": 128, "seq_len": 4096, "micro_batch": 1, "tp": 2}
RUN = {"model": "llm:llama-3-8b", "on": "2x dgx-h100", "plan": PLAN, "step_s": 9.5}


def write(tmp_path, *runs, **others):
    path = tmp_path / "my-run.json"
    path.write_text(json.dumps({"schema": SCHEMA, "runs": list(runs), **others}))
    return path


def test_a_document_of_runs_is_read(tmp_path) -> None:
    by_tokens = RUN | {"tokens_per_s": 128 * 4096 / 9.5, "memory_bytes": "61.5 GB", "note": "Tuesday"}
    del by_tokens["step_s"]
    first, second = read_runs(write(tmp_path, RUN, by_tokens))
    assert first.config == LLAMA
    assert first.plan == TrainingPlan(128, 4096, tp=2, dp=8)
    assert first.step_s == 9.5
    assert second.step_s == pytest.approx(9.5)
    assert (first.memory_bytes, second.memory_bytes) == (None, 61.5e9)
    for item in (RUN, by_tokens):
        jsonschema.Draft202012Validator(schema(SCHEMA)).validate({"schema": SCHEMA, "runs": [item]})


def test_a_plan_may_be_a_file_beside_it(tmp_path) -> None:
    plan = TrainingPlan(128, 4096, tp=4, dp=4, recompute="full")
    (tmp_path / "args.txt").write_text(emit.emit("megatron", LLAMA, plan, cluster("2x dgx-h100")))
    imported = {"on": "2x dgx-h100", "import": "args.txt", "step_s": 12}
    (found,) = read_runs(write(tmp_path, imported))
    assert found.plan == plan
    assert found.config.parameters == LLAMA.parameters
    (changed,) = read_runs(write(tmp_path, imported | {"plan": {"recompute": "none"}}), llm.config("llama-2-7b"))
    assert changed.plan == plan.replace(recompute="none")
    assert changed.config.name == "llama-2-7b"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"plan": PLAN | {"tp": 3}}, InputError, r"run 1: tp 3 · cp 1 · dp 1 · pp 1 = 3 devices, '2x dgx-h100' has 16"),
        ({"plan": PLAN | {"tpp": 2}}, UnknownNameError, r"my-run.json: run 1: plan: 'tpp'; did you mean 'tp'"),
        ({"plan": {"tp": 2}}, InputError, r"does not say global_batch and seq_len"),
        ({"plan": 7}, InputError, r"'plan' is no object"),
        ({"plan": PLAN | {"recompute": "some"}}, UnknownNameError, r"unknown recompute 'some'"),
        ({"on": "2x dgx-h1000"}, UnknownNameError, r"dgx-h100"),
        ({"on": None}, InputError, r"'on' is no text"),
        ({"model": "llm:lama-3-8b"}, UnknownNameError, r"llama-3-8b"),
        ({"step_s": 0}, InputError, r"'step_s' is 0, want a number above 0"),
        ({"step_s": True}, InputError, r"'step_s' is True"),
        ({"step_s": "9.5"}, InputError, r"'step_s' is 9.5, want a number"),
        ({"tokens_per_s": 100}, InputError, r"wants one of 'step_s' and 'tokens_per_s'"),
        ({"memory_bytes": -1}, InputError, r"'memory_bytes' is -1"),
        ({"memory_bytes": "61 apples"}, InputError, r"61 apples"),
        ({"steps": 3}, UnknownNameError, r"did you mean 'step_s'"),
        ({"import": "absent.txt"}, InputError, r"no such file"),
    ],
)
def test_a_malformed_run_is_refused(change: dict, error: type, message: str, tmp_path) -> None:
    with pytest.raises(error, match=message):
        read_runs(write(tmp_path, RUN | change))


def test_a_malformed_document_is_refused(tmp_path) -> None:
    for text, message in (
        ("{", "not JSON"), ("[]", 'has no "schema": "foretell.training-run/1"'), ('{"schema": "other"}', "has no"),
        (json.dumps({"schema": SCHEMA}), "'runs' is no list of 1 to"),
        (json.dumps({"schema": SCHEMA, "runs": []}), "'runs' is no list of 1 to"),
        (json.dumps({"schema": SCHEMA, "runs": [3]}), "run 1: is no object"),
        ("[" * 100_000, "nested too deeply"),
    ):  # fmt: skip
        path = tmp_path / "bad.json"
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            read_runs(path)
    with pytest.raises(InputError, match="does not name its model"):
        read_runs(write(tmp_path, {key: value for key, value in RUN.items() if key != "model"}))
    with pytest.raises(UnknownNameError, match="did you mean 'runs'"):
        read_runs(write(tmp_path, RUN, run=1))


# --- against published runs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "least"), [("llm-foundry", 0.6), ("vtrain-multi", 0.6)])
def test_the_interval_holds_for_runs_predicted_from_one_other(source: str, least: float) -> None:
    """From the run of a model on the fewest devices to its other runs; 80 % should be inside."""
    from foretell.accuracy.training import rows

    try:
        folder = data_folder(None)
        found = rows(source, folder)
    except InputError as error:
        pytest.skip(f"no measurements: {error}")
    families: dict[tuple[str, str], list] = {}
    for row in found:
        families.setdefault((row.family, row.cluster.groups[0][1].device.name), []).append(row)
    inside = []
    for family in families.values():
        family.sort(key=lambda row: (row.cluster.device_count, row.label))
        runs = [MeasuredRun(row.config, row.plan, row.cluster, row.step_s) for row in family[:12]]
        for index, here in enumerate(runs):
            scale = fit([here])
            for other in runs[index + 1 : index + 4]:
                made = float(scaled(step(other.config, other.plan, other.cluster), scale).time_s[0])
                low, high = scale.interval(other.config, other.plan, other.cluster)
                inside.append(low <= other.step_s / made <= high)
    assert len(inside) > 30
    assert np.mean(inside) >= least


def test_memory_out_of_all_proportion_is_refused() -> None:
    config, plan, on = llm.config("gpt2-xl"), TrainingPlan(64, 2048, dp=8), cluster("1x dgx-h100")
    with pytest.raises(InputError, match=r"run 1: 1 B of memory are .* times what is predicted"):
        fit([MeasuredRun(config, plan, on, step_s=float(step(config, plan, on).time_s[0]), memory_bytes=1.0)])


def test_equal_runs_are_predicted_once() -> None:
    config, plan, on = llm.config("gpt2-xl"), TrainingPlan(64, 2048, dp=8), cluster("1x dgx-h100")
    asked: list[TrainingPlan] = []

    def predict(*key: object) -> StepTable:
        asked.append(plan)
        return step(config, plan, on)

    assert fit([MeasuredRun(config, plan, on, step_s=1.0)] * 50, predict).compute > 0
    assert len(asked) == 1
