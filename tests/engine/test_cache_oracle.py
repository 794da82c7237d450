"""With the prefix cache on, every output is that of the sequence alone, whatever is found, evicted, aborted or lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from k3hal.engine.cache.keys import NO_CONTEXT, UnitKeys
from k3hal.engine.cache.store import PageStore
from k3hal.engine.core import FAILED_STEPS_UNTIL_DEAD
from k3hal.engine.request import Request

from .cache_script import Run, Script, fails, play_many, random_script, shrink
from .harness import Harness


@pytest.mark.usefixtures("unlogged")
def test_ten_thousand_steps_change_no_output() -> None:
    totals = play_many(range(10_000), steps=10_000)
    assert totals.steps >= 10_000
    assert totals.cached > 4_000
    assert totals.evicted > 1_000
    assert totals.resumed > 50
    assert totals.preempted > 20
    assert totals.accepted > 500 and totals.rejected > 500
    assert totals.ahead > 3_000 and totals.surplus > 30


def no_copy(harness: Harness) -> None:
    harness.skip_copies = True


def no_copy_of_states(harness: Harness) -> None:
    _store(harness).copy_slot = lambda source, target: None


def no_copy_of_partial_pages(harness: Harness) -> None:
    _store(harness).copy_page = lambda source, target: None


def copies_of_copies_read_the_copy(harness: Harness) -> None:
    _store(harness).slot_source = lambda slot: slot


def pages_freed_under_a_reader(harness: Harness) -> None:
    store = _store(harness)

    def drop(pages: np.ndarray) -> None:
        store._index[pages] -= 1
        left = pages[store._index[pages] == 0]
        store._rows[left] = 0
        store._free(left)

    harness.cache.index.tree._drop = drop


def moved_pages_keep_their_names(harness: Harness) -> None:
    harness.cache.index.tree.rename = lambda old, new: None


def moved_pages_stay_in_the_page_tables(harness: Harness) -> None:
    harness.cache.index._page_moved = lambda old, new: None


def states_named_one_token_short(harness: Harness) -> None:
    _wrap(harness.cache.index, "snapshot", lambda keys, ids, *rest: (keys, ids[:-1], *rest))


def ends_named_one_token_long(harness: Harness) -> None:
    _wrap(harness.cache.index, "adopt", lambda keys, ids, *rest: (keys, np.append(ids, 2), *rest))


def units_named_without_what_precedes_them(harness: Harness) -> None:
    def harness_keys() -> UnitKeys:
        return UnitKeys(NO_CONTEXT, harness.match_unit, b"")

    class Unchained(UnitKeys):
        def chain(self, token_ids: np.ndarray) -> bytearray:
            unit = self.unit
            alone = (token_ids[at : at + unit] for at in range(0, token_ids.size // unit * unit, unit))
            return bytearray(b"".join(bytes(harness_keys().chain(part)) for part in alone))

    harness.cache.keys = lambda context=NO_CONTEXT: Unchained(context, harness.match_unit, b"")


def hits_that_reach_one_unit_too_far(harness: Harness) -> None:
    start = harness.scheduler._start

    def farther(request: Request, row: int, cached: int) -> None:
        start(request, row, cached + 1 if cached and cached + 1 < request.num_tokens else cached)

    harness.scheduler._start = farther


def a_failed_step_forgets_nothing(harness: Harness) -> None:
    harness.cache.forget = lambda: None


FAULTS = [
    no_copy,
    no_copy_of_states,
    no_copy_of_partial_pages,
    copies_of_copies_read_the_copy,
    pages_freed_under_a_reader,
    moved_pages_keep_their_names,
    moved_pages_stay_in_the_page_tables,
    states_named_one_token_short,
    ends_named_one_token_long,
    units_named_without_what_precedes_them,
    hits_that_reach_one_unit_too_far,
    a_failed_step_forgets_nothing,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_oracle_sees_a_planted_fault(fault: Callable[[Harness], None]) -> None:
    caught = next((seed for seed in range(400) if fails(random_script(seed), fault)), None)
    assert caught is not None


def test_a_failure_shrinks_to_a_few_actions() -> None:
    seed = next(seed for seed in range(400) if fails(random_script(seed), no_copy_of_states))
    smallest = shrink(random_script(seed), lambda script: fails(script, no_copy_of_states))
    assert len(smallest.actions) <= 4
    Run(smallest).play()


def _store(harness: Harness) -> PageStore:
    return harness.cache._store


def _wrap(target: Any, name: str, change: Callable[..., tuple[Any, ...]]) -> None:
    real = getattr(target, name)
    setattr(target, name, lambda *args: real(*change(*args)))


def test_a_script_may_end_with_the_engine() -> None:
    failing = [("fail",), ("new", ((), 5, 12, 89), 2, 0)] * FAILED_STEPS_UNTIL_DEAD
    sizes = {"page_tokens": 3, "match_unit": 3, "num_runs": 7, "max_num_seqs": 1, "max_num_batched_tokens": 64}
    run = Run(Script({**sizes, "policy": "cost"}, (*failing, ("new", ((), 5, 12, 89), 2, 0)))).play()
    assert run.harness.core.dead and len(run.prompts) == FAILED_STEPS_UNTIL_DEAD


@pytest.mark.parametrize("seed", [11_470, 14_025])
def test_pages_that_move_are_found_wherever_they_are_named(seed: int) -> None:
    Run(random_script(seed)).play()


@pytest.mark.nightly
@pytest.mark.timeout(20_000)
@pytest.mark.usefixtures("unlogged")
def test_a_million_steps_change_no_output(record_property: Callable[[str, object], None]) -> None:
    totals = play_many(range(10_000, 10**7), steps=10**6)
    record_property("seen", str(totals))
    assert totals.steps >= 10**6
