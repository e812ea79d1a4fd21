"""Who was refused: how many for each reason, and the first of them with the limit that it is over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretell.simulate.serving.engine.served import Served
from foretell.simulate.serving.plan import ServingPlan
from foretell.simulate.serving.requests import Requests

__all__ = ["Refusal", "refusals"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """`count` requests that were refused for `reason`.

    The first is number `request`, from 0 in order of arrival, of `row` in its trace (None: from no file), and asks for
    `output_tokens` after `input_tokens`; at most `limit_tokens` are allowed.
    """

    reason: str
    count: int
    request: int
    row: int | None
    input_tokens: int
    output_tokens: int
    limit_tokens: int

    @property
    def text(self) -> str:
        """The reason with its limit, and the first request."""
        first = f"request {self.request:,}" if self.row is None else f"row {self.row:,}"
        lengths = f"{self.input_tokens:,} + {self.output_tokens:,} tokens"
        return f"{self.reason}, of which {self.limit_tokens:,} are allowed, first {first} of {lengths}"


def refusals(
    served: Served, requests: Requests, plan: ServingPlan, among: npt.NDArray[np.bool_] | None = None
) -> list[Refusal]:
    """The refused requests by reason, of all or those `among` (requests,)."""
    kv = min(served.kv_capacity_blocks) * served.block_size
    limits = (0, plan.max_model_len, kv, plan.max_num_batched_tokens)
    found = []
    for code in np.unique(served.refused[served.refused > 0]).tolist():
        mine = served.refused == code
        chosen = np.flatnonzero(mine if among is None else mine & among)
        if len(chosen):
            first = int(chosen[0])
            found.append(Refusal(
                served.reasons[code], len(chosen), first, None if requests.row is None else int(requests.row[first]),
                int(requests.input_tokens[first]), int(requests.output_tokens[first]), limits[code],
            ))  # fmt: skip
    return found
