"""What is executed here, against what `foretell.simulate.training` says of the same plans: bytes of a layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from foretell.hardware import cluster
from foretell.learn.distributed import expected
from foretell.simulate.collectives import Fabric
from foretell.simulate.training import PlanTable, TrainingPlan
from foretell.simulate.training.memory.activations import layer
from foretell.simulate.training.step import steps
from foretell.workload.llm.config import LLMConfig

# `expected` is held equal to what processes send and keep in test_step.py; here it stands for them.
GPT = LLMConfig(
    "tiny", layers=4, hidden=32, heads=4, intermediate=96, vocab=256, gated=False, activation="gelu", norm="layer",
    norm_bias=True, positions="learned", position_rows=16,
)  # fmt: skip
HALF = 2


def plan_of(**change: Any) -> TrainingPlan:
    """Half precision throughout, scores stored, nothing hidden behind anything."""
    fixed: dict[str, Any] = {
        "global_batch": 8, "seq_len": 16, "attention": "unfused", "grad_dtype": "bf16", "overlap_grad_reduce": False,
        "overlap_param_gather": False, "overlap_p2p": False,
    }  # fmt: skip
    return TrainingPlan(**fixed | change)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("tp", "sequence"), [(1, True), (2, True), (2, False), (4, True), (4, False)])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_layer_keeps_what_the_memory_model_says(recompute: str, tp: int, sequence: bool, micro_batch: int) -> None:
    """Of one layer more and one micro-batch more in flight, with GPipe: free of head, embedding and what passes."""
    base = plan_of(schedule="gpipe", pp=1, tp=tp, sequence_parallel=sequence, recompute=recompute,
                   micro_batch=micro_batch)  # fmt: skip

    def kept(layers: int, passes: int) -> int:
        plan = base.replace(global_batch=passes * micro_batch)
        return expected(GPT.replace(layers=layers), plan, 0, itemsize=HALF).activation_bytes

    of_one = (kept(2, 2) - kept(2, 1)) - (kept(1, 2) - kept(1, 1))
    # The model has the norms' two statistics in fp32, as GPUs do; here they are of the type of all else.
    tokens = base.seq_len * micro_batch / (tp if sequence else 1)
    statistics = 0.0 if recompute == "full" else 2 * 2 * (4 - HALF) * tokens
    assert layer(GPT, GPT.groups[0], PlanTable.of([base]), dropout=False).kept[0] == of_one + statistics


def ring_bytes(
    self: Fabric, kind: str, nbytes: npt.ArrayLike, size: npt.ArrayLike, stride: npt.ArrayLike = 1, **rest: Any
) -> npt.NDArray[np.float64]:
    """In place of seconds, the bytes that each rank of a ring sends."""
    buffer, ranks = np.broadcast_arrays(np.asarray(nbytes, np.float64), np.asarray(size, np.float64))
    if kind == "send_recv":
        return np.where(ranks > 1, buffer, 0.0)
    return (2.0 if kind == "all_reduce" else 1.0) * buffer * (ranks - 1) / ranks


@pytest.mark.parametrize(
    ("purpose", "change"),
    [
        *(
            ("tp", {"tp": tp, "sequence_parallel": sequence, "recompute": recompute})
            for tp in (2, 4) for sequence in (True, False) for recompute in ("none", "selective", "full")
        ),
        *(("dp", {"dp": dp, "zero": zero}) for dp in (2, 4) for zero in (0, 1)),
    ],
)  # fmt: skip
def test_a_layer_sends_what_the_step_model_says(
    purpose: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two layers more, free of embedding and head."""
    monkeypatch.setattr(Fabric, "time_s", ring_bytes)
    plan = plan_of(**change)
    modelled, sent = [], []
    for layers in (2, 4):
        config = GPT.replace(layers=layers)
        table = steps(config, PlanTable.of([plan]), cluster("8x h100-sxm"))
        modelled.append(float(getattr(table, f"{purpose}_s")[0]))
        sent.append(expected(config, plan, 0, itemsize=HALF).sent[purpose])
        if purpose == "tp" and plan.sequence_parallel:
            # Gradients of norms, summed over the sequence once a step: too little for the model to count.
            sent[-1] -= 2 * HALF * 4 * config.hidden * layers * (plan.tp - 1) // plan.tp
    assert modelled[1] - modelled[0] == pytest.approx(sent[1] - sent[0], rel=1e-12)
