"""Where claims that are tried on public measurements find them."""

from __future__ import annotations

import os
from pathlib import Path

from foretell.errors import InputError


def measurements(source: str, name: str) -> Path:
    """A file of public measurements, in a source's folder of ``$FORETELL_DATA``. Raises InputError where it is not."""
    path = Path(os.environ.get("FORETELL_DATA") or Path("..") / "shared" / "data") / source / name
    if not path.is_file():
        raise InputError("no such measurements", str(path), "set FORETELL_DATA to the folder of public measurements")
    return path
