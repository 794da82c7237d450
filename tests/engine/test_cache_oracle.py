"""With the prefix cache on, every output is that of the sequence alone, whatever is found, evicted, aborted or lost."""

from __future__ import annotations

import pytest

from .cache_script import play_many


def test_ten_thousand_steps_change_no_output() -> None:
    runs = play_many(range(10_000), steps=10_000)
    stats = [run.harness.cache.stats for run in runs]
    assert sum(run.harness.steps for run in runs) >= 10_000
    assert sum(s.cached_tokens for s in stats) > 10_000
    assert sum(s.snapshots_evicted for s in stats) > 300
    assert sum(s.resumed_cached_tokens for s in stats) > 100
    assert sum(run.harness.scheduler.preemptions for run in runs) > 20


@pytest.mark.nightly
@pytest.mark.timeout(20_000)
def test_a_million_steps_change_no_output() -> None:
    assert sum(run.harness.steps for run in play_many(range(10_000, 10**7), steps=10**6)) >= 10**6
