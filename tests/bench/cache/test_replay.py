"""Replays through the real scheduler and cache: counts that add up, and what is known to hit hits."""

from __future__ import annotations

import pytest

from k3hal.bench.cache.replay import Replay, ReplayResult, ReplaySettings
from k3hal.bench.cache.trace import Span, Trace, TraceRequest
from k3hal.engine.cache.geometry import CacheGeometry
from k3hal.errors import CapacityError

GEOMETRY = CacheGeometry(page_tokens=128, page_bytes=128, slot_bytes=4 * 128)


def replay(
    trace: Trace, policy: str = "prompt", pages: int = 4096, concurrency: int = 1, host: int = 0, disk: int = 0
) -> ReplayResult:
    settings = ReplaySettings(
        geometry=GEOMETRY, budget=pages * 128, policy=policy, concurrency=concurrency, host=host * 128, disk=disk * 128
    )
    return Replay(trace, settings).run()


def trace_of(*prompts: tuple[Span, ...], after: int | None = None) -> Trace:
    requests = [TraceRequest(float(i), pieces, Span(10**6 + 100 * i, 5)) for i, pieces in enumerate(prompts)]
    return Trace("hand-made", requests)


def test_the_same_prompt_again_hits_all_but_its_end() -> None:
    result = replay(trace_of((Span(0, 1000),), (Span(0, 1000),), (Span(5000, 300),)))
    assert result.stats.cached_tokens == 896
    assert result.stats.prompt_tokens == 2300
    assert result.hit_rate == pytest.approx(896 / 2300)
    assert len(result.admissions) == 3 and len(result.step_times) == result.steps


@pytest.mark.parametrize("policy", ["cost", "second-hit", "prompt", "interval:512", "none"])
@pytest.mark.parametrize("concurrency", [1, 6])
def test_every_prompt_token_hit_or_has_a_reason(small_agents: Trace, policy: str, concurrency: int) -> None:
    result = replay(small_agents, policy, 1200, concurrency)
    stats = result.stats
    assert stats.prompt_tokens == small_agents.prompt_tokens
    assert stats.cached_tokens + sum(stats.labels.values()) == stats.prompt_tokens
    assert stats.requests == len(small_agents)
    assert (result.hit_rate > 0.3) == (policy != "none")
    assert result.saved_flops <= result.prompt_flops
    assert result.answer_hits <= result.answer_tokens


def test_a_replay_is_repeatable(small_agents: Trace) -> None:
    first, again = (replay(small_agents, "second-hit", 600, 4) for _ in range(2))
    assert first.hit_rate == again.hit_rate and first.stats.labels == again.stats.labels
    assert first.simulated == again.simulated and first.steps == again.steps


def test_who_needs_an_answer_waits_for_it() -> None:
    first = TraceRequest(0.0, (Span(0, 300),), Span(5000, 400))
    second = TraceRequest(
        1.0, (Span(0, 300), Span(5000, 400), Span(9000, 50)), Span(7000, 4), after=0, answer=(300, 700)
    )
    result = replay(Trace("chain", [first, second]), "second-hit", concurrency=2)
    assert result.answer_tokens == 400
    assert result.answer_hits == 399, "the state after the last computed token was kept; the last sampled one never ran"


def test_a_trace_that_cannot_run_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"holds \d+ tokens of one request and the trace's longest has 1005"):
        replay(trace_of((Span(0, 1000),)), pages=8)


def test_live_requests_are_charged() -> None:
    """A budget that eight requests fill leaves nothing for later ones."""
    prompts = [(Span(10_000 * (i % 8), 1000),) for i in range(16)]
    alone = replay(trace_of(*prompts), "prompt", pages=8 * 8 + 9 * 4 + 12)
    crowded = replay(trace_of(*prompts), "prompt", pages=8 * 8 + 9 * 4 + 12, concurrency=8)
    assert alone.stats.cached_tokens > crowded.stats.cached_tokens


LONG = [(Span(10_000 * i, 1000),) for i in range(20)]
"""Twenty prompts of 8 pages; a state takes 4."""


def test_what_memory_lost_comes_from_the_tier() -> None:
    twice = trace_of(*LONG, *LONG)
    assert replay(twice, pages=60).stats.cached_tokens == 0
    result = replay(twice, pages=60, host=20 * 12)
    assert result.stats.cached_tokens == 20 * 896
    assert result.tier is not None and result.tier.stats.hits == 20 * 896 and result.tier.stats.loads == 20
    assert result.tier.bytes_in == 20 * 11 * 128 and result.tier.disk_bytes_read == 0


def test_host_memory_keeps_what_was_used_last_and_the_disk_the_rest() -> None:
    twice = trace_of(*LONG, *LONG)
    assert replay(twice, pages=60, host=100).stats.cached_tokens < 20 * 896
    result = replay(twice, pages=60, host=100, disk=20 * 12)
    assert result.tier is not None and result.stats.cached_tokens == 20 * 896
    assert result.tier.stats.backing_bytes <= 20 * 12 and result.tier.disk_bytes_read > 0


@pytest.mark.parametrize("concurrency", [1, 6])
def test_the_tier_adds_hits_and_loses_no_token(small_agents: Trace, concurrency: int) -> None:
    alone = replay(small_agents, "cost", 300, concurrency)
    result = replay(small_agents, "cost", 300, concurrency, host=600, disk=20_000)
    stats = result.stats
    assert stats.prompt_tokens == small_agents.prompt_tokens == stats.cached_tokens + sum(stats.labels.values())
    assert result.hit_rate > alone.hit_rate


@pytest.mark.parametrize(("host", "disk", "flag"), [(3, 0, "--host-gb"), (100, 4, "--disk-gb")])
def test_a_tier_too_small_for_anything_is_refused(host: int, disk: int, flag: str) -> None:
    with pytest.raises(CapacityError, match=f"{flag} .* does not hold one state and one page"):
        replay(trace_of((Span(0, 100),)), host=host, disk=disk)
