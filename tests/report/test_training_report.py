"""The card of one training plan, and what a plan is called."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from foretell.hardware import Cluster, cluster
from foretell.plan.training.predicted import predict
from foretell.plan.training.search import search
from foretell.report.training import label, plan_card, ranking_view
from foretell.report.training_step import step_card
from foretell.report.training_step_html import step_page
from foretell.simulate.training import TrainingPlan
from foretell.simulate.training.memory import by_rank
from foretell.simulate.training.step import step
from foretell.workload import llm

CONFIG = llm.config("llama-3-70b")
PLAN = TrainingPlan(1024, 8192, tp=8, pp=8, dp=2, vp=5, schedule="interleaved")


def card(plan: TrainingPlan, on: Cluster, width: int = 80, tokens: float | None = None) -> str:
    made = plan_card(
        CONFIG, plan, on, step(CONFIG, plan, on), by_rank(CONFIG, plan, on.groups[0][1].device), tokens=tokens
    )
    file = io.StringIO()
    Console(file=file, width=width).print(made)
    return file.getvalue()


def test_a_card_has_the_step_the_memory_of_stages_and_the_run() -> None:
    on = cluster("16x dgx-h100")
    text = card(PLAN, on, tokens=15e12)
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    found = step(CONFIG, PLAN, on)
    assert "tensor 8 · data 2 · pipeline 8 · chunks a rank 5" in words
    assert "512 micro-batches of 1 schedule interleaved · ZeRO 1" in words
    for part in ("computing", "tensor-parallel communication", "the pipeline's bubble", "updating weights"):
        assert part in words
    assert f"{1024 * 8192 / found.time_s[0] / 128:,.0f} tokens/s a GPU" in words
    assert f"MFU {100 * found.mfu[0]:.0f} %" in words
    assert "exposed" in words
    assert "of 79.6 GiB" in words
    assert "fits" in words
    assert "GiB on stage" in words
    assert "of 8 stages the first, the fullest and the last are shown" in words
    days = 15e12 / (1024 * 8192) * found.time_s[0] / 86400
    assert f"{days:,.1f} days" in words
    assert "at $880.64 an hour" in words  # 128 devices of 6.88
    peak = by_rank(CONFIG, PLAN, on.groups[0][1].device).peak_bytes
    (together,) = [line for line in text.splitlines() if "together" in line]
    assert f"{peak[0] / 2**30:.1f}" in together
    assert f"{peak[-1] / 2**30:.1f}" in together


def test_one_micro_batch_is_one() -> None:
    plan = TrainingPlan(64, 8192, tp=8, dp=16, micro_batch=4)
    assert "· 1 micro-batch of 4" in " ".join(card(plan, cluster("16x dgx-h100")).split())


@pytest.mark.parametrize(("vp", "said"), [((4,), False), ((4, 5), True)])  # four chunks are faster by less than 1 %
def test_the_first_that_is_not_on_the_front_is_said_to_be(vp: tuple[int, ...], said: bool) -> None:
    pinned = {"tp": (4,), "cp": (2,), "pp": (4,), "micro_batch": (1,), "recompute": ("none", "full"), "vp": vp}
    found = search(CONFIG, cluster("16x dgx-h100"), global_batch=1024, seq_len=8192, pinned=pinned)
    assert (found.best[0] not in found.front) is said
    file = io.StringIO()
    Console(file=file, width=80).print(ranking_view(found))
    assert ("the first is not on it" in file.getvalue()) is said


def test_one_stage_that_does_not_fit() -> None:
    plan = PLAN.replace(pp=1, vp=1, schedule="1f1b", dp=16)
    text = card(plan, cluster("16x dgx-h100"))
    assert "DOES NOT FIT" in text
    assert "on stage" not in text
    assert "Run" not in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_figures_are_not_cut(width: int) -> None:
    text = card(PLAN, cluster("16x dgx-h100"), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("2x 8x a100-sxm4-80gb over ib-hdr", True),
        ("2x 8x a100-sxm4-80gb over 8x ib-hdr", False),
        ("2x dgx-a100", False),
        ("1x 8x a100-sxm4-80gb", False),
    ],
)
def test_a_port_that_devices_share_is_said(name: str, said: bool) -> None:
    on, config = cluster(name), llm.config("llama-2-7b")
    one = predict(config, TrainingPlan(256, 4096, dp=on.device_count, zero=3), on)
    found = search(config, on, global_batch=256, seq_len=4096, pinned={"tp": (1,), "cp": (1,), "pp": (1,)})
    for view in (step_card(one), ranking_view(found)):
        file = io.StringIO()
        Console(file=file, width=80).print(view)
        words = " ".join(file.getvalue().split())
        assert ("8 devices of a machine share one port to the others: 'over 8x …'" in words) is said
    assert ("share one port" in step_page(one, "foretell predict")) is said


def test_what_is_not_known_is_said() -> None:
    on = cluster("2x 8x v100-sxm3-32gb over ib-edr")
    plan = TrainingPlan(64, 2048, tp=8, pp=2, precision="fp16")
    device = on.groups[0][1].device
    text = " ".join(card(plan, on).split())
    if device.price_usd_per_h is None:
        assert "unknown: no hourly price of the cluster is in the catalogue" in text
    if device.tdp_w is None:
        assert "unknown: the devices' power is not in the catalogue" in text


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (TrainingPlan(8, 128), "mbs1 zero1"),
        (TrainingPlan(8, 128, cp=2, context_scheme="a2a"), "cp2 mbs1 zero1 a2a"),
        (TrainingPlan(8, 128, tp=2, sequence_parallel=False, cuda_graph=True), "tp2 mbs1 zero1 no-sp graphs"),
        (TrainingPlan(8, 128, tp=2, overlap_tp=True), "tp2 mbs1 zero1 tp-overlap"),
        (TrainingPlan(8, 128, dp=8, ep=8, dispatcher="deepep", overlap_ep=True),
         "dp8 ep8 mbs1 zero1 deepep ep-overlap"),
        (TrainingPlan(8, 128, dp=8, zero=3, shard=4), "dp8 mbs1 zero3 shard4"),
        (TrainingPlan(8, 128, pp=4, schedule="zero-bubble", last_layers=3), "pp4 mbs1 zero1 zero-bubble ends–/3"),
    ],
)  # fmt: skip
def test_what_a_plan_is_called(plan: TrainingPlan, said: str) -> None:
    assert label(plan) == said
