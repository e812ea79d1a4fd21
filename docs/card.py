"""Draws docs/card.svg, the picture in the README (what ``make demo`` prints), and docs/tutorial.svg.

Run again when estimates change.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import TerminalTheme

import foretell
from foretell.cost.memory import largest_batch
from foretell.report import card, graph_settings

_THEME = TerminalTheme(
    (24, 27, 33),
    (214, 219, 228),
    [(40, 44, 52), (224, 108, 117), (152, 195, 121), (229, 192, 123), (97, 175, 239), (198, 120, 221), (86, 182, 194),
     (214, 219, 228)],
)  # fmt: skip

# rich's own template loads a font from the web, which pictures in a README may not. At 21 px the usual monospaced fonts
# are as high as rich's lines, so that the frame has no gaps.
_SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: 21px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
<rect fill="#181b21" width="100%" height="100%" rx="10"/>
<g transform="translate({terminal_x}, 24)" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def draw(path: Path, workload: str, on: str, options: str, **settings: Any) -> None:
    """Write to `path` the card of a workload; `options` is how a command line says `settings`."""
    graph = foretell.capture(workload, **settings)
    device = foretell.device(on)
    largest = None
    if workload.startswith("llm:"):  # as the command does
        largest = largest_batch(lambda batch: foretell.capture(workload, **{**settings, "batch": batch}), device)
    console = Console(record=True, width=84, file=io.StringIO(), force_terminal=True)
    console.print(f"[bold]$[/] foretell predict {workload} --on {on} {options}\n", highlight=False)
    shown = card(
        foretell.predict(graph, on=device), settings=graph_settings(graph), device=device, largest_batch=largest
    )
    console.print(shown)
    svg = console.export_svg(theme=_THEME, code_format=_SVG, unique_id="card", font_aspect_ratio=0.632)
    path.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", encoding="utf-8")


def main(path: Path) -> None:
    """Write the README's picture to `path`."""
    draw(path, "timm:resnet50", "a100-sxm4-80gb", "--batch 64", batch=64)


def tutorial(path: Path) -> None:
    """Write the tutorial's picture to `path`."""
    options = "--seq-len 512 --batch 8 --precision fp16"
    draw(path, "llm:gpt2", "l4", options, seq_len=512, batch=8, precision="fp16")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("card.svg"))
    tutorial(Path(__file__).with_name("tutorial.svg"))
