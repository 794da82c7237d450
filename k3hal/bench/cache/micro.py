"""How long the cache's own work takes, and how much memory its index needs."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from k3hal.engine.cache.geometry import k3_geometry
from k3hal.engine.cache.policies import make_policy
from k3hal.engine.cache.pool import PagePool
from k3hal.engine.cache.prefix import PrefixCache
from k3hal.engine.interface import EngineRequest
from k3hal.engine.request import Request
from k3hal.engine.sampling import GenerationDefaults
from k3hal.engine.scheduler import Scheduler
from k3hal.sampling_params import SamplingParams

_PROMPT = 12_000


def measure(repeats: int = 200, units: int = 100_000) -> dict[str, float]:
    """Medians: `hash_lookup_12k_us` a prompt of 12,000 tokens found in the cache, `next_turn_us` the same with 1,000
    new tokens when the first are hashed already, `pages_100_us` 100 pages taken and given back, `step_256_us` all that
    scheduler and cache do in a step in which 256 sequences decode; and `index_bytes_per_unit` with `units` units known.
    """
    cache = _filled(200)
    prompt = _prompt(0)
    longer = np.concatenate((prompt, _prompt(1)[:1000]))

    def next_turn() -> Callable[[], object]:
        keys = cache.keys()
        keys.chain(prompt)
        return lambda: cache.lookup(longer, keys=keys)

    pool = PagePool(4000, 32)
    held = [pool.alloc_pages(77 * i % 50 + 1) for i in range(400)]
    for pages in held[::2]:
        assert pages is not None
        pool.free_pages(pages)
    return {
        "hash_lookup_12k_us": _median(lambda: lambda: cache.lookup(prompt), repeats),
        "next_turn_us": _median(next_turn, repeats),
        "pages_100_us": _median(lambda: lambda: _take_and_give(pool), repeats),
        "step_256_us": _step(256, repeats),
        "index_bytes_per_unit": _index_bytes(units),
    }


def _median(prepare: Callable[[], Callable[[], object]], repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats):
        run = prepare()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def _take_and_give(pool: PagePool) -> None:
    pages = pool.alloc_pages(100)
    assert pages is not None
    pool.free_pages(pages)


def _step(num_seqs: int, repeats: int) -> float:
    """Scheduling, advancing and appending, in steps in which every sequence decodes."""
    geometry = k3_geometry()
    cache = PrefixCache(geometry, num_seqs * 8, num_seqs, 1 << 14, policy=make_policy("cost"), seed=b"measure")
    scheduler = Scheduler(cache, max_num_seqs=num_seqs, max_num_batched_tokens=1 << 16, max_queue=0)
    params = SamplingParams(temperature=0.0, max_tokens=8000, ignore_eos=True)
    for i in range(num_seqs):
        asked = EngineRequest(str(i), _prompt(i)[: 100 + i].tolist(), params)
        limits = {
            "vocab_size": 150_000,
            "max_model_len": 1 << 14,
            "eos_token_ids": (),
            "defaults": GenerationDefaults(),
        }
        scheduler.add(Request.create(asked, i, **limits))

    def step() -> None:
        scheduled = scheduler.schedule()
        assert scheduled is not None
        for request in scheduler.advance(*scheduled):
            request.append(7)

    for _ in range(5):
        step()
    return _median(lambda: step, repeats)


def _prompt(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 150_000, _PROMPT)


def _filled(prompts: int) -> PrefixCache:
    """A cache that knows that many prompts."""
    geometry = k3_geometry()
    num_runs = prompts * (geometry.pages_for(_PROMPT) // geometry.pages_per_slot + 3) + 8
    cache = PrefixCache(geometry, num_runs, 1, 1 << 17, policy=make_policy("prompt"), seed=b"measure")
    for seed in range(prompts):
        prompt = _prompt(seed)
        cache.admit(0, prompt)
        stop = cache.chunk_end(0, 0, prompt.size)
        cache.reach(0, prompt[:stop])
        cache.release(0, prompt)
        cache.take_copies()
    return cache


def _index_bytes(units: int) -> float:
    """Memory of tree, table and owners. What a page or a slot costs the pool exists with or without an index."""
    tracemalloc.start()
    cache = _filled(units // (_PROMPT // 128))
    total = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return total / cache.index.num_units
