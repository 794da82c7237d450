"""Reports about drafts: whose accepted count, which state, which context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from k3hal.engine import scheduler
from k3hal.engine.cache.stops import RowStops
from k3hal.engine.request import Request
from k3hal.engine.runner import ModelRunner
from k3hal.engine.scheduler import Scheduler
from k3hal.engine.step_plan import StepPlan, StepResult
from k3hal.model.batch import StepBatch

from ..fold_model import VOCAB, fold, fold_logits
from ..harness import Harness, greedy_by_hand
from .bug import LONG, Bug, answers, cached, compare, replaced

PROMPT = [2, 3, 4, 5, 6, 7]


@dataclass
class Listed:
    """A drafter that proposes what it was told to, in turn."""

    drafts: list[list[int]]

    def propose(self, requests: list[Request], limits: list[int]) -> list[np.ndarray]:
        return [np.array(self.drafts.pop(0) if self.drafts else [], np.int64) for _ in requests]


@dataclass
class Contextual:
    """A drafter whose guesses are right only if it has seen the whole context; right ones alternate with wrong."""

    proposed: int = 0
    limit: int = 3
    right: list[bool] = field(default_factory=list)

    def propose(self, requests: list[Request], limits: list[int]) -> list[np.ndarray]:
        return [
            self._guess(request.token_ids.tolist(), min(limit, self.limit))
            for request, limit in zip(requests, limits, strict=True)
        ]

    def _guess(self, tokens: list[int], count: int) -> np.ndarray:
        prefix, drafts = 0, []
        for token in tokens:
            prefix = fold(prefix, token)
        for _ in range(count):
            drafts.append(int(fold_logits(prefix).argmax()))
            prefix = fold(prefix, drafts[-1])
        self.proposed += count
        return np.array(drafts, np.int64)


def _others_count(real: Any, self: Scheduler, plan: StepPlan, requests: list[Request], accepted: list[int]) -> Any:
    return real(self, plan, requests, accepted[::-1])


def check_rows_join_and_leave() -> None:
    """Sixteen requests come and go, each with another share of right drafts: as without drafts and without cache."""
    harness = Harness(num_runs=60, max_num_seqs=6, max_num_batched_tokens=64, drafts=4, wrong_drafts=3, policy="cost")
    prompts = {f"r{i}": [*PROMPT, *range(2, 2 + i)] for i in range(16)}
    for name, prompt in prompts.items():
        harness.add(name, prompt, LONG)
        harness.step()
    harness.run()
    compare(harness, prompts)
    assert harness.model.accepted > 50


def _one_short_at_boundaries(
    real: Any, self: ModelRunner, plan: StepPlan, batch: StepBatch, accepted: list[int]
) -> None:
    ends = plan.context_lens[plan.verifies] + np.array(accepted) + 1
    short = (ends % self.arena.layout.page_tokens == 0) & (np.array(accepted) > 0)
    real(self, plan, batch, (np.array(accepted) - short).tolist())


def check_acceptance_ends_with_a_page() -> None:
    """All drafts are accepted and end a page of four tokens: the state is that after them."""
    answer = greedy_by_hand(PROMPT, LONG, 58)[0]
    harness = Harness()
    harness.scheduler.drafter = Listed([answer[1:2], answer[3:6], answer[7:10]])
    answers(harness, {"a": PROMPT})
    assert harness.model.accepted == 7


def _late_commit(real: Any, self: ModelRunner, plan: StepPlan, batch: StepBatch, accepted: list[int]) -> None:
    self.__dict__["owed"] = lambda kept: real(self, plan, batch, kept if kept is not None else [0] * len(accepted))
    self.__dict__["owed_counts"] = accepted


def _reads_the_first_place(real: Any, self: ModelRunner, plan: StepPlan) -> StepResult:
    owed: Callable[[list[int] | None], None] | None = self.__dict__.pop("owed", None)
    if owed is not None:
        owed(self.__dict__["owed_counts"] if plan.num_verifies else None)
    return real(self, plan)


def _plant_commit_only_before_drafts(patch: Any) -> None:
    replaced(ModelRunner, "_commit", _late_commit)(patch)
    replaced(ModelRunner, "execute", _reads_the_first_place)(patch)


def check_steps_without_drafts_between() -> None:
    """Drafts per step [3, 0, 2, 0], all accepted: as without drafts."""
    answer = greedy_by_hand(PROMPT, LONG, 58)[0]
    harness = Harness()
    harness.scheduler.drafter = Listed([answer[1:4], [], answer[6:8], []])
    answers(harness, {"a": PROMPT})
    assert harness.model.accepted == 5


def _without_the_last(real: Any, self: RowStops, row: int, cached: int, num_tokens: int, wished: Any) -> None:
    last = (num_tokens - 1) // 4 * 4
    real(self, row, cached, num_tokens, [stop for stop in wished if stop.position < last])


def check_a_repeat_hits_with_drafts() -> None:
    """The same prompt twice, with a drafter: the second hits all but its last unit."""
    for length in (15, 16, 17, 23):
        harness = Harness(num_runs=60, drafts=3, policy="prompt")
        prompt = [i % 20 + 2 for i in range(length)]
        answers(harness, {"first": prompt})
        answers(harness, {"again": prompt})
        assert cached(harness, "again") >= (length - 1) // 4 * 4


def _sees_no_restored_tokens(real: Any, drafter: Any, decodes: list[Request], *rest: Any) -> Any:
    class Blind:
        def propose(self, requests: list[Request], limits: list[int]) -> list[np.ndarray]:
            whole = [request.buffer for request in requests]
            for request in requests:
                request.buffer = request.buffer.copy()
                request.buffer[: request.num_cached_tokens] = 0
            proposed = drafter.propose(requests, limits)
            for request, buffer in zip(requests, whole, strict=True):
                request.buffer = buffer
            return proposed

    return real(Blind(), decodes, *rest)


def check_acceptance_after_a_hit() -> None:
    """A drafter that needs its context: as many drafts are accepted after a hit as without."""
    shares = []
    harness = Harness(num_runs=60, policy="cost")
    for name in ("cold", "warm"):
        harness.scheduler.drafter = drafter = Contextual()
        before = harness.model.accepted
        answers(harness, {name: [i % 20 + 2 for i in range(30)]})
        shares.append((harness.model.accepted - before) / drafter.proposed)
    assert cached(harness, "warm") >= 24
    assert shares[0] > 0.9 and abs(shares[0] - shares[1]) <= 0.01


BUGS = (
    Bug(3, "accepted counts in another order than the rows", "fold oracle",
        replaced(Scheduler, "advance", _others_count), check_rows_join_and_leave),
    Bug(4, "state one token short when acceptance ends a page", "fold oracle",
        replaced(ModelRunner, "_commit", _one_short_at_boundaries), check_acceptance_ends_with_a_page),
    Bug(5, "a step without drafts reads the state before the accepted ones", "fold oracle",
        _plant_commit_only_before_drafts, check_steps_without_drafts_between),
    Bug(15, "with drafts the first repeat of a prompt misses", "hit rate",
        replaced(RowStops, "begin", _without_the_last), check_a_repeat_hits_with_drafts),
    Bug(18, "the drafter never saw what came from the cache", "acceptance rate",
        replaced(scheduler, "pick_drafts", _sees_no_restored_tokens), check_acceptance_after_a_hit),
)  # fmt: skip
assert VOCAB > 22
