"""Closed forms for transformers whose first and last stage have more to do: beside the simulator, chunk by chunk."""

from __future__ import annotations

import pytest

from foretell.hardware import cluster
from foretell.simulate.pipeline import simulate
from foretell.simulate.pipeline.closed import step_time
from foretell.simulate.training import CHOICES, TrainingPlan
from foretell.simulate.training.step import stage_times
from foretell.workload import llm

CASES = [("llama-3-70b", "16x dgx-h100", 8, 128, 8192), ("gpt-3-175b", "64x dgx-a100", 8, 256, 2048),
         ("llama-3-8b", "4x dgx-h100", 1, 64, 8192)]  # fmt: skip
#: How far the closed form may be off. It takes a rank's chunks to be alike: the head weighs on the last one alone.
WITHIN = {"1f1b": 1e-4, "gpipe": 1e-4, "zero-bubble": 1e-4, "layered": 2e-3, "interleaved": 1.5e-2}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
@pytest.mark.parametrize("schedule", CHOICES["schedule"])
@pytest.mark.parametrize("pp", [4, 8])
def test_stages_of_models(case: tuple[str, str, int, int, int], schedule: str, pp: int) -> None:
    name, on, tp, batch, seq_len = case
    config, machines = llm.config(name), cluster(on)
    vp = 2 if schedule == "interleaved" else 1
    dp = machines.device_count // (tp * pp)
    plan = TrainingPlan(batch, seq_len, tp=tp, pp=pp, vp=vp, dp=dp, schedule=schedule)
    times = stage_times(config, plan, machines)
    overlap = times.vp > 1
    simulated = simulate(schedule, times, plan.micro_batches, overlap_p2p=overlap).step_s
    forward, backward, weights = (t.sum(axis=1)[None] for t in (times.forward_s, times.backward_s, times.weights_s))
    closed = step_time(
        CHOICES["schedule"].index(schedule), pp, times.vp, plan.micro_batches, forward, backward,
        weights_s=weights, p2p_s=times.p2p_s.max(), overlap_p2p=overlap,
    )[0]  # fmt: skip
    assert closed == pytest.approx(simulated, rel=WITHIN[schedule])
