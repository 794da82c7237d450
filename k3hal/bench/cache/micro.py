"""What bookkeeping itself costs: scheduler steps, hashing, look-ups, pages, and the memory of the index."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

from k3hal.engine.cache.geometry import CacheGeometry
from k3hal.engine.cache.policies import make_policy
from k3hal.engine.cache.prefix import PrefixCache
from k3hal.engine.interface import EngineRequest
from k3hal.engine.request import Request
from k3hal.engine.sampling import GenerationDefaults
from k3hal.engine.scheduler import Scheduler
from k3hal.sampling_params import SamplingParams

RUNNING = 256
PROMPT_TOKENS = 12_000
TURN_TOKENS = 500
PAGES = 100
UNITS = 1_000_000
LIMITS = {"decode_step_256": 0.5e-3, "hash_lookup_12k": 0.3e-3, "pages_100": 10e-6, "index_bytes_per_unit": 200.0}
"""What the project set itself: seconds, and bytes a match unit."""

_VOCAB = 160_000


def measure(geometry: CacheGeometry, policy: str = "cost", units: int = UNITS) -> dict[str, float]:
    """Medians, in seconds, and `index_bytes_per_unit` with `units` match units in the index.

    `decode_step_256`: plan and account one step of 256 sequences that decode. `hash_lookup_12k`: name and look up a
    prompt of 12,000 tokens nobody saw; `lookup_next_turn`: the same when its first 11,500 were named in the turn
    before. `pages_100`: take 100 pages and give them back.
    """
    return {
        "decode_step_256": _decode_step(geometry, policy),
        **_lookups(geometry, policy),
        "pages_100": _pages(geometry, policy),
        "index_bytes_per_unit": _index_bytes(policy, units),
    }


def _cache(geometry: CacheGeometry, policy: str, rows: int, pages: int, longest: int) -> PrefixCache:
    runs = 2 + rows + -(-pages // geometry.pages_per_slot)
    return PrefixCache(geometry, runs, rows, longest, policy=make_policy(policy), seed=b"micro")


def _median(call: Callable[[], Any], repeat: int) -> float:
    """Median seconds of a call, the garbage collector off."""
    gc.collect()
    gc.disable()
    try:
        times = []
        for _ in range(repeat):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    finally:
        gc.enable()
    return statistics.median(times)


def _decode_step(geometry: CacheGeometry, policy: str) -> float:
    """Steps enough that page ends and match units come up as often as in a long run."""
    prompt, steps = 4096, 300
    cache = _cache(geometry, policy, RUNNING, RUNNING * geometry.pages_for(prompt + 512), prompt + 512)
    scheduler = Scheduler(cache, max_num_seqs=RUNNING, max_num_batched_tokens=RUNNING * prompt, max_queue=RUNNING)
    for number in range(RUNNING):
        scheduler.add(_request(number, prompt + number % 128, 512))
    tokens = iter(range(1, 1 << 30))

    def step() -> None:
        scheduled = scheduler.schedule()
        assert scheduled is not None
        for request in scheduler.advance(*scheduled):
            request.append(next(tokens) % _VOCAB)

    while any(not request.num_output for request in [*scheduler.waiting, *scheduler.running]):
        step()
    return _median(step, steps)


def _request(number: int, prompt: int, outputs: int) -> Request:
    ids = np.random.Generator(np.random.PCG64(number)).integers(0, _VOCAB, prompt)
    params = SamplingParams(max_tokens=outputs, ignore_eos=True)
    return Request.create(
        EngineRequest(str(number), ids.tolist(), params),
        number,
        vocab_size=_VOCAB,
        max_model_len=prompt + outputs,
        eos_token_ids=(),
        defaults=GenerationDefaults(),
    )


def _lookups(geometry: CacheGeometry, policy: str) -> dict[str, float]:
    cache = _cache(geometry, policy, 1, 100, PROMPT_TOKENS)
    ids = np.random.Generator(np.random.PCG64(1)).integers(0, _VOCAB, PROMPT_TOKENS)
    first = _median(lambda: cache.lookup(ids, keys=cache.keys()), 200)
    known = [cache.keys() for _ in range(200)]
    for keys in known:
        cache.lookup(ids[:-TURN_TOKENS], keys=keys)
    following = iter(known)
    return {
        "hash_lookup_12k": first,
        "lookup_next_turn": _median(lambda: cache.lookup(ids, keys=next(following)), len(known)),
    }


def _pages(geometry: CacheGeometry, policy: str) -> float:
    pool = _cache(geometry, policy, 1, 40_000, PROMPT_TOKENS).pool

    def take_and_give() -> None:
        pages = pool.alloc_pages(PAGES)
        assert pages is not None
        pool.free_pages(pages)

    return _median(take_and_give, 2000)


def _index_bytes(policy: str, units: int) -> float:
    """Growth of the process for each match unit of prompts of 128k tokens that end and are kept.

    The arena's own bookkeeping, a few bytes a page, counts too: it is made within the measured stretch.
    """
    geometry = CacheGeometry(page_tokens=128, page_bytes=1 << 20, slot_bytes=1 << 20)
    prompt = 1024 * geometry.page_tokens
    process = psutil.Process(os.getpid())
    rng = np.random.Generator(np.random.PCG64(2))
    gc.collect()
    before = process.memory_info().rss
    cache = _cache(geometry, "prompt" if policy == "none" else policy, 1, units + 4096, prompt)
    for _ in range(max(units // 1024, 1)):
        ids = rng.integers(0, _VOCAB, prompt)
        start = cache.admit(0, ids)
        while start is not None and start < prompt:
            start = cache.chunk_end(0, start, prompt)
            cache.reach(0, ids[:start])
        cache.take_copies()
        cache.release(0, ids)
    gc.collect()
    held = max(process.memory_info().rss - before, 0)
    kept = round(cache.cached_usage * (cache.pool.num_pages - cache.pool.run)) - len(cache.index.table)
    return held / max(kept, 1)
