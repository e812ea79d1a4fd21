"""``python -m foretell`` is ``foretell``."""

from __future__ import annotations

from foretell.cli import main

if __name__ == "__main__":
    main()
