"""Draft spans: they save steps, change no output, and what was not taken is known to nobody."""

from __future__ import annotations

import numpy as np
import pytest

from k3hal.engine.cache.keys import NO_CONTEXT
from k3hal.sampling_params import SamplingParams

from .cache_audit import audit
from .fold_model import VOCAB
from .harness import Harness, greedy_by_hand
from .planted.drafts import Listed

LONG = SamplingParams(temperature=0.0, max_tokens=22, ignore_eos=True)
PROMPT = [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("wrong", [1, 2, 1000])
def test_drafts_save_steps_and_change_nothing(wrong: int) -> None:
    harness = Harness(drafts=5, wrong_drafts=wrong)
    harness.add("a", PROMPT, LONG)
    harness.run()
    assert harness.tokens("a") == greedy_by_hand(PROMPT, LONG, 58)[0]
    assert (harness.steps < 16) == (wrong == 1000)
    assert (harness.model.accepted > 0) == (wrong > 1)
    harness.assert_clean()


def test_steps_with_and_without_drafts_alternate() -> None:
    answer = greedy_by_hand(PROMPT, LONG, 58)[0]
    harness = Harness()
    harness.scheduler.drafter = Listed([answer[1:4], [], answer[5 + 1 : 5 + 3], []])
    harness.add("a", PROMPT, LONG)
    for expected in (1, 5, 6, 9, 10):
        harness.step()
        assert len(harness.tokens("a")) == expected
    harness.run()
    assert harness.tokens("a") == answer


def test_a_draft_that_was_not_taken_is_known_to_nobody() -> None:
    answer = greedy_by_hand(PROMPT, LONG, 58)[0]
    wrong = [(answer[1] + 1) % (VOCAB - 1)] * 6
    harness = Harness(policy="interval:1", match_unit=1)
    harness.scheduler.drafter = Listed([wrong] * 4)
    harness.add("a", PROMPT, LONG)
    for _ in range(3):
        harness.step()
        audit(harness.cache)
    harness.keep(harness.core.abort(["a"]))
    text = np.array([*PROMPT, answer[0], *wrong])
    assert harness.cache.lookup(text, NO_CONTEXT).cached <= len(PROMPT) + 1


def test_drafts_end_where_a_state_is_wanted() -> None:
    answer = greedy_by_hand(PROMPT, LONG, 58)[0]
    harness = Harness(policy="interval:4")
    harness.scheduler.drafter = Listed([answer[1:8]])
    harness.add("a", PROMPT, LONG)
    for _ in range(3):
        harness.step()
    assert harness.tokens("a") == answer[:3]
    harness.run()
    assert harness.cache.stats.snapshots_taken >= 5
