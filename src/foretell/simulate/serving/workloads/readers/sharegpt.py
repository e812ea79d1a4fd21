"""Conversations as ShareGPT has them: texts without times, whose tokens are estimated.

vLLM's and SGLang's benchmarks take the ``value`` of the first two of a row's ``conversations`` (SGLang also
``conversation``), whoever they are from; here a system's is passed over. They leave out rows shorter than 4 or longer
than 1,024 tokens (2,048 with the answer), which is not done here.
"""

from __future__ import annotations

from typing import Any

from foretell.simulate.serving.workloads.family import Rows, Trace, Wanted, reader
from foretell.simulate.serving.workloads.source import Source

#: Characters of English text that a token has on average: help.openai.com, "What are tokens and how to count them?".
CHARACTERS = 4.0
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("prompt", "output"), ("instruction", "output"))
_TURNS = ("conversations", "conversation", "messages")


@reader(
    "sharegpt",
    looks=lambda head: any(head.has(key) for key in _TURNS) or any(head.has(*pair) for pair in _PAIRS),
    source="ShareGPT_V3 as vLLM reads it (vllm/benchmarks/datasets/sharegpt.py): the first two turns",
    order=1,
)
def sharegpt(source: Source, wanted: Wanted) -> Trace:
    """JSON (a list, or Lines) of conversations: the first two turns are a request, a token is four characters."""
    rows = Rows(wanted, timed=False)
    for row, value in source.objects():
        if rows.enough():
            break
        turns = _texts(value)
        if turns is None:
            rows.skip(row, "no JSON" if value is None else "fewer than two turns of text")
            continue
        asked, answered = (len(text) / CHARACTERS for text in turns)
        rows.add(row, 0.0, _up(asked), _up(answered))
    return rows.trace(source, lengths=f"estimated: a token is {CHARACTERS:g} characters")


def _up(tokens: float) -> float:
    """A text of any length is at least a token."""
    return max(1.0, round(tokens)) if tokens else 0.0


def _texts(value: Any) -> tuple[str, str] | None:
    """What was asked and answered first."""
    if not isinstance(value, dict):
        return None
    for pair in _PAIRS:
        if all(isinstance(value.get(key), str) for key in pair):
            return value[pair[0]], value[pair[1]]
    turns: list[Any] = next((value[key] for key in _TURNS if isinstance(value.get(key), list)), [])
    texts = []
    for turn in turns:
        if isinstance(turn, dict) and turn.get("from", turn.get("role")) != "system":
            text = turn.get("value", turn.get("content"))
            if not isinstance(text, str):
                return None
            texts.append(text)
        if len(texts) == 2:
            return texts[0], texts[1]
    return None
