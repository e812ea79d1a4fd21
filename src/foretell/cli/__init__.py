"""The command line: ``foretell predict | plan | simulate | devices | explain | …``; ``foretell --help`` has all.

Exit codes: 0 done, 2 the input is wrong (one line says what, where and the repair), 3 well formed but infeasible, 1 a
defect of ours, 130 interrupted. Nothing here imports torch; commands import what they need when they run.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line on ``sys.argv`` and exit with its code."""
    try:
        from foretell.cli.app import app

        app()
    except KeyboardInterrupt:  # while the imports above ran; later ones are caught within
        sys.exit(130)
