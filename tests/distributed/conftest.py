"""Four processes, started once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="torch is not installed (pip install 'foretell[torch]')")

from foretell.learn.distributed import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    with Workers(4, timeout_s=60) as found:
        yield found
