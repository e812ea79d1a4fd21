from collections.abc import Callable

import pytest

from foretell.cost.estimate import Estimate, Memory
from foretell.errors import UnknownNameError
from foretell.report import SORT_KEYS, comparison, sorted_estimates

GIB = 2**30
Make = Callable[..., Estimate]
MakeMemory = Callable[..., Memory]
Printed = Callable[..., str]


def three(estimate: Make, memory: MakeMemory) -> list[Estimate]:
    """The sample, one that is slower and unknown in part, one that is faster and does not fit."""
    return [
        estimate(),
        estimate(device="rtx-pro-6000-max-q", time_s=1.2345, time_interval_s=(0.9, 1.6), mfu=None, cost_usd=None),
        estimate(
            device="gtx-1080-ti",
            time_s=2e-3,
            time_interval_s=(0.9e-3, 4e-3),
            mfu=0.5,
            energy_j=0.1234,
            cost_usd=64e-6,
            memory=memory(peak_bytes=12 * GIB, capacity_bytes=11 * GIB),
        ),
    ]


def rows(text: str) -> dict[str, list[str]]:
    """Cells of the table by device, split at runs of two spaces (columns are set apart by three at this width)."""
    return {
        row.split()[0]: [cell.strip() for cell in row.split("  ") if cell.strip()] for row in text.splitlines() if row
    }


def test_a_row_for_each_device(estimate: Make, memory: MakeMemory, printed: Printed) -> None:
    table = rows(printed(comparison(three(estimate, memory)), 120))
    assert table["device"] == [
        *("device", "time", "80 % range", "images/s", "memory", "fits", "MFU", "energy", "cost/M")
    ]
    assert table["a100-sxm4-80gb"] == [
        *("a100-sxm4-80gb", "20 ms", "16–28 ms", "3,200", "6 GiB", "yes", "12 %", "6.4 J", "$0.30")
    ]
    assert table["rtx-pro-6000-max-q"] == [
        *("rtx-pro-6000-max-q", "1.23 s", "900 ms–1.6 s", "51.8", "6 GiB", "yes", "?", "6.4 J", "?")
    ]
    assert table["gtx-1080-ti"] == [
        *("gtx-1080-ti", "2 ms", "900 µs–4 ms", "32,000", "12 GiB", "no", "50 %", "123 mJ", "$1.00")
    ]


def test_the_table_holds_80_columns_whole(estimate: Make, memory: MakeMemory, printed: Printed) -> None:
    text = printed(comparison(three(estimate, memory)), 80)
    assert "…" not in text
    assert max(len(row.rstrip()) for row in text.splitlines()) <= 80
    assert "cost/M" in text
    assert "rtx-pro-6000-max-q" in text


def test_several_models_are_not_called_one(estimate: Make, printed: Printed) -> None:
    trio = [estimate(), *(estimate(device=name, model="learned") for name in ("t4", "l4"))]
    text = printed(comparison(trio))
    assert text.splitlines()[1] == "fp32 · eager · mixed models"
    assert "a100-sxm4-80gb: roofline model; the rest: learned model" in text
    assert "the rest" not in printed(comparison(trio[1:]))


def test_a_row_that_does_not_fit_says_so_beside_the_largest_batch(
    estimate: Make, memory: MakeMemory, printed: Printed
) -> None:
    batches = {"a100-sxm4-80gb": 900, "rtx-pro-6000-max-q": None, "gtx-1080-ti": 59}
    text = printed(comparison(three(estimate, memory), largest_batches=batches), 120)
    table = rows(text)
    assert "900" in table["a100-sxm4-80gb"]
    assert "no, ≤ 59" in table["gtx-1080-ti"]
    assert "no: the one asked for does not" in " ".join(text.split())
    none = printed(comparison(three(estimate, memory), largest_batches=batches | {"gtx-1080-ti": 0}), 120)
    assert "no batch" in rows(none)["gtx-1080-ti"]
    assert "no:" not in printed(comparison(three(estimate, memory)[:2], largest_batches=batches), 120)


def test_long_names_lose_their_middle_and_stay_apart(estimate: Make, printed: Printed) -> None:
    names = ("rtx-pro-6000-workstation", "rtx-pro-6000-server", "a100-sxm4-80gb")
    text = printed(comparison([estimate(device=name, time_interval_s=(0.9, 11.6)) for name in names]), 60)
    shown = [line.split()[0] for line in text.splitlines()[4:7]]
    assert shown == ["rtx-pro…tation", "rtx-pro…server", "a100-sxm4-80gb"]
    twins = printed(comparison([estimate(device=f"accelerator-{n}-of-the-same-name") for n in (1, 2)]), 60)
    assert len({line.split()[0] for line in twins.splitlines()[4:6]}) == 2


def test_question_marks_are_explained_where_there_are_any(estimate: Make, memory: MakeMemory, printed: Printed) -> None:
    assert "? is unknown" in printed(comparison(three(estimate, memory)))
    assert "?" not in printed(comparison([estimate(), estimate(device="t4")]))


def test_what_holds_for_all_is_said_once(estimate: Make, printed: Printed) -> None:
    pair = [
        estimate(notes=("shared", "of the first"), not_counted={"aten.foo.default": 2}),
        estimate(device="t4", notes=("shared",), not_counted={"data loading": 0}),
    ]
    text = printed(comparison(pair, settings=("batch 64",)))
    assert text.splitlines()[:2] == ["timm:resnet50 · inference", "batch 64 · fp32 · eager · roofline model"]
    assert text.count("shared") == 1
    assert "a100-sxm4-80gb: of the first" in text
    assert "Not counted: arithmetic of aten.foo.default ×2; data loading" in " ".join(text.split())


@pytest.mark.parametrize(
    ("by", "order"),
    [
        ("asked", [0, 1, 2]),
        ("device", [0, 2, 1]),
        ("time", [2, 0, 1]),
        ("throughput", [2, 0, 1]),
        ("memory", [0, 1, 2]),
        ("mfu", [2, 0, 1]),
        ("energy", [2, 0, 1]),
        ("cost", [0, 2, 1]),
    ],
)
def test_sorting_puts_the_best_first_and_the_unknown_last(
    estimate: Make, memory: MakeMemory, by: str, order: list[int]
) -> None:
    estimates = three(estimate, memory)
    assert sorted_estimates(estimates, by) == [estimates[i] for i in order]


def test_every_sort_key_is_tested_and_others_are_refused() -> None:
    assert set(SORT_KEYS) == {"asked", "device", "time", "throughput", "memory", "mfu", "energy", "cost"}
    with pytest.raises(UnknownNameError, match="did you mean 'time'"):
        sorted_estimates([], "tme")
