"""Reports of caches that find too little, count wrongly, or let nothing advance."""

from __future__ import annotations

from typing import Any

import numpy as np

from k3hal.engine.cache import geometry, prefix
from k3hal.engine.cache.cost import CostAware
from k3hal.engine.cache.geometry import CacheGeometry
from k3hal.engine.cache.index import PrefixIndex
from k3hal.engine.cache.policies import make_policy
from k3hal.engine.cache.policy import Interval, PromptFacts, Stop
from k3hal.engine.cache.prefix import PrefixCache
from k3hal.engine.cache.stats import Lookup
from k3hal.engine.cache.stops import RowStops
from k3hal.engine.interface import PrefixContext
from k3hal.engine.options import EngineOptions
from k3hal.sampling_params import SamplingParams

from ..harness import Harness
from ..test_prefix_cache import join, make, prefill, serve, tokens
from .bug import Bug, answers, replaced

UNIT = 128


def _only_near_the_end(real: Any, self: CostAware, facts: PromptFacts) -> list[Stop]:
    return [stop for stop in real(self, facts) if stop.position >= facts.last - UNIT]


def check_a_suffix_of_another_length() -> None:
    """Eight prompts share 1500 tokens and end with 700 of their own: from the third on the shared part hits."""
    cache, shared = make(), tokens(1, 1500)
    hits = [serve(cache, join(shared, tokens(10 + i, 700)), tokens(30 + i, 9)) for i in range(8)]
    assert min(hits[2:]) >= 1500 - UNIT, hits


def _large_blocks(real: Any, self: RowStops, row: int, start: int, end: int, wished: Any) -> None:
    real(self, row, start, end, [stop for stop in wished if stop.position % 1536 == 0])


def check_short_shared_prefixes() -> None:
    """1,000 shared tokens, four suffixes: at a message's end the second hits 896, elsewhere the third."""
    for boundaries, first in (((1000,), 1), ((), 2)):
        cache, shared = make(), tokens(2, 1000)
        context = PrefixContext(boundaries=boundaries)
        hits = [serve(cache, join(shared, tokens(40 + i, 700)), tokens(50 + i, 9), context) for i in range(4)]
        assert min(hits[first:]) >= 896, hits


def _oldest_when_taken(real: Any, self: PrefixIndex, *args: Any) -> Any:
    node = real(self, *args)
    if node is not None:
        self.table.used[node.entry] *= -1.0
    return node


def check_a_prompt_that_still_decodes() -> None:
    """A prompt's state stays while its answer is decoded and others come and go, as long as there are colder ones."""
    cache = make("prompt", num_runs=15, rows=2)
    for seed in range(20, 25):
        serve(cache, tokens(seed, 400))
    prompt = tokens(30, 600)
    prefill(cache, 1, prompt)
    for seed in range(40, 43):
        serve(cache, tokens(seed, 400))
    assert cache.lookup(prompt).cached == 512


def _down_to_whole_pages(real: Any, self: RowStops, row: int, start: int, end: int) -> tuple[int, bool]:
    end, cut = real(self, row, start, end)
    return end // 4 * 4, cut


def check_every_chunk_advances() -> None:
    """Whatever the budget and the prompt's length, somebody advances in every step and all end."""
    for budget in (1, 2, 3, 5, 7, 64):
        for length in (1, 3, 4, 5, 13):
            harness = Harness(num_runs=40, max_num_seqs=1, max_num_batched_tokens=budget, policy="interval:4")
            answers(harness, {"a": [i + 2 for i in range(length)]}, SamplingParams(temperature=0.0, max_tokens=3))


def _nothing_at_the_end(real: Any, self: CostAware, num_tokens: int, *, preempted: bool) -> bool:
    return preempted


def check_decoded_tokens_are_reused() -> None:
    """The next turn begins with the prompt and the answer before: both are found."""
    cache, prompt, said = make(), tokens(3, 700), tokens(4, 900)
    serve(cache, prompt, said)
    history = join(prompt, said, tokens(5, 700))
    assert serve(cache, history) >= (prompt.size + said.size - 1) // UNIT * UNIT


def _counted_again(real: Any, self: PrefixCache, found: Lookup, *, resumed: bool) -> None:
    real(self, found, resumed=False)


def check_preemptions_flatter_no_rate() -> None:
    """Ten and more preemptions of prompts that nobody sent before: the rate is 0, what resumed is counted apart."""
    harness = Harness(num_runs=9, max_num_seqs=4, policy="cost")
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompts = {f"r{i}": [i + 2] * (3 + i % 3) for i in range(24)}
    answers(harness, prompts, params)
    stats = harness.cache.stats
    assert harness.scheduler.preemptions >= 10
    assert stats.requests == 24 and stats.prompt_tokens == sum(len(prompt) for prompt in prompts.values())
    assert stats.cached_tokens == 0 and stats.resumed_requests >= 10 and stats.resumed_cached_tokens > 0


def _no_state_is_cold(real: Any, num_tokens: int, cached: int, matched: int, seen: int, unit: int) -> Lookup:
    return real(num_tokens, cached, cached, cached, unit)


def check_lost_to_a_missing_state() -> None:
    """KV that is here without a state is labelled so, token for token."""
    cache, shared = make("prompt"), tokens(6, 1500)
    serve(cache, join(shared, tokens(7, 700)))
    found = cache.lookup(join(shared, tokens(8, 700)))
    assert found.cached == 0
    assert found.labels["no_state"] == 1500 // UNIT * UNIT
    assert found.cached + sum(found.labels.values()) == 2200


def _last_with_the_cap(self: PromptFacts) -> int:
    return self.num_tokens // self.unit * self.unit


def _plant_last_with_the_cap(patch: Any) -> None:
    patch.setattr(PromptFacts, "last", property(_last_with_the_cap))


def check_identical_prompts() -> None:
    """The same prompt three times hits all but its last unit, exact multiples included."""
    for length in (1024, 1025, 1000, 5 * UNIT):
        cache, prompt = make("prompt"), tokens(9, length)
        assert [serve(cache, prompt) for _ in range(3)][1:] == [(length - 1) // UNIT * UNIT] * 2


def _shallow_first(real: Any, self: CostAware, table: Any, entries: np.ndarray, now: float) -> np.ndarray:
    return table.position[entries].astype(np.float64)


def check_a_fork_of_a_long_chain() -> None:
    """Three chains of 32k tokens, their KV and 16 states fit: a fork at 8,192 starts from 4,096 at least."""
    sizes = CacheGeometry(page_tokens=128, page_bytes=1000, slot_bytes=8000)
    cache = PrefixCache(sizes, 3 * 32 + 17, 2, 1 << 17, policy=make_policy("cost"), seed=b"seed")
    chains = [tokens(60 + i, 32_768) for i in range(3)]
    for i, chain in enumerate(chains):
        for end in (8_192, 16_384, 24_576, 32_768):
            serve(cache, chain[:end], tokens(70 + i, 2))
    hit = cache.lookup(join(chains[-1][:8192], tokens(80, 600))).cached
    assert hit >= 4_096, hit


def _rounded_to_equal_groups(real: Any, *args: Any, draft_layers: int = 0, **named: Any) -> CacheGeometry:
    """States in groups of as many layers as there are attention layers, the last one filled up."""
    sizes = real(*args, draft_layers=draft_layers, **named)
    group = 24 + draft_layers
    slot_bytes = sizes.slot_bytes * (-(-69 // group) * group) // 69
    return CacheGeometry(page_tokens=sizes.page_tokens, page_bytes=sizes.page_bytes, slot_bytes=slot_bytes)


def check_draft_layers_cost_their_own_bytes() -> None:
    """Five draft layers beside 24 cost their own KV and at most 2 % more, at every number of ranks."""
    for tp in (1, 8, 16):
        for context in (8_192, 131_072, 1_048_576):
            without, beside = (geometry.k3_geometry(tp, draft_layers=layers) for layers in (0, 5))
            reserved = [one.pages_for(context) * one.page_bytes + one.run_bytes for one in (without, beside)]
            own = context * 5 * 576
            assert reserved[1] - own <= reserved[0] * 1.02, (tp, context)


def _multiples_only(real: Any, self: Interval, count: int) -> None:
    if count % 1536:
        raise ValueError("the retention interval must be a multiple of 1536")
    real(self, count)


def check_any_interval() -> None:
    """Every interval is taken, and states lie as often as it says, up to whole units."""
    for interval in (1, 100, 128, 1000, 1536, 2000, 3_145_729):
        options = EngineOptions.of(prefix_cache_policy="interval", prefix_cache_retention_interval=interval)
        cache, prompt = make(), tokens(11, 3000)
        cache.use(options.policy())
        serve(cache, prompt)
        step = -(-interval // UNIT) * UNIT
        assert cache.lookup(join(prompt[:2500], tokens(12, 9))).cached == 2500 // step * step


BUGS = (
    Bug(1, "the only state lies in what is the request's own", "hit rate",
        replaced(CostAware, "stops", _only_near_the_end), check_a_suffix_of_another_length),
    Bug(2, "prefixes shorter than an inflated block never hit", "hit rate",
        replaced(RowStops, "begin", _large_blocks), check_short_shared_prefixes),
    Bug(16, "the state of a running request is the first to go", "hit rate",
        replaced(PrefixIndex, "snapshot", _oldest_when_taken), check_a_prompt_that_still_decodes),
    Bug(17, "alignment makes chunks empty", "progress",
        replaced(RowStops, "chunk_end", _down_to_whole_pages), check_every_chunk_advances),
    Bug(19, "the answer is computed anew in the next turn", "hit rate",
        replaced(CostAware, "keeps_end", _nothing_at_the_end), check_decoded_tokens_are_reused),
    Bug(20, "preemptions count as hits", "metric",
        replaced(PrefixCache, "_count", _counted_again), check_preemptions_flatter_no_rate),
    Bug(21, "what is found and cannot be used is not counted", "metric",
        replaced(prefix, "label_tokens", _no_state_is_cold), check_lost_to_a_missing_state),
    Bug(24, "the same prompt again misses", "hit rate",
        _plant_last_with_the_cap, check_identical_prompts),
    Bug(25, "states near the root go first", "hit rate",
        replaced(CostAware, "scores", _shallow_first), check_a_fork_of_a_long_chain),
    Bug(29, "a drafter's layers inflate every state", "capacity",
        replaced(geometry, "k3_geometry", _rounded_to_equal_groups), check_draft_layers_cost_their_own_bytes),
    Bug(30, "few retention intervals are taken", "options",
        replaced(Interval, "__init__", _multiples_only), check_any_interval),
)  # fmt: skip
