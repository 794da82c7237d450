"""Reports of external stores: the state of another moment, a broken object, a token handed over twice."""

from __future__ import annotations

from typing import Any

import numpy as np

from k3hal.engine.cache.index import PrefixIndex
from k3hal.engine.cache.policy import Kind
from k3hal.engine.tier.host import HostTier
from k3hal.engine.tier.interface import Transfers
from k3hal.engine.tier.session import TierSession
from k3hal.sampling_params import SamplingParams

from ..harness import Harness
from .bug import LONG, Bug, answers, cached, replaced

PROMPT = [i % 20 + 2 for i in range(17)]
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def _a_step_later(real: Any, self: TierSession) -> Transfers:
    now = real(self)
    before, self.__dict__["late"] = self.__dict__.get("late", ()), now.stores
    return Transfers(before, now.loads)


def check_a_producer_that_decodes_on() -> None:
    """States are stored on the way while their sequence goes on: who loads one gets the state of its boundary."""
    harness = Harness(num_runs=60, policy="interval:4", tier={})
    answers(harness, {"producer": PROMPT}, LONG)
    whole = [*PROMPT, *harness.tokens("producer")]
    for end in (8, 12, 20, 24, 32):
        harness.cache.index.clear()
        answers(harness, {f"to{end}": [*whole[:end], 9, 9]}, ONE)
        assert cached(harness, f"to{end}") == end


def _unchecked(real: Any, self: HostTier, part: Any) -> str:
    outcome = real(self, part)
    return "" if outcome == "corrupt" else outcome


def check_a_damaged_object() -> None:
    """One bit of every object is another after a restart: none is used, all is computed anew and counted."""
    for seed in range(4):
        kit = {"backing_pages": 200, "host_pages": 100, "chances": {"damaged": 1.0}, "seed": seed}
        harness = Harness(num_runs=60, policy="prompt", tier=kit)
        answers(harness, {"first": PROMPT}, ONE)
        harness.restart(in_order=True)
        answers(harness, {"again": PROMPT}, LONG)
        assert harness.kit is not None
        assert cached(harness, "again") == 0 and harness.kit.totals()["corrupt"] > 0


def _named_one_token_short(real: Any, self: PrefixIndex, keys: Any, token_ids: np.ndarray, *rest: Any) -> bool:
    return real(self, keys, token_ids[:-1] if rest[-1] == Kind.AWAITED else token_ids, *rest)


def check_a_handoff() -> None:
    """One engine computes a prompt and its first token, another goes on from what that left in the store."""
    harness = Harness(num_runs=60, policy="second-hit", tier={"backing_pages": 200, "host_pages": 100})
    answers(harness, {"prefill": PROMPT}, ONE)
    harness.restart(in_order=True)
    answers(harness, {"decode": [*PROMPT, *harness.tokens("prefill")]}, LONG)
    assert cached(harness, "decode") == len(PROMPT)


BUGS = (
    Bug(10, "an external store has the state of a later moment", "fold oracle",
        replaced(TierSession, "take", _a_step_later), check_a_producer_that_decodes_on),
    Bug(11, "a damaged part of an object is decoded from", "fold oracle, metric",
        replaced(HostTier, "_read", _unchecked), check_a_damaged_object),
    Bug(12, "the token that is handed over is computed twice", "fold oracle",
        replaced(PrefixIndex, "adopt", _named_one_token_short), check_a_handoff),
)  # fmt: skip
