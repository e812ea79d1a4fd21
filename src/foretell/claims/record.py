"""``python -m foretell.claims.record [ID…]``: obtain figures anew and write them beside the claims."""

from __future__ import annotations

import sys

from foretell.claims.ledger import record
from foretell.errors import ForetellError


def main(ids: list[str]) -> int:
    """Record the claims of `ids` (all without any); print each verdict."""
    try:
        for claim in record(*ids, progress=lambda c: print(f"{c.id} …", file=sys.stderr, flush=True)):
            print(f"{claim.id}: {claim.verdict}" + (f" ({claim.obtained.text})" if claim.obtained else ""))
    except ForetellError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
