"""Mooncake's traces: requests to Kimi, with the hashes of the blocks that their prompts consist of."""

from __future__ import annotations

from typing import Any

from foretell.simulate.serving.workloads.family import Rows, Trace, Wanted, reader
from foretell.simulate.serving.workloads.prefixes import shared_prefixes
from foretell.simulate.serving.workloads.source import Source, number

#: Tokens of a block that has one hash.
BLOCK = 512
_NEEDED = ("timestamp", "input_length", "output_length")


@reader(
    "mooncake",
    needs=tuple((name,) for name in _NEEDED),
    source="github.com/kvcache-ai/Mooncake, README.md, Open Source Trace (FAST 2025)",
)
def mooncake(source: Source, wanted: Wanted) -> Trace:
    """JSON Lines with timestamp (ms), input_length, output_length and hash_ids of blocks of 512 tokens."""
    rows = Rows(wanted)
    chains: list[list[int]] = []
    lengths: list[int] = []
    for row, value in source.objects():
        if rows.enough():
            break
        missing = [key for key in _NEEDED if not isinstance(value, dict) or key not in value]
        if missing:
            rows.skip(row, "no JSON" if value is None else f"no {', '.join(missing)}")
            continue
        time_s, tokens = number(value["timestamp"]) / 1e3, number(value["input_length"])
        if rows.add(row, time_s, tokens, number(value["output_length"])):
            chains.append(_hashes(value.get("hash_ids")))
            lengths.append(int(tokens))
    prefix, prefix_tokens, kept = shared_prefixes(chains, lengths, BLOCK)
    return rows.trace(source, prefix, prefix_tokens, prefixes=kept)


def _hashes(value: Any) -> list[int]:
    """Hashes of blocks; whatever else stands there shares nothing."""
    if not isinstance(value, list):
        return []
    return [one for one in value if isinstance(one, int)] if all(isinstance(one, int) for one in value) else []
