"""The steps that need most of a device, tried before there is traffic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from k3hal.engine.cache.layout import CacheLayout
from k3hal.engine.constraint import Matcher
from k3hal.engine.largest import Bounds, Step, largest_steps
from k3hal.engine.sampling import Sampling
from k3hal.engine.step_plan import BEFORE_ALL, RowBinding, StepPlan, StepResult
from k3hal.sampling_params import MAX_LOGPROBS


class _AllButOne:
    """A constraint, and what follows it: every token but the first may come."""

    def matcher(self) -> Matcher:
        return self

    def fill(self, mask: np.ndarray) -> bool:
        mask[:] = -1
        mask[0] = -2
        return True

    def accept(self, token_id: int) -> None:
        return None


class Runner(Protocol):
    def execute(self, plan: StepPlan) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """The largest that steps may be, over a cache of `num_runs` runs of `layout`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    layout: CacheLayout
    num_runs: int
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """A step, what it is, and the flag that makes it smaller."""

    name: str
    flag: str
    plan: StepPlan


def trials(sizes: Sizes, arena_runs: int | None = None) -> Iterator[Trial]:
    """The largest steps, in the order of their epochs: every row samples with every feature, in the last with none.

    They go to a runner whose cache nobody uses yet: what they write lies in memory that belongs to no sequence, and
    several of their sequences share pages and slots, so that `arena_runs` runs are enough. Their answers mean nothing.
    """
    bounds = Bounds(sizes.max_num_seqs, sizes.max_num_batched_tokens, sizes.max_model_len, sizes.drafts)
    for number, step in enumerate(largest_steps(bounds, _contexts(sizes, sizes.max_num_seqs))):
        plan = _plan(sizes, arena_runs or sizes.num_runs, number, step)
        yield Trial(step.name, step.flag, plan)


def _contexts(sizes: Sizes, count: int) -> list[int]:
    """Cached tokens of `count` decoding sequences: the first as long as may be, the others share the rest."""
    longest = max(sizes.max_model_len - 1, 1)
    held = sizes.num_runs * sizes.layout.pages_per_slot * sizes.layout.page_tokens
    each = min(max((held - longest) // max(count - 1, 1), 1), longest)
    return [longest, *[each] * (count - 1)]


def _plan(sizes: Sizes, arena_runs: int, number: int, step: Step) -> StepPlan:
    """The plan of a step; KV lies in the first run behind the null run."""
    contexts, new = step.contexts, step.new
    sampling = _everything(number) if step.sampling else _nothing()
    count, layout = len(new), sizes.layout
    numbers = np.arange(count)
    first = min(2, arena_runs - 1)
    pages = [layout.pages_for(context + n) for context, n in zip(contexts, new, strict=True)]
    table = layout.pages_per_slot + np.arange(max(pages)) % layout.pages_per_slot
    used = np.arange(max(pages)) < np.array(pages)[:, None]
    prompt = np.zeros(max(contexts) + 1, np.int64)
    return StepPlan(
        epoch=BEFORE_ALL + 1 + number,
        num_decodes=step.num_decodes,
        num_verifies=step.num_verifies,
        rows=numbers.astype(np.int32),
        slots=(first + numbers % (arena_runs - first)).astype(np.int32),
        context_lens=np.array(contexts, np.int32),
        new_lens=np.array(new, np.int32),
        page_table=np.where(used, table, 0).astype(np.int32),
        token_ids=(np.arange(sum(new)) % sizes.vocab_size).astype(np.int64),
        sampled=numbers.astype(np.int64),
        positions=np.zeros(count, np.int64),
        bindings=tuple(
            # One row is not constrained: masks of some rows take more than masks of all.
            RowBinding(row, sampling, prompt[: n + 1], n + 1, _AllButOne() if row and sampling.penalised else None)
            for row, n in enumerate(contexts)
        ),
    )


def _everything(seed: int) -> Sampling:
    """Every feature of sampling at once."""
    return Sampling(
        temperature=1.0,
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias={0: 1.0},
        seed=seed,
        min_tokens=1,
        max_tokens=1,
        end_ids=frozenset({0}),
        stop_ids=frozenset(),
        logprobs=MAX_LOGPROBS,
    )


def _nothing() -> Sampling:
    return Sampling(
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        seed=0,
        min_tokens=0,
        max_tokens=1,
        end_ids=frozenset(),
        stop_ids=frozenset(),
        logprobs=None,
    )
