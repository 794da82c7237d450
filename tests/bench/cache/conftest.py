"""Traces small enough to be replayed in a blink."""

from __future__ import annotations

import pytest

from k3hal.bench.cache.agentic import AgenticShape, agentic_trace
from k3hal.bench.cache.trace import Trace


@pytest.fixture(scope="session")
def small_agents() -> Trace:
    """Three sessions of twelve turns with every habit that long ones have."""
    shape = AgenticShape(
        sessions=3,
        turns=12,
        system=(600, 1200),
        message=(30, 600),
        answer=(10, 80),
        task=(20, 80),
        report=(10, 40),
        restart=0.06,
        edit=0.12,
        fan_out=0.3,
    )
    return agentic_trace(5, shape)
