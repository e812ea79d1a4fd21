"""Mooncake's traces: requests to Kimi, with the hashes of the blocks that their prompts consist of.

Columns as in the repository's README; that times are milliseconds and blocks of 512 tokens says the paper. The two
requests shown there, of 6,955 and 6,472 tokens, have 14 and 13 hashes: the last block need not be full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from foretell.errors import InputError
from foretell.simulate.serving.workloads.family import Rows, Trace, Wanted, reader
from foretell.simulate.serving.workloads.prefixes import shared_prefixes
from foretell.simulate.serving.workloads.source import Source, number

__all__ = ["NEEDED", "hashed", "mooncake"]

#: Tokens of a block that has one hash.
BLOCK = 512
NEEDED = ("timestamp", "input_length", "output_length")


@reader(
    "mooncake",
    needs=tuple((name,) for name in NEEDED),
    source="github.com/kvcache-ai/Mooncake, README.md, Open Source Trace; FAST 2025, section 4 and appendix",
)
def mooncake(source: Source, wanted: Wanted) -> Trace:
    """JSON Lines with timestamp (ms), input_length, output_length and hash_ids of blocks of 512 tokens."""
    return hashed(source, wanted, 1000, BLOCK)


def hashed(source: Source, wanted: Wanted, per_second: int, block: int) -> Trace:
    """Requests with hashes of their prompts' blocks of `block` tokens, at timestamps that count `per_second`.

    A hash may be one of a block's tokens alone, as in Bailian's traces, or of what comes before it as well: what is
    shared are beginnings. What hashes are missing is told. Raises InputError where milliseconds have a fraction, as
    Bailian's seconds do, unless the kind of the file was said.
    """
    rows = Rows(wanted)
    chains: list[list[int]] = []
    lengths: list[int] = []
    links: dict[tuple[int, int], int] = {}
    lacking: dict[str, list[int]] = {}
    for row, value in source.objects():
        if rows.enough():
            break
        missing = [key for key in NEEDED if not isinstance(value, dict) or key not in value]
        if missing:
            rows.skip(row, "no JSON" if value is None else f"no {', '.join(missing)}")
            continue
        time, tokens = number(value["timestamp"]), number(value["input_length"])
        if per_second == 1000 and not source.named and math.isfinite(time) and time % 1:
            what = f"timestamp {time:g} is no whole millisecond, as Mooncake's are"
            repair = "name the kind: bailian:FILE where these are seconds, else mooncake:FILE"
            raise InputError(what, f"{source.name}, row {row:,}", repair)
        if rows.add(row, time / per_second, tokens, number(value["output_length"])):
            hashes, lack = _hashes(value.get("hash_ids"))
            if lack:
                lacking.setdefault(lack, []).append(row)
            chains.append(_chained(hashes, links))
            lengths.append(int(tokens))
    prefix, prefix_tokens, kept = shared_prefixes(chains, lengths, block)
    if lacking:
        kept = f"{kept}; {_without(lacking)}" if kept else _without(lacking)
    return rows.trace(source, prefix, prefix_tokens, prefixes=kept)


def _hashes(value: Any) -> tuple[list[int], str]:
    """Hashes of blocks, or none and what is there instead."""
    if value is None:
        return [], "without hash_ids"
    if not isinstance(value, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        return [], "with hash_ids that are no list of whole numbers"
    return value, ""


def _without(lacking: Mapping[str, Sequence[int]]) -> str:
    """Which rows share nothing for want of hashes, in words."""
    said = [
        f"{len(rows):,} row{'s' if len(rows) > 1 else ''} {why}, first row {rows[0]:,}"
        for why, rows in lacking.items()
    ]
    one = len(said) == 1 and len(next(iter(lacking.values()))) == 1
    return f"{', and '.join(said)}, share{'s' if one else ''} nothing"


def _chained(hashes: list[int], links: dict[tuple[int, int], int]) -> list[int]:
    """A number for each block that stands for all blocks up to it; `links` are those given so far.

    >>> links = {}
    >>> _chained([7, 8], links), _chained([7, 9], links), _chained([9, 8], links)
    ([1, 2], [1, 3], [4, 5])
    """
    found, before = [], 0
    for one in hashes:
        before = links.setdefault((before, one), len(links) + 1)
        found.append(before)
    return found
