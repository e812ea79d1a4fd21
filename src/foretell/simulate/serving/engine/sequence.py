"""`Seq`: a request while it is served."""

from __future__ import annotations

__all__ = ["Seq"]


class Seq:
    """A request's progress on a rank.

    `prompt` tokens have to be in the cache before its next token can be sampled: the request's own, and after a
    preemption those generated too. `computed` of them are (while it is not decoding). `made` tokens were generated
    before it last joined the decoding ones, at the rank's decode step `joined`; it is done at step `due`.
    """

    __slots__ = (
        "computed", "due", "id", "inputs", "joined", "keys", "loaded", "loading", "made", "marked", "outputs",
        "preempted", "prefix", "prefix_tokens", "prompt", "ready", "seen_s", "started", "swapped", "token_s",
    )  # fmt: skip

    def __init__(self, id: int, inputs: int, outputs: int, prefix: int, prefix_tokens: int) -> None:
        self.id = id
        self.inputs = inputs
        self.outputs = outputs
        self.prefix = prefix
        self.prefix_tokens = prefix_tokens
        self.prompt = inputs
        self.computed = 0
        self.made = 0
        self.joined = -1
        self.due = -1
        #: Keys of the prefix cache that it holds, and up to which block its keys are known.
        self.keys: set[tuple[int, ...]] = set()
        self.marked = 0
        self.started = False
        self.preempted = False
        #: Its cache exists already, elsewhere: it decodes as soon as blocks are found for it.
        self.ready = False
        #: Blocks it holds in host memory.
        self.swapped = 0
        #: Its cache is on its way from a tier; then, tokens of its prompt that came and are here.
        self.loading = False
        self.loaded = 0
        self.seen_s = 0.0
        #: When its prompt ended last; of a preempted one, when it got its last token.
        self.token_s = 0.0
