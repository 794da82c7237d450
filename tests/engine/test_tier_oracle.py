"""With an external tier in which everything goes wrong, every output is that of the sequence alone."""

from __future__ import annotations

import pytest

from k3hal.engine.tier.interface import FAILURES

from .tier_script import play_many_tiers

SEEDS = 300


def test_ten_thousand_steps_change_no_output() -> None:
    totals = play_many_tiers(range(10_000), steps=10_000)
    assert totals["steps"] >= 10_000
    assert totals["hits"] > 1_000
    assert totals["restarts"] > 100
    for name in ("loads", "written", "write_errors", "stale", "evicted", "stores_dropped", *FAILURES):
        assert totals[name] > 0, name


@pytest.mark.nightly
@pytest.mark.timeout(20_000)
def test_a_million_steps_change_no_output() -> None:
    assert play_many_tiers(range(10_000, 10**7), steps=10**6)["steps"] >= 10**6
