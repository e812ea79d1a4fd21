"""What is said to fit does, with as much room as is said."""

from __future__ import annotations

import re
from typing import Any

import pytest

from foretell.errors import InfeasibleError
from foretell.hardware import device
from foretell.simulate.serving import ServingPlan
from foretell.simulate.serving.iteration import Iterations
from foretell.simulate.serving.room import own_share, what_fits
from foretell.workload import llm

FIELDS = {"--tp": "tp", "--weight-dtype": "weight_dtype", "--max-batched-tokens": "max_num_batched_tokens"}
SMALL = {"engine": "sglang", "weight_dtype": "int4", "max_num_batched_tokens": 2048}


def changed(plan: ServingPlan, said: str) -> ServingPlan:
    """The plan as the options in `said` change it."""
    changes: dict[str, Any] = {}
    for option, value in re.findall(r"(--[\w-]+) (\S+)", said):
        if option == "--gpu-memory-utilization":
            changes["gpu_memory_percent"] = 100.0 * float(value)
        else:
            changes[FIELDS[option]] = int(value) if value.isdecimal() else value
    return plan.replace(**changes)


@pytest.mark.parametrize(
    ("model", "name", "plan", "given", "first"),
    [
        ("llama-3.1-70b", "h100-sxm", {}, True, "--weight-dtype"),
        ("llama-3.1-8b", "rtx-4060", SMALL, False, "--tp 2"),
        ("mixtral-8x22b", "h100-sxm", {"engine": "sglang"}, False, "--tp 8"),
        ("llama-3.1-8b", "h100-sxm", {"gpu_memory_percent": 1.0}, True, "--gpu-memory-utilization 0.9"),
        ("llama-3.1-8b", "l4", {"max_num_batched_tokens": 1_000_000}, True, "--max-batched-tokens 8192"),
    ],
)
def test_what_is_said_to_fit_does(model: str, name: str, plan: dict[str, Any], given: bool, first: str) -> None:
    config, where = llm.config(model), device(name)
    asked = ServingPlan(**plan)
    asked = asked if given else own_share(config, asked, where)
    with pytest.raises(InfeasibleError):
        _ = Iterations.of(config, asked, where).kv_capacity_tokens
    found = what_fits(config, asked, where, given_share=given)
    assert found[0].startswith(first)
    for said in found:
        plan_of = changed(asked, said)
        plan_of = plan_of if given else own_share(config, plan_of, where)
        assert f"{Iterations.of(config, plan_of, where).kv_capacity_tokens:,} tokens" in said
