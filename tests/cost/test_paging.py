"""Optimizer state in unified memory: counted, but not what decides whether a step fits."""

from __future__ import annotations

import dataclasses

import pytest

import foretell
from foretell.cost.memory import largest_batch, peak_memory
from foretell.graph import Graph
from foretell.hardware import Device, device

SETTINGS = {"train": True, "seq_len": 64, "precision": "bf16"}
GPU = device("rtx-4060-ti-16gb")
FULL = foretell.capture("llm:qwen2.5-0.5b", optimizer="paged-adamw", **SETTINGS)


def with_memory(nbytes: int) -> Device:
    return dataclasses.replace(GPU, memory_bytes=nbytes)


def test_state_that_may_move_out_counts_but_does_not_decide() -> None:
    memory = peak_memory(FULL, GPU)
    assert memory.pageable_bytes == int(FULL.provenance["pageable_bytes"])
    assert memory.fits
    assert memory.paged_out_bytes == 0
    least = memory.peak_bytes - memory.pageable_bytes
    tight = peak_memory(FULL, with_memory(memory.peak_bytes - (1 << 30)))
    assert tight.fits
    assert tight.paged_out_bytes == tight.peak_bytes - tight.capacity_bytes  # type: ignore[operator]
    assert 0 < tight.paged_out_bytes <= 1 << 30
    assert not peak_memory(FULL, with_memory(least - (1 << 30))).fits


def test_other_optimizers_have_nothing_to_move() -> None:
    plain = foretell.capture("llm:qwen2.5-0.5b", optimizer="adamw", **SETTINGS)
    memory = peak_memory(plain, GPU)
    assert (memory.pageable_bytes, memory.paged_out_bytes) == (0, 0)
    assert not peak_memory(plain, with_memory(memory.allocated_bytes)).fits
    assert peak_memory(plain, with_memory(memory.allocated_bytes)).paged_out_bytes == 0


def test_the_note_gives_the_transfer_there_and_back() -> None:
    roomy = foretell.predict(FULL, on=GPU)
    assert any("can move to the host" in note and "must" not in note for note in roomy.notes)
    small = with_memory(roomy.memory.peak_bytes - (2 << 30))
    tight = foretell.predict(FULL, on=small)
    link = small.link("pcie")
    assert link is not None
    assert link.bandwidth_bytes_per_s is not None
    seconds = 2 * tight.memory.paged_out_bytes / link.bandwidth_bytes_per_s
    assert any(f"at least {1e3 * seconds:.0f} ms a step" in note for note in tight.notes), tight.notes
    assert tight.to_dict()["memory"]["pageable_bytes"] == tight.memory.pageable_bytes
    unlinked = foretell.predict(FULL, on=dataclasses.replace(small, links=()))
    assert any("the host link is unknown" in note for note in unlinked.notes)


def test_a_file_cannot_claim_more_than_there_is() -> None:
    state = sum(s.nbytes for s in FULL.storages if s.role == "optimizer")
    for text, expected in (("9" * 19, state), ("-5", 0), ("many", 0), ("9" * 400, 0), ("²", 0)):
        data = FULL.to_dict()
        data["provenance"] = {**data["provenance"], "pageable_bytes": text}
        assert peak_memory(Graph.from_dict(data, "test"), GPU).pageable_bytes == expected


def test_the_largest_batch_may_page() -> None:
    def at(batch: int) -> Graph:
        return foretell.capture("llm:qwen2.5-0.5b", optimizer="paged-adamw", batch=batch, **SETTINGS)

    small = with_memory(5 << 30)
    batch = largest_batch(at, small)
    fits, fails = peak_memory(at(batch), small), peak_memory(at(batch + 1), small)
    assert fits.fits
    assert fits.paged_out_bytes > 1 << 30
    assert not fails.fits


@pytest.mark.parametrize("optimizer", ["adamw", "paged-adamw"])
def test_breakdown_still_sums_to_the_peak(optimizer: str) -> None:
    memory = peak_memory(foretell.capture("llm:qwen2.5-0.5b", optimizer=optimizer, **SETTINGS), GPU)
    assert sum(memory.breakdown.values()) == memory.peak_bytes
