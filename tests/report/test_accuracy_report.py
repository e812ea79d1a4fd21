from collections.abc import Callable

from foretell.accuracy import Prediction, Report, Row, Slice, SliceResult
from foretell.report import accuracy_view

Printed = Callable[..., str]


def result(name: str, predicted: list[float | None], complete: bool = True) -> SliceResult:
    """Rows measured at 1 s each; the interval of a prediction is ±20 %."""
    made = tuple(
        Prediction(
            Row("timm:x", {}, 1, 1.0, "file"), "", p, 0.8 * (p or 0), 1.2 * (p or 0), "" if p else "no such model"
        )
        for p in predicted
    )
    return SliceResult(Slice(name, "t4", "eager", (), lambda folder: []), made, len(made), complete)


REPORT = Report(
    (result("first-of-a-long-name-such-as-real-slices-have", [1.1, 0.5, None]), result("second", [1.5], False)),
    absent=("third",),
    interrupted=True,
)


def test_scores_by_eye(printed: Printed) -> None:
    rows = [" ".join(row.split()) for row in printed(accuracy_view(REPORT), 160).splitlines()]
    assert rows[0] == "slice n median mean 90th bias covered width failed"
    # errors 10 % and 50 %; biases +10 % and -50 %; 1 lies in 0.88 … 1.32 but not in 0.4 … 0.6
    assert rows[1] == "first-of-a-long-name-such-as-real-slices-have 2 30.0% 30.0% 46.0% -20.0% 50% 1.50 1"
    assert rows[2] == "second (stopped) 1 50.0% 50.0% 50.0% +50.0% 0% 1.50 0"
    assert rows[3] == "mean of 2 slices 3 40.0% 40.0% 48.0% +15.0% 25% 1.50 1"
    assert "1 no such model" in rows
    assert "1 slice left out, the data folder lacks their files: third" in rows
    assert any(row.startswith("Interrupted") for row in rows)


def test_80_columns_hold_every_figure(printed: Printed) -> None:
    lines = [line.rstrip() for line in printed(accuracy_view(REPORT), 80).splitlines()]
    assert max(map(len, lines)) <= 80
    at = lines.index("first-of-a-long-name-such-as-real-slices-have")
    assert lines[at + 1].split() == ["2", "30.0%", "30.0%", "46.0%", "-20.0%", "50%", "1.50", "1"]
    assert lines[1].index("median") + len("median") == lines[at + 1].index("30.0%") + len("30.0%")


def test_a_slice_without_predictions(printed: Printed) -> None:
    rows = [
        " ".join(row.split()) for row in printed(accuracy_view(Report((result("none", [None]),))), 160).splitlines()
    ]
    assert rows[1] == "none 0 1"
    assert not any(row.startswith(("mean of", "Interrupted")) for row in rows)
