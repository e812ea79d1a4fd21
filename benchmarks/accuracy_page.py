"""Write docs/accuracy.md and its pictures from held-out predictions that the calibration scripts kept.

    python benchmarks/accuracy_page.py --kept DIR

`DIR` holds one ``NAME-SPLIT.npz`` a domain and split, with the columns measured, predicted, low, high (seconds) and
table. Splits are ``name`` and ``family`` (seen GPU, unseen network or family), ``gpu`` (unseen GPU) and ``both``.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np

DOCS = Path(__file__).resolve().parents[1] / "docs"
SPLITS = {
    "name": "seen GPU, unseen network",
    "family": "seen GPU, unseen family",
    "gpu": "unseen GPU",
    "both": "unseen GPU and family",
}
BEGIN, END = "<!-- figures: written by benchmarks/accuracy_page.py -->", "<!-- end of figures -->"


def domain_of(table: str) -> str:
    """Which group of tables one belongs to: the part of its name before its device."""
    for prefix in ("timm-inference", "timm-train", "neusight", "help-nas"):
        if table.startswith(prefix):
            return prefix
    return table.split("-")[0]


def figures(kept: dict[str, dict[str, np.ndarray]]) -> list[str]:
    """Tables of errors, in Markdown."""
    lines = []
    for name in sorted({key.rpartition("-")[0] for key in kept}):
        for split, title in SPLITS.items():
            data = kept.get(f"{name}-{split}")
            if data is None:
                continue
            lines += [
                f"### {name.capitalize()}: {title}",
                "",
                "| table | rows | mean | median | 90th | bias | in 80 % interval | high / low |",
                "|---|---:|---:|---:|---:|---:|---:|---:|",
            ]
            domains: dict[str, list[tuple[float, ...]]] = {}
            for table in np.unique(data["table"]):
                rows = data["table"] == table
                score = scores(*(data[column][rows] for column in ("measured", "predicted", "low", "high")))
                domains.setdefault(domain_of(str(table)), []).append(score)
                lines.append(row(str(table), int(rows.sum()), score))
            for domain, found in domains.items():
                if len(found) > 1:
                    lines.append(row(f"**mean of {len(found)} {domain}**", 0, tuple(np.mean(found, axis=0))))
            lines.append("")
    return lines


def scores(measured: np.ndarray, predicted: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[float, ...]:
    """Mean, median, 90th percentile of the error; bias; coverage; width."""
    error = np.abs(predicted / measured - 1)
    return (
        float(error.mean()),
        float(np.median(error)),
        float(np.quantile(error, 0.9)),
        float(np.median(predicted / measured) - 1),
        float(np.mean((low <= measured) & (measured <= high))),
        float(np.median(high / low)),
    )


def row(name: str, count: int, score: tuple[float, ...]) -> str:
    """One line of a table."""
    mean, median, p90, bias, inside, width = score
    number = f"{count:,}" if count else ""
    return (
        f"| {name} | {number} | {mean:.1%} | {median:.1%} | {p90:.1%} | {bias:+.1%} | {inside:.0%} | {width:.2f} |"
    )


def picture(kept: dict[str, dict[str, np.ndarray]], split: str, path: Path) -> None:
    """Predicted against measured, log-log, a panel for each group of tables, with bands of ±10 %."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: dict[str, list[tuple[str, np.ndarray, np.ndarray]]] = {}
    for key, data in kept.items():
        if key.rpartition("-")[2] != split:
            continue
        for table in np.unique(data["table"]):
            rows = data["table"] == table
            panels.setdefault(domain_of(str(table)), []).append(
                (str(table), data["measured"][rows] * 1e3, data["predicted"][rows] * 1e3)
            )
    if not panels:
        return
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.2 * columns, 4.0 * lines), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (domain, tables) in zip(axes.flat, panels.items(), strict=False):
        for _, measured, predicted in tables:
            axis.plot(measured, predicted, ".", markersize=2, alpha=0.5)
        everything = np.concatenate([np.concatenate([m, p]) for _, m, p in tables])
        ends = np.array([everything.min() * 0.8, everything.max() * 1.25])
        axis.fill_between(ends, 0.9 * ends, 1.1 * ends, color="0.8", zorder=0, linewidth=0)
        axis.plot(ends, ends, color="0.4", linewidth=0.8, zorder=1)
        axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, ms", ylabel="predicted, ms")
        count = sum(len(m) for _, m, _ in tables)
        error = np.median(np.concatenate([np.abs(p / m - 1) for _, m, p in tables]))
        axis.set_title(f"{domain}: {count:,} rows, median error {error:.1%}", fontsize=9)
        axis.set_aspect("equal")
    figure.suptitle(f"Held out: {SPLITS[split]} (band: ±10 %)", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Read what was kept, write the page's figures and its pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kept", type=Path, required=True, metavar="DIR")
    arguments = parser.parse_args()
    kept = {}
    for path in sorted(arguments.kept.glob("*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            kept[path.stem] = {name: arrays[name] for name in arrays.files}
    for split in ("family", "gpu"):
        picture(kept, split, DOCS / f"accuracy-{split}.png")
    page = DOCS / "accuracy.md"
    text = page.read_text(encoding="utf-8")
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    new = "\n".join([BEGIN, "", *figures(kept), END])
    page.write_text(pattern.sub(lambda _: new, text), encoding="utf-8")


if __name__ == "__main__":
    main()
