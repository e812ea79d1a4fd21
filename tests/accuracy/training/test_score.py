"""Errors, bars and choices, on rows made up for the purpose and a prediction that is not a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from foretell.accuracy.training.row import Row, gpt, machines
from foretell.accuracy.training.score import BARS, choices, errors, grouped, predict, verdicts
from foretell.errors import UnknownNameError
from foretell.hardware.cluster import Cluster
from foretell.simulate.training.plan import PlanTable, TrainingPlan
from foretell.workload.llm import LLMConfig

SMALL = gpt("small", layers=2, hidden=64, heads=4, vocab=100, context=16, source="made up")


def row(step_s: float, source: str = "vtrain-single", config: LLMConfig = SMALL, **plan: Any) -> Row:
    made = TrainingPlan(**{"global_batch": 8, "seq_len": 16, "dp": 8, **plan})
    return Row(
        source=source,
        label=f"{config.name} {made}",
        config=config,
        plan=made,
        cluster=machines(made.devices, 8, "dgx-a100", "a100-sxm4-80gb"),
        step_s=step_s,
        family=config.name,
    )


@dataclass
class Fixed:
    time_s: np.ndarray


def test_rows_are_predicted_together_and_keep_their_places() -> None:
    other = SMALL.replace(name="other", layers=4)
    rows = [row(1.0, micro_batch=4), row(1.0, config=other, micro_batch=2), row(1.0), row(1.0, dp=4, micro_batch=2)]
    asked = []

    def steps(config: LLMConfig, table: PlanTable, cluster: Cluster) -> Fixed:
        asked.append((config.name, cluster.device_count, len(table)))
        return Fixed(100.0 * cluster.device_count + 10.0 * config.layers + table["micro_batch"])

    assert predict(rows, steps).tolist() == [824.0, 842.0, 821.0, 422.0]
    assert asked == [("small", 8, 2), ("other", 8, 1), ("small", 4, 1)]


def test_errors_are_of_what_the_source_states() -> None:
    rows = [row(2.0), row(2.0, source="nemo")]
    # A step of 2.5 s instead of 2 s: 25 % more time, 20 % fewer tokens a second.
    assert errors(rows, [2.5, 2.5]).tolist() == pytest.approx([0.25, -0.2])


def test_groups_hold_each_row_once() -> None:
    rows = [row(1.0), row(1.0, dp=4, tp=2), row(1.0, dp=4)]
    assert grouped(rows, "gpus") == {"4": [2], "8": [0, 1]}
    assert grouped(rows, "moe") == {"False": [0, 1, 2]}
    assert grouped(rows, "tp") == {"1": [0, 2], "2": [1]}
    assert grouped(rows, "hidden") == {"64": [0, 1, 2]}
    with pytest.raises(UnknownNameError, match="gqus"):
        grouped(rows, "gqus")


def test_the_choice_is_the_prediction_s_and_the_regret_the_measurement_s() -> None:
    rows = [row(1.0, micro_batch=1), row(1.1, micro_batch=2), row(1.0, micro_batch=1, global_batch=16)]
    first, second = choices(rows, [3.0, 2.0, 1.0])
    assert (first.chosen, first.fastest, first.of) == (rows[1], rows[0], 2)
    assert first.regret == pytest.approx(0.1)
    assert second.regret == 0.0  # nothing to choose from


def test_a_bar_judges_its_own_rows() -> None:
    fit, judged = replace(row(1.0, dp=4), split="fit"), row(1.0)
    found = {v.name: v for v in verdicts([fit, judged], [9.0, 1.05])}
    mean = found["mean, 8 GPUs"]
    assert (mean.n, mean.met) == (1, True)
    assert mean.value == pytest.approx(0.05)
    found = {v.name: v for v in verdicts([fit, judged], [9.0, 1.10])}
    assert not found["mean, 8 GPUs"].met


def test_shares_count_rows_beyond_a_limit() -> None:
    rows = [row(1.0, source="llm-foundry", micro_batch=n) for n in (1, 2, 4, 8)]
    found = {v.name: v for v in verdicts(rows, [1.0, 1.0, 1.0, 2.0])}
    assert found["share beyond 15 %, A100"].value == 0.25
    assert found["mean, A100"].value == pytest.approx(0.125)


def test_regrets_have_bars() -> None:
    rows = [row(1.0, micro_batch=1), row(1.2, micro_batch=2)]
    found = {v.name: v for v in verdicts(rows, [2.0, 1.0])}
    assert found["choice: mean regret"].value == pytest.approx(0.2)
    assert found["choice: share beyond 3 %"].value == 1.0
    found = {v.name: v for v in verdicts([replace(r, source="vtrain-multi") for r in rows], [1.0, 2.0])}
    assert found["choice: largest regret"].value == 0.0


def test_every_bar_is_of_a_source() -> None:
    from foretell.accuracy.training import SOURCES

    assert {bar.source for bar in BARS} == set(SOURCES) - {"llama-3", "nemo-long"}
