"""`Rank`: one scheduler's sequences and KV blocks, and what schedulers may do with them.

All decoding sequences get a token in the same iterations, so only sums over them are kept: how many there are, the
tokens they cache, and how many need a new block at which step. That makes a run of iterations in which nobody comes,
ends or lacks a block as cheap as one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from foretell.simulate.serving.engine.blocks import Blocks
from foretell.simulate.serving.engine.family import Registry
from foretell.simulate.serving.engine.sequence import Seq

if TYPE_CHECKING:
    from foretell.simulate.serving.engine.link import Link
    from foretell.simulate.serving.plan import ServingPlan

__all__ = ["FOREVER", "SCHEDULERS", "Rank", "Row", "Scheduler"]

#: More steps than any run has.
FOREVER = 1 << 40
#: Decoding sequences, tokens they cache, prompts, their new tokens, pairs, cached tokens, sampled: as in `Batch`.
Row = tuple[int, int, int, int, float, int, int]


class Rank:
    """One scheduler. A scheduling policy reads the public fields and forms an iteration by the methods below."""

    def __init__(
        self,
        plan: ServingPlan,
        blocks: Blocks,
        schedule: Scheduler,
        *,
        number: int = 0,
        waits: bool = False,
        swap: tuple[Link, float, int] | None = None,
        preempted: Callable[[Seq], None],
        scheduled: Callable[[Seq, int], None],
        loading: Callable[[Rank, Seq, float], None],
    ) -> None:
        self.plan = plan
        self.blocks = blocks
        self.size = blocks.size
        self.number = number
        #: Ranks that take from the same blocks, this included: batches on their way through one pipeline.
        self.peers = [self]
        self._schedule = schedule
        #: An iteration waits for what it loads from a tier; else the sequence does, and others go on.
        self._waits = waits
        #: Link to host memory, bytes of a block, and blocks that fit there.
        self._swap = swap
        self._host_free = swap[2] if swap else 0
        self._preempted = preempted
        self._scheduled = scheduled
        self._loading = loading
        #: Came, but not seen by the scheduler yet.
        self.inbox: deque[Seq] = deque()
        self.waiting: deque[Seq] = deque()
        #: By id: those whose cache is on its way from a tier, or has come and which wait to be admitted.
        self.aside: dict[int, Seq] = {}
        #: By id, in order of admission; the one whose prompt is not through is `partial`.
        self.running: dict[int, Seq] = {}
        self.partial: Seq | None = None
        #: Of the decoding sequences: how many, tokens they cache, sum of the steps at which they are done.
        self.rows = 0
        self.cached = 0
        self.due_sum = 0
        #: Iterations so far in which decoding sequences got a token.
        self.step = 0
        self._phase = [0] * self.size
        #: Step at which a sequence is done, its id, the step at which it joined (it may have left since), itself.
        self._dues: list[tuple[int, int, int, Seq]] = []
        #: Static batching: tokens every row is padded to, rows stay until the last is done; blocks of all rows.
        self.padded = 0
        self._reserved = 0
        #: The iteration being formed: whether the decoding sequences take part, chunks of prompts with their tokens,
        #: seconds it is held up by (swapping, loading).
        self.decode = False
        self.chunks: list[tuple[Seq, int]] = []
        self.stall_s = 0.0
        #: Sequences that decode in it for the first time since their cache came back (was swapped in, or sent here).
        self.back: list[Seq] = []
        #: By id: those that have not decoded yet since their prompt ended.
        self._fresh: dict[int, Seq] = {}
        self.now_s = 0.0
        self._token_s = 0.0
        self._sums: list[float] = [0, 0, 0.0, 0, 0]
        #: Steps for which what was decided holds if nobody comes; `deaf`: also if somebody does.
        self.hold = FOREVER
        self.deaf = False
        #: Its sequences are decoded elsewhere (disaggregated).
        self.hands_over = False
        #: Blocks of sequences that are on their way there.
        self.leaving = 0
        #: State of the policy.
        self.memory: dict[str, float] = {}

    # Reading -------------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Sequences that are here, in whatever state."""
        on_their_way = sum(seq.loading for seq in self.aside.values()) if self.aside else 0
        return len(self.inbox) + len(self.waiting) + len(self.running) + on_their_way

    def made(self, seq: Seq) -> int:
        """Tokens generated for a sequence."""
        return seq.made + self.step - seq.joined if seq.joined >= 0 else seq.made

    def tokens(self, seq: Seq) -> int:
        """Tokens a sequence caches."""
        return seq.prompt + self.step - seq.joined if seq.joined >= 0 else seq.computed

    def left(self, seq: Seq) -> int:
        """Tokens a waiting sequence will still get here."""
        return 1 if self.hands_over else seq.outputs - seq.made

    def growth(self, steps: int = 1) -> int:
        """New blocks that the decoding sequences need in the next `steps` steps."""
        if self.padded or not self.rows:
            return 0
        phase, size, step = self._phase, self.size, self.step
        if steps == 1:
            return phase[step % size]
        laps, rest = divmod(steps, size)
        return laps * self.rows + sum(phase[(step + i) % size] for i in range(rest))

    def _most_steps(self, most: int) -> int:
        """Steps, `most` at most, for which the free blocks suffice."""
        free = self.blocks.free
        if self.padded or -(-most // self.size) * self.rows <= free:
            return most
        laps = free // self.rows
        steps, left = laps * self.size, free - laps * self.rows
        while steps < most:
            left -= self._phase[(self.step + steps) % self.size]
            if left < 0:
                break
            steps += 1
        return min(steps, most)

    @property
    def shares(self) -> bool:
        """Whether others hold blocks, so that there may be none for the last sequence that runs here."""
        others = (peer for peer in self.peers if peer is not self)
        return bool(self.aside) or any(peer.running or peer.aside or peer.leaving for peer in others)

    def known(self, seq: Seq) -> int:
        """Tokens of a waiting sequence's prompt that need not be computed: cached here, in a tier, or loaded for it."""
        if seq.loaded:
            return seq.loaded
        here, _, more = self.blocks.found(seq)
        return (here + more) * self.size

    # What policies do ----------------------------------------------------------------------------------------------

    def admit(self, seq: Seq, budget: int, *, whole: bool, reserve: bool = False, multiple: int = 1) -> int:
        """Move the first waiting sequence to the running ones, with up to `budget` tokens of its prompt.

        Returns the tokens, 0 where it cannot be: `whole` prompts do not fit the budget (one that its answer made longer
        than any is cut all the same), or blocks lack: those of the chunk, with `reserve` those of the whole prompt. A
        chunk that does not end the prompt is a multiple of `multiple`. A sequence that has its cache already (swapped
        or sent) takes one token and decodes.

        Where a tier has some of its prompt the sequence leaves the line, with blocks for all of its prompt, and is
        first in line again once that is loaded: 0 is returned, it is `loading`, and the next in line may be tried.
        Where iterations wait for what they load, it is admitted at once.
        """
        blocks, size = self.blocks, self.size
        if seq.ready:
            need = seq.prompt // size + 1
            if need > blocks.free:
                return 0
            blocks.take(need)
            self.decode = True
            self._enter(seq)
            if seq.swapped and self._swap:
                self.stall_s += self._swap[0].seconds(seq.swapped * self._swap[1])
                self._host_free += seq.swapped
                seq.swapped = 0
            seq.ready = False
            self._join(seq)
            self.back.append(seq)
            return 1
        here, idle, more = (0, 0, 0) if seq.loaded else blocks.found(seq)
        if more and not self._waits:
            self._load(seq, here, idle, more)
            return 0
        known = seq.loaded or (here + more) * size
        new = seq.prompt - known
        chunk = min(new, budget)
        if chunk < new:
            # An answer may have made a preempted prompt longer than any iteration. (vLLM rules that out: without chunks
            # it wants max_num_batched_tokens for all of max_model_len.)
            if whole and not (seq.made and new > self.plan.max_num_batched_tokens):
                return 0
            chunk = chunk // multiple * multiple
            if not chunk:
                return 0
        if seq.loaded:  # what was kept for the rest of its prompt is taken as it is computed
            blocks.untake(-(-seq.prompt // size) - known // size)
            del self.aside[seq.id]
            seq.loaded = 0
        else:
            need = -(-(seq.prompt if reserve else known + chunk) // size) - here
            if need + idle > blocks.free:
                return 0
            if here:
                blocks.hold(seq, here)
            if more:
                blocks.take(more)
                self.stall_s += self._load_s(seq, here, more)
        seq.computed = known
        self._enter(seq)
        self.prefill(seq, chunk)
        return chunk

    def _load(self, seq: Seq, here: int, idle: int, more: int) -> None:
        """Begin to load `more` blocks of the first waiting sequence's prompt, if there is room for all of it."""
        blocks = self.blocks
        need = -(-seq.prompt // self.size) - here
        if need + idle > blocks.free:
            return
        if here:
            blocks.hold(seq, here)
        blocks.take(need)
        self.waiting.popleft()
        self.aside[seq.id] = seq
        seq.loading, seq.loaded = True, (here + more) * self.size
        self._loading(self, seq, self.now_s + self._load_s(seq, here, more))

    def _load_s(self, seq: Seq, here: int, more: int) -> float:
        blocks = self.blocks
        assert blocks.tier is not None
        return blocks.tier.load_s(blocks.places(seq, here, more), self.now_s + self.stall_s, self.number)

    def _enter(self, seq: Seq) -> None:
        self.waiting.popleft()
        self.running[seq.id] = seq
        if not seq.started:
            seq.started = True
            self._scheduled(seq, seq.computed)

    def prefill(self, seq: Seq, chunk: int) -> None:
        """Run the next `chunk` tokens of a running sequence's prompt in this iteration, and take their blocks."""
        behind, size = seq.computed, self.size
        end = behind + chunk
        self.blocks.take(-(-end // size) - -(-behind // size))
        self.blocks.mark(seq, end)
        self._count(chunk, behind, end == seq.prompt)
        seq.computed = end
        self.partial = seq if end < seq.prompt else None
        self.chunks.append((seq, chunk))

    def _count(self, chunk: int, behind: int, ends: bool) -> None:
        sums = self._sums
        sums[0] += 1
        sums[1] += chunk
        sums[2] += chunk * behind + chunk * (chunk + 1) / 2.0
        sums[3] += behind
        sums[4] += ends

    def chunk_blocks(self, seq: Seq, chunk: int) -> int:
        """Blocks that the next `chunk` tokens of a running sequence's prompt need."""
        return -(-(seq.computed + chunk) // self.size) - -(-seq.computed // self.size)

    def preempt(self, seq: Seq, *, last: bool = False) -> None:
        """Take a running sequence's blocks away; it waits again, first in line or `last`.

        It will be computed anew or, where the plan swaps and host memory has room, be brought back.
        """
        tokens = self.tokens(seq)
        del self.running[seq.id]
        swapped = 0
        if seq.joined >= 0:
            swapped = -(-tokens // self.size)
            self._fresh.pop(seq.id, None)
            if seq in self.back:
                self.back.remove(seq)
            elif self.step > seq.joined:
                seq.token_s = self._token_s
            seq.made = self.made(seq)
            self._leave(seq)
        self.blocks.release(seq, tokens, again=True)
        if self.partial is seq:
            self.partial = None
        if swapped and self._swap and swapped <= self._host_free:
            self._host_free -= swapped
            self.stall_s += self._swap[0].seconds(swapped * self._swap[1])
            seq.swapped, seq.ready, seq.prompt = swapped, True, tokens
        else:
            seq.prompt = seq.inputs + seq.made
        seq.computed = 0
        seq.preempted = True
        if last:
            self.waiting.append(seq)
        else:
            self._first_in_line(seq)
        self._preempted(seq)

    def _first_in_line(self, *seqs: Seq) -> None:
        """Put them before all that wait, but for those whose cache was loaded: these hold blocks, and can come in."""
        at = 0
        while at < len(self.waiting) and self.waiting[at].loaded:
            at += 1
        for seq in reversed(seqs):
            self.waiting.insert(at, seq)

    def pad(self, count: int, tokens: int, total: int) -> None:
        """Static batching: run the first `count` waiting prompts, padded to `tokens`, with blocks for `total` each."""
        self.padded = tokens
        self._reserved = count * -(-total // self.size)
        self.blocks.take(self._reserved)
        for _ in range(count):
            seq = self.waiting[0]
            self._enter(seq)
            self._count(tokens, 0, True)
            seq.computed = seq.prompt
            self.chunks.append((seq, tokens))

    # Iterations ----------------------------------------------------------------------------------------------------

    def form(self, limit_s: float, now_s: float) -> bool:
        """Form the iteration that begins now from what came by `limit_s`; whether there is anything to do."""
        self.now_s = now_s
        loaded: list[Seq] = []
        while self.inbox and self.inbox[0].seen_s <= limit_s:
            seq = self.inbox.popleft()
            (loaded if seq.loaded else self.waiting).append(seq)
        self._first_in_line(*loaded)
        self.decode, self.chunks, self.stall_s, self.back = False, [], 0.0, []
        self._sums = [0, 0, 0.0, 0, 0]
        self.hold, self.deaf = FOREVER, False
        self._schedule(self)
        return self.decode or bool(self.chunks)

    def decode_all(self) -> None:
        """Let the decoding sequences take part in this iteration, with the blocks they need."""
        if self.rows:
            self.decode = True
            self.blocks.take(self.growth())

    def row(self) -> Row:
        """The iteration that was formed."""
        seqs, tokens, pairs, behind, ended = self._sums
        rows = self.rows if self.decode else 0
        cached = self.cached if self.decode else 0
        return rows, cached, int(seqs), int(tokens), pairs, int(behind), int(rows + ended)

    def steps(self, most: int) -> int:
        """How many iterations like this one can follow each other, this included."""
        if self.chunks or self.stall_s:
            return 1
        most = min(most, self.hold)
        if len(self.peers) > 1:  # blocks are taken ahead, and a peer may free those that somebody waits for
            most = 1 if self.waiting else min(most, self.size)
        while self._dues and self._dues[0][3].joined != self._dues[0][2]:
            heappop(self._dues)  # preempted since
        if self._dues:
            most = min(most, self._dues[0][0] - self.step)
        if most > 1:  # the first one's blocks are taken already
            self.step += 1
            most = 1 + self._most_steps(most - 1)
            self.step -= 1
        return most

    def grow(self, steps: int) -> None:
        """Take the blocks for the iterations of a run of `steps` that follow the first."""
        self.step += 1
        self.blocks.take(self.growth(steps - 1))
        self.step -= 1

    def shrink(self, planned: int, steps: int) -> None:
        """Give back what was taken for a run of `planned` steps and is not needed for `steps`."""
        self.step += steps
        self.blocks.untake(self.growth(planned - steps))
        self.step -= steps

    def late(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """Of sequences that decode for the first time here, in an iteration from `start_s` to `end_s`: when they got
        the token before, and that one; without those whose prompt ended as it began."""
        late = [seq.token_s for seq in self._fresh.values() if seq.token_s < start_s] if self.decode else []
        return [(since_s, end_s) for since_s in (*late, *(seq.token_s for seq in self.back))]

    def advance(self, steps: int, end_s: float) -> tuple[list[Seq], list[Seq], list[tuple[float, float]]]:
        """End `steps` iterations like the one formed, at `end_s`.

        Returns the sequences with their first token, those done, which have left, and from when until when preempted
        ones that were computed anew got no token.
        """
        first: list[Seq] = []
        done: list[Seq] = []
        breaks: list[tuple[float, float]] = []
        if self.decode:
            self._token_s = end_s
            self._fresh.clear()
            self.step += steps
            self.cached += steps * self.rows
            while self._dues and self._dues[0][0] <= self.step:
                _, _, joined, seq = heappop(self._dues)
                if seq.joined == joined and not (done and done[-1] is seq):  # preempted and back in one step
                    done.append(seq)
        for seq, _ in self.chunks:
            if seq.computed == seq.prompt:
                seq.made += 1
                if seq.made == 1:
                    first.append(seq)
                else:
                    breaks.append((seq.token_s, end_s))
                seq.token_s = end_s
                if seq.made == seq.outputs:
                    done.append(seq)
                    if self.padded:  # its row stays
                        self.rows += 1
                        self.cached += self.padded
                else:
                    self._join(seq)
                    self._fresh[seq.id] = seq
        for seq in done:
            del self.running[seq.id]
            if self.padded:
                continue
            tokens = self.tokens(seq)
            if seq.joined >= 0:
                seq.made = self.made(seq)
                self._leave(seq)
            self.blocks.release(seq, tokens)
        if self.padded:
            for seq in done:
                seq.made = self.made(seq)
            if not self.running:
                self.blocks.give(self._reserved)
                self.rows = self.cached = self.padded = self._reserved = self.due_sum = 0
        return first, done, breaks

    def hand_over(self, seq: Seq) -> None:
        """Take a sequence out that ended its prompt, to decode elsewhere; its blocks stay until it is there."""
        del self.running[seq.id]
        self._fresh.pop(seq.id, None)
        self._leave(seq)
        self.leaving += -(-seq.prompt // self.size)

    def handed_over(self, seq: Seq) -> None:
        """Free the blocks of a sequence that is where it is decoded."""
        self.leaving -= -(-seq.prompt // self.size)
        self.blocks.release(seq, seq.prompt)

    def _join(self, seq: Seq) -> None:
        """Count a sequence whose prompt is cached among the decoding ones."""
        seq.joined = self.step
        seq.due = self.step + seq.outputs - seq.made
        heappush(self._dues, (seq.due, seq.id, seq.joined, seq))
        self.rows += 1
        self.due_sum += seq.due
        self.cached += self.padded or seq.prompt
        self._phase[(self.step - seq.prompt) % self.size] += 1

    def _leave(self, seq: Seq) -> None:
        self.rows -= 1
        self.due_sum -= seq.due
        self.cached -= self.tokens(seq)
        self._phase[(seq.joined - seq.prompt) % self.size] -= 1
        seq.joined = seq.due = -1


Scheduler = Callable[[Rank], None]
#: Schedulers decide what each iteration of a rank works on: ``schedule(rank)`` calls `Rank.decode_all`, `Rank.admit`, …
SCHEDULERS: Registry[Scheduler] = Registry("scheduler", "foretell.simulate.serving.engine.scheduling")


def remaining(rank: Rank) -> int:
    """Tokens that the decoding sequences will still get."""
    return rank.due_sum - rank.rows * rank.step
