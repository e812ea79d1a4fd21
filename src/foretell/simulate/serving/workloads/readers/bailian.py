"""Bailian's traces: two hours of requests to Qwen models at Alibaba, with hashes of their prompts' blocks.

They have the columns of Mooncake's and others, but times in seconds, blocks of 16 tokens, and hashes of each block by
itself. What a prompt is a turn of (chat_id, parent_chat_id, turn) is not used: its blocks say what it shares.
"""

from __future__ import annotations

from foretell.simulate.serving.workloads.family import Trace, Wanted, reader
from foretell.simulate.serving.workloads.readers.mooncake import NEEDED, hashed
from foretell.simulate.serving.workloads.source import Source

#: Tokens of a block that has one hash.
BLOCK = 16


@reader(
    "bailian",
    needs=tuple((name,) for name in (*NEEDED, "parent_chat_id")),
    source="github.com/alibaba-edu/qwen-bailian-usagetraces-anon, README.md (ATC 2025)",
    order=-1,
)
def bailian(source: Source, wanted: Wanted) -> Trace:
    """JSON Lines with timestamp (s), input_length, output_length, hash_ids of blocks of 16 tokens, parent_chat_id."""
    return hashed(source, wanted, 1, BLOCK)
