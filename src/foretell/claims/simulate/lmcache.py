"""LMCache: KV caches kept outside the GPU and loaded again, across queries and engines."""

from __future__ import annotations

from typing import Any

from foretell.claims.claim import Claim, Claimed, Obtained, Source
from foretell.claims.rules import Direction, Gain

SYSTEM = "lmcache"
#: The authors' single-node evaluation: documents of 10,000 tokens, short questions, answers of up to 100 tokens, 500 GB
#: of host memory. How many documents there are is ours: more than the GPU holds, fewer than the host does.
DOCUMENTS, DOCUMENT, QUESTION, ANSWER, HOST_BYTES = 200, 10_000, 50, 100, 500e9
#: What the authors measured from host memory, in chunks (table 5): 400 Gb/s; and the time of a transfer by itself.
HOST_BYTES_PER_S, TRANSFER_S = 50e9, 15e-6
MODELS = (("llama-3.1-8b", 1), ("llama-3.1-70b", 4))


def _source(place: str) -> Source:
    return Source(
        "Liu, Cheng, Yao, An, Chen, Feng, Huang, Shen, Zhang, Du, Jiang: LMCache: An Efficient KV Cache Layer for"
        " Enterprise-Scale LLM Inference",
        2025,
        "arXiv 2510.09665",
        place,
    )


def _iterations(model: str, tp: int, device: str = "h100-sxm") -> Any:
    from foretell.hardware import cluster
    from foretell.simulate.serving import ServingPlan
    from foretell.simulate.serving.iteration import Iterations
    from foretell.workload import llm

    plan = ServingPlan(engine="vllm", version="0.10.2", tp=tp, prefix_cache=True)
    return Iterations.of(llm.config(model), plan, cluster(f"{tp}x {device}"))


def _prompt_s(iterations: Any, tokens: int) -> float:
    """Seconds to compute a prompt alone."""
    import numpy as np

    from foretell.simulate.serving.offload import prefill_of

    return float(prefill_of(iterations)(np.zeros(1), np.array([float(tokens)]))[0])


def _ttft_s(iterations: Any, offloaded: bool, rate: float, questions: int = 300) -> float:
    """Mean seconds to the first token, each document having been asked about once before."""
    import numpy as np

    from foretell.simulate.serving import Requests
    from foretell.simulate.serving.offload import Hierarchy, Tier
    from foretell.simulate.serving.simulator import Tabled, serve

    rng = np.random.default_rng(0)
    apart = 2.0 * _prompt_s(iterations, DOCUMENT + QUESTION)
    arrival = np.concatenate([
        np.arange(DOCUMENTS) * apart, DOCUMENTS * apart + np.cumsum(rng.exponential(1.0 / rate, questions)),
    ])  # fmt: skip
    document = np.concatenate([np.arange(DOCUMENTS), rng.integers(0, DOCUMENTS, questions)])
    requests = Requests.of(arrival, DOCUMENT + QUESTION, ANSWER, document, DOCUMENT)
    tier = None
    if offloaded:
        host = Tier("host", HOST_BYTES / iterations.plan.tp, HOST_BYTES_PER_S, latency_s=TRANSFER_S)
        cache = Hierarchy([host], iterations.kv_bytes_per_token, layers=iterations.config.layers)
        tier = cache.engine_tier(iterations.plan.block_size)
    served = serve(Tabled(iterations), iterations.plan, requests, tier=tier)
    return float((served.first_token_s - served.arrival_s)[DOCUMENTS:].mean())


def _rate_at(iterations: Any, offloaded: bool, limit_s: float, start: float) -> float:
    """Queries/s at which the mean time to the first token is `limit_s`, between rates a fifth apart."""
    import math

    rate, least = start, _ttft_s(iterations, offloaded, start)
    step = 1.2 if least <= limit_s else 1.0 / 1.2
    while True:
        ttft = _ttft_s(iterations, offloaded, rate * step)
        if (ttft > limit_s) == (step > 1.0):
            part = math.log(limit_s / least) / math.log(ttft / least)
            return rate * step ** min(max(part, 0.0), 1.0)
        rate, least = rate * step, ttft


def _throughput() -> Obtained:
    """The larger gain of two models, at the time to the first token that computing a prompt takes twice."""
    details: dict[str, float | str] = {}
    gains = []
    for (model, tp), starts in zip(MODELS, ((2.0, 12.0), (0.8, 4.5)), strict=True):
        iterations = _iterations(model, tp)
        limit = 2.0 * _prompt_s(iterations, DOCUMENT + QUESTION)
        plain, kept = (_rate_at(iterations, bool(off), limit, start) for off, start in enumerate(starts))
        gains.append(kept / plain - 1.0)
        details[f"{model}, {tp} GPU: limit of TTFT s"] = round(limit, 3)
        details[f"{model}, {tp} GPU: queries/s, GPU memory only"] = round(plain, 2)
        details[f"{model}, {tp} GPU: queries/s, host memory too"] = round(kept, 2)
    best = max(gains)
    return Obtained(
        f"{best + 1:.1f} times the queries/s at one time to the first token (the other model {min(gains) + 1:.1f})",
        best,
        details,
    )


def _first_token() -> Obtained:
    """Share of the time to the first token saved at one query a second, where nothing queues."""
    details: dict[str, float | str] = {}
    saved = []
    for model, tp in MODELS:
        iterations = _iterations(model, tp)
        plain, kept = (_ttft_s(iterations, off, 1.0, questions=150) for off in (False, True))
        saved.append(1.0 - kept / plain)
        details[f"{model}, {tp} GPU: TTFT s, GPU memory only"] = round(plain, 4)
        details[f"{model}, {tp} GPU: TTFT s, host memory too"] = round(kept, 4)
    times = [1.0 / (1.0 - share) for share in saved]
    return Obtained(f"{min(times):.1f} to {max(times):.1f} times shorter", max(saved), details)


def _hit_rate(rounds: int, window: int, block: int = 256) -> float:
    """Prefix tokens found of those asked for, conversations of 1 to `rounds` rounds, prompts cut to `window` rounds.

    A round adds a question and an answer of one chunk each. A prompt that lost its beginning starts otherwise than the
    one before, and so is another prefix.
    """
    from foretell.simulate.serving.offload import Hierarchy, Tier

    cache = Hierarchy([Tier("host", 1e15, 1e12)], 1.0, chunk_tokens=block)
    asked = found = now = 0
    for length in range(1, rounds + 1):
        for at in range(1, length + 1):
            lost = max(0, at - window)
            prefix = (length << 32) + lost  # by what it begins with
            tokens = (2 * (at - lost) - 1) * block
            asked += tokens
            now += 1
            found += cache.lookup(prefix, tokens, float(now))[0]
            cache.store(prefix, tokens + block, float(now))
    return found / asked


def _truncation() -> Obtained:
    """Share of the hit rate lost where half of the rounds are beyond the window."""
    rounds = 20
    whole = _hit_rate(rounds, rounds)
    windows = {window: _hit_rate(rounds, window) for window in (5, 8, 10, 12, 15)}
    # The window that the median round of the longest conversation just fills.
    lost = 1.0 - windows[10] / whole
    details: dict[str, float | str] = {"hit rate, nothing cut": round(whole, 3)}
    details |= {f"hit rate, cut to {window} rounds": round(rate, 3) for window, rate in windows.items()}
    return Obtained(f"{whole:.0%} falls to {windows[10]:.0%}", lost, details)


def _remote() -> Obtained:
    """Share of the time to the first token saved by loading a document's cache from another machine at 64 Gb/s."""
    import numpy as np

    from foretell.simulate.serving.offload import Hierarchy, Tier, prefill_of

    iterations = _iterations("llama-3.1-8b", 1)
    remote = Tier("remote", 1e15, 8e9, latency_s=50e-6)
    cache = Hierarchy(
        [remote], iterations.kv_bytes_per_token, layers=iterations.config.layers, prefill_s=prefill_of(iterations),
        partial=False,
    )  # fmt: skip
    cache.store(1, DOCUMENT, 0.0)
    got = cache.admit(1, DOCUMENT, DOCUMENT + QUESTION, 1e6)
    details: dict[str, float | str] = {
        "computed s": round(got.compute_s, 4), "loaded s": round(got.load_s, 4), "ready s": round(got.ready_s, 4),
        "tokens loaded": got.tokens,
    }  # fmt: skip
    newest = _iterations("llama-3.1-8b", 1, "b200")
    lengths = 2.0 ** np.arange(10, 21, 0.25)
    compute = prefill_of(newest)(np.zeros(len(lengths)), lengths)
    for gigabits in (32, 64, 128):
        load = lengths * newest.kv_bytes_per_token / (gigabits * 1e9 / 8)
        wins = lengths[load < compute]
        details[f"B200, {gigabits} Gb/s: loading wins from tokens"] = round(float(wins.min())) if len(wins) else "never"
    return Obtained(
        f"{got.ready_s:.3f} s instead of {got.compute_s:.3f} s", 1.0 - got.ready_s / got.compute_s, details
    )


CLAIMS = (
    Claim(
        id=f"{SYSTEM}/throughput",
        system=SYSTEM,
        title="Caches kept in host memory let an engine answer many times the queries",
        source=_source("abstract"),
        metric="queries/s at equal time to the first token over those with GPU memory's prefix cache alone, less one",
        claimed=Claimed("up to 15x improvement in throughput", 14.0),
        setting=f"Questions about {DOCUMENTS} documents of {DOCUMENT:,} tokens at random, answers of {ANSWER} tokens;"
        " Llama 3.1 8B on one H100 and 70B on four, vLLM's rules, 500 GB of host memory at 400 Gb/s a GPU; the mean"
        " time to the first token is held at twice what computing a prompt takes",
        rule=Gain(),
        how="modelled",
        run=_throughput,
        note="Iterations, scheduling and both caches are simulated; how many documents there are decides how much the"
        " GPU's own cache misses, and is not in the abstract. Section 8 reports 2.3 to 14 times over five models."
        " Loading runs beside other requests' iterations. Caches are copied as they are computed, so host memory holds"
        " what the GPU does as well: with 70B not all documents fit.",
    ),
    Claim(
        id=f"{SYSTEM}/first-token",
        system=SYSTEM,
        title="The first token of a question about a kept document comes sooner",
        source=_source("section 8.2: 1.9 to 8.1 times smaller at low rates"),
        metric="time to the first token saved at one query a second (share)",
        claimed=Claimed("1.9-8.1x smaller TTFT", 1.0 - 1.0 / 8.1),
        setting="As for the throughput, at one query a second",
        rule=Gain(),
        how="modelled",
        run=_first_token,
    ),
    Claim(
        id=f"{SYSTEM}/truncation",
        system=SYSTEM,
        title="Cutting old rounds off the context costs half of the prefix hits",
        source=_source("abstract; section 9: from about 85 % to 45 %"),
        metric="share of the hit rate lost",
        claimed=Claimed("context truncation can greatly reduce prefix cache hit ratio by half", 0.5),
        setting="Conversations of 1 to 20 rounds of 512 tokens, prompts cut to the last 10 rounds, a cache that never"
        " fills up",
        rule=Gain(),
        how="modelled",
        run=_truncation,
        note="The authors' trace is not public. How much is lost depends on how many rounds are beyond the window; the"
        " details have five windows.",
        cheap=True,
    ),
    Claim(
        id=f"{SYSTEM}/remote",
        system=SYSTEM,
        title="Fetching a cache from another machine beats computing the prompt",
        source=_source("abstract"),
        metric="time to the first token saved (share)",
        claimed=Claimed("fetching KV cache from remote storage has unsurprisingly benefits to prefill delay"),
        setting=f"Llama 3.1 8B on one H100, a document of {DOCUMENT:,} tokens, 64 Gb/s to where it is kept",
        rule=Direction(),
        how="modelled",
        run=_remote,
        note="Section 9 reports 22 to 32 % at one deployment. Section 8.7 has loading win on a B200 from 256,000 tokens"
        " on at 32 Gb/s, and at every length at 64 and 128 Gb/s, for a model we do not know; the details have ours.",
    ),
)
