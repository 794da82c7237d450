"""Reports of right states at wrong positions, in wrong slots, or of wrong owners."""

from __future__ import annotations

from typing import Any

import numpy as np

from k3hal.engine import scheduler
from k3hal.engine.cache import tree
from k3hal.engine.cache.index import PrefixIndex
from k3hal.engine.cache.prefix import PrefixCache
from k3hal.engine.cache.store import PageStore
from k3hal.engine.cache.tree import Node
from k3hal.engine.request import Request
from k3hal.engine.scheduler import Scheduler
from k3hal.engine.step_plan import StepPlan
from k3hal.sampling_params import SamplingParams

from ..cache_audit import audit
from ..harness import Harness, greedy_by_hand
from .bug import LONG, Bug, answers, cached, compare, replaced

HISTORY = [i % 20 + 2 for i in range(40)]
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def check_books_under_pressure() -> None:
    """What comes later evicts what came before: every page a node names is held, every state has its KV."""
    harness = Harness(num_runs=8, max_num_seqs=1, policy="second-hit")
    for start in (0, 7, 13, 3, 0, 10):
        answers(harness, {f"from{start} at {harness.steps}": HISTORY[start : start + 20]}, SHORT)
        audit(harness.cache)
    assert harness.cache.stats.snapshots_evicted > 0


def check_a_hit_in_a_full_pool() -> None:
    """A hit and what follows it take all the memory there is: no page has two owners."""
    harness = Harness(num_runs=8, max_num_seqs=1, policy="second-hit")
    answers(harness, {"first": HISTORY[:16]}, SHORT)
    whole = [*HISTORY[:16], *harness.tokens("first"), *HISTORY]
    answers(harness, {"longer": whole}, SHORT)
    assert cached(harness, "longer") >= 16
    audit(harness.cache)


def _another_snapshots_slot(real: Any, self: PrefixCache, row: int, node: Node | None, *rest: Any) -> None:
    end = node.end if node else 0
    shorter = [other for other in self.index.tree.nodes() if other.slot > 0 and other.end < end]
    if node is None or not shorter:
        return real(self, row, node, *rest)
    right, node.slot = node.slot, min(shorter, key=lambda other: other.end).slot
    try:
        return real(self, row, node, *rest)
    finally:
        node.slot = right


def check_each_of_several_states_of_one_prefix() -> None:
    """States every 4 tokens: whoever resumes at one of them gets that one."""
    harness = Harness(num_runs=80, policy="interval:4")
    answers(harness, {"first": HISTORY[:20]})
    for end in (20, 13, 9, 17):
        answers(harness, {f"to{end}": [*HISTORY[:end], 9, 9]}, SHORT)
        assert cached(harness, f"to{end}") == end // 4 * 4


def _loses_a_page_of_another(real: Any, self: PrefixIndex, entry: int) -> Any:
    changed = real(self, entry)
    for node in self.tree.nodes():
        if node.slot > 0 and node.pages.size:
            self._store.drop_from_index(node.pages[-1:])
            break
    return changed


def _untouched_hits(real: Any, self: PageStore, pages: np.ndarray) -> None:
    real(self, pages[self._index[pages] == 0])


class _OldTables:
    """Page tables as a worker has them that is only told of new pages."""

    def __init__(self) -> None:
        self.known: dict[int, np.ndarray] = {}

    def __call__(self, real: Any, epoch: int, cache: PrefixCache, *rest: Any) -> tuple[StepPlan, list[Request]]:
        plan, requests = real(epoch, cache, *rest)
        fresh = {binding.row for binding in plan.bindings}
        for i, row in enumerate(plan.rows.tolist()):
            if row in self.known and row not in fresh:
                known = self.known[row][: cache.num_pages[row]]
                plan.page_table[i, : known.size] = known
            self.known[row] = plan.page_table[i, : cache.num_pages[row]].copy()
        return plan, requests


def _plant_old_tables(patch: Any) -> None:
    replaced(scheduler, "build_plan", _OldTables())(patch)


def check_tables_after_moves() -> None:
    """Pages move together for a slot while sequences run: their plans name the new places."""
    params = SamplingParams(temperature=0.0, max_tokens=22, ignore_eos=True)
    harness = Harness(num_runs=9, max_num_seqs=8)
    for i in range(3):
        harness.add(f"long{i}", [i + 2] * 4, params)
    while len(harness.outputs["long0"]) < 16:
        harness.step()
    harness.keep(harness.core.abort(["long1", "long2"]))
    prompts = {f"next{i}": [i + 2] * 2 for i in range(4)}
    answers(harness, prompts, params)
    compare(harness, {"long0": [2] * 4}, params)
    assert harness.pages_copied > 0


def _freed_at_once(real: Any, self: Scheduler, requests: list[Request]) -> None:
    for request in requests:
        request.last_epoch = -1
    real(self, requests)


def check_ends_with_steps_under_way() -> None:
    """A stop token comes while the next step is under way: its memory is nobody else's before that step has run.

    The harness looks after every step whether what the steps under way write still belongs to their sequences.
    """
    for depth in (2, 3):
        harness = Harness(async_depth=depth, num_runs=12)
        whole = greedy_by_hand(HISTORY[:9], LONG, 40)[0]
        params = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=(whole[4],), ignore_eos=True)
        answers(harness, {"a": HISTORY[:9]}, params)
        answers(harness, {"b": HISTORY[2:9], "c": HISTORY[3:9]})


def _whole_prompt(real: Any, self: PrefixCache, token_ids: np.ndarray, keys: Any) -> Any:
    return self.index.match(keys, token_ids, token_ids.size)


def _cut_to_one_less(real: Any, self: PrefixCache, row: int, token_ids: np.ndarray, *rest: Any, **named: Any) -> Any:
    found = real(self, row, token_ids, *rest, **named)
    return found if found is None else min(found, token_ids.size - 1)


def _plant_unaligned_cap(patch: Any) -> None:
    replaced(PrefixCache, "_match", _whole_prompt)(patch)
    replaced(PrefixCache, "admit", _cut_to_one_less)(patch)


def check_prompts_of_exact_multiples() -> None:
    """Prompts as long as what is kept, one more and one less: they resume at a state before their last token."""
    harness = Harness(num_runs=80, policy="interval:4")
    answers(harness, {"first": HISTORY[:24]})
    for length in (15, 16, 17, 19, 20, 21):
        answers(harness, {f"of{length}": HISTORY[:length]})
        assert cached(harness, f"of{length}") == (length - 1) // 4 * 4


def _trusted(real: Any, self: Scheduler, request: Request, **named: Any) -> None:
    request.finish_reason = "stop"
    real(self, request, **named)


def check_what_is_not_finite_stays_alone() -> None:
    """A request whose logits are not finite leaves nothing behind, and the others are as ever."""
    harness = Harness(num_runs=60, policy="cost")
    harness.model.poison = {28}
    harness.add("bad", [*HISTORY[:12], 28], LONG)
    answers(harness, {"other": HISTORY[10:22]})
    assert harness.reason("bad") == "error"
    assert harness.cache.lookup(np.array([*HISTORY[:12], 28, 3, 4, 5])).cached == 0
    answers(harness, {"after": [*HISTORY[:12], 3]})


def _more_than_there_is(patch: Any) -> None:
    patch.setattr(PageStore, "room", property(lambda self: self.pool.num_pages - self.row_pages + self.run))


def check_more_requests_than_states() -> None:
    """Memory for four states and six requests: they wait for each other and all of them end."""
    harness = Harness(num_runs=7, max_num_seqs=6, policy="cost")
    answers(harness, {f"r{i}": HISTORY[i : i + 6] for i in range(6)}, SHORT)
    harness.assert_clean()


def _unwritten(real: Any, self: PageStore, source: int, target: int) -> None:
    """The copy is forgotten."""


def check_published_states() -> None:
    """Whoever starts from a state that was taken on the way reads what was there."""
    harness = Harness(num_runs=60, policy="interval:4")
    answers(harness, {"first": HISTORY[:18]})
    answers(harness, {"second": [*HISTORY[:17], 9]})
    assert cached(harness, "second") == 16


def _any_digest(real: Any, left: bytes, right: bytes) -> int:
    return min(len(left), len(right)) // 16


def check_an_edited_history() -> None:
    """Token 10 of 40 is another: nothing after it is used."""
    for policy in ("prompt", "interval:4"):
        harness = Harness(num_runs=60, policy=policy)
        answers(harness, {"first": HISTORY}, SHORT)
        answers(harness, {"edited": [*HISTORY[:10], 25, *HISTORY[11:]]}, SHORT)
        assert cached(harness, "edited") == (8 if policy == "interval:4" else 0)


def _without_thoughts(real: Any, self: PrefixCache, row: int, token_ids: np.ndarray, **named: Any) -> bool:
    return real(self, row, np.delete(token_ids, slice(12, 16)), **named)


def check_stripped_thoughts() -> None:
    """The next turn leaves out what was thought: no state covers the text without it."""
    harness = Harness(num_runs=60, policy="second-hit")
    answers(harness, {"first": HISTORY[:12]})
    said = harness.tokens("first")
    answers(harness, {"next": [*HISTORY[:12], *said[4:], 3, 4]}, SHORT)
    assert cached(harness, "next") <= 12


BUGS = (
    Bug(6, "the state of another boundary is restored", "fold oracle",
        replaced(PrefixCache, "_occupy", _another_snapshots_slot), check_each_of_several_states_of_one_prefix),
    Bug(7, "KV is evicted under a state that stays", "fold oracle, audit",
        replaced(PrefixIndex, "_give_up", _loses_a_page_of_another), check_books_under_pressure),
    Bug(8, "an allocation evicts the hit it is made for", "fold oracle, audit",
        replaced(PageStore, "hold_in_row", _untouched_hits), check_a_hit_in_a_full_pool),
    Bug(9, "the worker's page table is not the scheduler's", "fold oracle",
        _plant_old_tables, check_tables_after_moves),
    Bug(13, "a step planned beyond the end writes freed memory", "fold oracle",
        replaced(Scheduler, "remove", _freed_at_once), check_ends_with_steps_under_way),
    Bug(14, "the last token's recomputation is not aligned to a state", "fold oracle",
        _plant_unaligned_cap, check_prompts_of_exact_multiples),
    Bug(22, "what is not finite is kept for others", "publication",
        replaced(Scheduler, "_release", _trusted), check_what_is_not_finite_stays_alone),
    Bug(23, "slots run out in the middle of an admission", "capacity",
        _more_than_there_is, check_more_requests_than_states),
    Bug(26, "a published state was never written", "fold oracle",
        replaced(PageStore, "copy_slot", _unwritten), check_published_states),
    Bug(27, "a state beyond the first difference is used", "fold oracle",
        replaced(tree, "common_digests", _any_digest), check_an_edited_history),
    Bug(28, "a state is named by a text without the thoughts in it", "fold oracle",
        replaced(PrefixCache, "_keep", _without_thoughts), check_stripped_thoughts),
)  # fmt: skip
