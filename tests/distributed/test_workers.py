"""Processes: they talk over loopback alone, fail together, and are gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed

from foretell.errors import InputError
from foretell.learn.distributed import WorkerError, Workers, train
from foretell.learn.distributed.wire import Group, Wire
from foretell.simulate.pipeline import named
from foretell.simulate.training.plan import TrainingPlan
from foretell.workload.llm.config import LLMConfig

GPT = LLMConfig(
    "tiny", layers=2, hidden=8, heads=2, intermediate=16, vocab=8, gated=False, activation="gelu", norm="layer",
    positions="learned", position_rows=4,
)  # fmt: skip


def rings(rank: int, size: int) -> list[tuple[str, bool, int, int]]:
    """Each collective beside gloo's own: whether they agree, bytes sent, and the buffer's."""
    dice = torch.Generator().manual_seed(rank)
    value = torch.randn(size, 3, generator=dice, dtype=torch.float64)
    summed, most = value.clone(), value.clone()
    distributed.all_reduce(summed)
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    gathered = [torch.empty_like(value) for _ in range(4)]
    distributed.all_gather(gathered, value)
    results = []
    for name, wanted in (
        ("all_reduce", summed), ("maximum", most), ("reduce_scatter", summed.tensor_split(4)[rank]),
        ("all_gather", torch.cat(gathered)), ("all_reduce_by_halving", summed),
    ):  # fmt: skip
        wire = Wire(rank)
        group = Group(wire, range(4), "all")
        found = group.all_reduce(value, torch.maximum) if name == "maximum" else getattr(group, name)(value)
        buffer = found if name == "all_gather" else value
        results.append((name, torch.allclose(found, wanted, rtol=0, atol=1e-14), wire.sent["all"], buffer.nbytes))
        whole = found.shape == value.shape
        assert wire.messages["all"] == (4 if name == "all_reduce_by_halving" else 6 if whole else 3)
        if whole:  # every rank has the very same bits
            assert all(torch.equal(found, other) for other in Group(wire, range(4), "all").all_gather(found[None]))
    return results


@pytest.mark.parametrize("size", [4, 5, 8])
def test_rings_agree_with_gloo_and_send_what_rings_send(size: int, workers: Workers) -> None:
    found = workers.run(rings, None, size)
    for rank in found:
        for name, agrees, sent, buffer in rank:
            assert agrees, name
            if size % 4 == 0:
                assert sent == buffer * 3 // 4 * (1 if name in ("reduce_scatter", "all_gather") else 2), name
    # Whatever the sizes of the pieces, all ranks together send the whole buffer n-1 times.
    for index, times in ((0, 2), (1, 2), (2, 1), (4, 2)):
        assert sum(rank[index][2] for rank in found) == times * 3 * found[0][index][3]


def messages_out_of_order(rank: int) -> list[float]:
    """Two messages asked for in the other order."""
    wire = Wire(rank)
    if rank == 0:
        for tag in (7, 8):
            wire.send(torch.tensor([float(tag)]), 1, "test", tag)
        wire.flush()
        return []
    return [wire.receive(torch.zeros(1), 0, tag).item() for tag in (8, 7)]


def test_messages_are_told_apart_by_their_tag(workers: Workers) -> None:
    assert workers.run(messages_out_of_order, 2) == [[], [8.0, 7.0]]


def listening(rank: int) -> list[str]:
    """Hexadecimal local addresses of this process's listening sockets."""
    owned = {str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in _lines(Path("/proc/self/net", name))[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in owned]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="sockets are looked up in Linux's /proc")
def test_nothing_listens_but_on_loopback(workers: Workers) -> None:
    local = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    for addresses in workers.run(listening):
        assert addresses
        assert set(addresses) <= local


def fail_on(rank: int, which: int) -> int:
    if rank == which:
        raise ValueError("as told")
    time.sleep(60)
    return rank


def die(rank: int) -> None:
    os._exit(3)


def identity(rank: int) -> tuple[int, int]:
    return rank, os.getpid()


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(Path("/proc", str(pid)).exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(Path("/proc", str(pid)).exists() for pid in pids)


def test_a_failure_ends_all_at_once_and_the_next_job_starts_anew() -> None:
    with Workers(2, timeout_s=30) as pair:
        first = pair.run(identity)
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"(?s)rank 1 failed:.*ValueError: as told"):
            pair.run(fail_on, None, 1)
        assert time.monotonic() - start < 10
        assert gone([pid for _, pid in first])
        with pytest.raises(WorkerError, match=r"the process of rank \d died"):
            pair.run(die)
        second = pair.run(identity)
        assert [rank for rank, _ in second] == [0, 1]
    assert gone([pid for _, pid in second])


def deadlock(rank: int) -> None:
    """The last rank wants a gradient before it has a loss: its order is turned around."""
    plan = TrainingPlan(global_batch=2, seq_len=4, pp=2)
    order = named("1f1b").order(2, 1, 2)
    wrong = (tuple(reversed(order[0])), order[1])
    train(rank, GPT, plan, order=wrong)


def test_a_deadlock_ends_in_time() -> None:
    with Workers(2, timeout_s=3) as pair:
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"did not finish within 3 s|failed"):
            pair.run(deadlock)
        assert time.monotonic() - start < 15


@pytest.mark.parametrize(("count", "ranks", "message"), [(0, 1, "0 workers"), (65, 1, "65"), (2, 3, "3 ranks wanted")])
def test_counts_are_checked(count: int, ranks: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Workers(count).run(identity, ranks)


@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are looked up in Linux's /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_leaves_no_process(how: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "from foretell.learn.distributed import Workers\n"
        "if __name__ == '__main__':\n"
        "    with Workers(2) as pair:\n"
        "        pair.run(print)\n"
        "        print(*[p.pid for p in pair._processes], flush=True)\n"
        "        time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    pids: list[int] = []
    while not pids:
        words = parent.stdout.readline().split()
        pids = [int(word) for word in words] if len(words) == 2 else []
    parent.send_signal(how)
    assert parent.wait(20) != 0
    parent.stdout.close()
    assert gone(pids)
