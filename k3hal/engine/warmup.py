"""The steps that need most of a device, tried before there is traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from k3hal.engine.cache.layout import CacheLayout
from k3hal.engine.constraint import Matcher
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
    seqs, tokens, length = sizes.max_num_seqs, sizes.max_num_batched_tokens, sizes.max_model_len
    chunk, most = min(tokens, length), min(tokens, seqs * length)
    full, many = _split(most, -(-most // chunk)), _split(most, seqs)
    decodes = _contexts(sizes, seqs)
    last = min(chunk, length - 1)
    prompts = "--max-num-batched-tokens"
    steps = [
        _Step(f"the largest prompt of one step ({chunk} tokens)", prompts, [0] * len(full), full),
        _Step(f"{len(many)} prompts in one step", f"{prompts} or --max-num-seqs", [0] * len(many), many),
        _Step(
            f"the largest batch ({seqs} sequences, up to {length} tokens)", "--max-num-seqs", decodes, [1] * seqs, seqs
        ),
        _Step(
            f"the end of the longest prompt ({length} tokens)",
            f"--max-model-len or {prompts}",
            [length - last],
            [last],
        ),
        *_beside(sizes, "the largest batch", f"--max-model-len, {prompts}", decodes, [1] * seqs, 0),
        # Scratch of prompts may be as wide as the longest of them for each: the end of a long one among short ones.
        _Step(
            f"{len(many)} prompts in one step, one of {length} tokens",
            f"--max-model-len, --max-num-seqs or {prompts}",
            [length - many[0], *[0] * (len(many) - 1)],
            many,
        ),
        *_with_drafts(sizes, decodes),
        _Step("a batch without sampling", "--max-num-seqs", decodes, [1] * seqs, seqs, sampling=False),
    ]
    for number, step in enumerate(steps):
        plan = _plan(sizes, arena_runs or sizes.num_runs, number, step)
        yield Trial(step.name, step.flag, plan)


@dataclass(frozen=True, slots=True)
class _Step:
    """Cached and new tokens of each sequence, those that decode and those that verify drafts first."""

    name: str
    flag: str
    contexts: Sequence[int]
    new: Sequence[int]
    num_decodes: int = 0
    num_verifies: int = 0
    sampling: bool = True


def _with_drafts(sizes: Sizes, decodes: Sequence[int]) -> Iterator[_Step]:
    """The largest batch with as many drafts as there may be, alone and beside prompts.

    Drafts take half of a step's tokens at most.
    """
    seqs, drafts = sizes.max_num_seqs, sizes.drafts
    verifying = min(seqs, sizes.max_num_batched_tokens // 2 // drafts) if drafts else 0
    most = sizes.max_model_len - 1 - drafts
    if verifying and most > 0:
        name = f"the largest batch ({seqs} sequences) with {drafts} drafts for {verifying} of them"
        # The longest is among them.
        contexts = [min(context, most) if i >= seqs - verifying else context for i, context in enumerate(decodes[::-1])]
        new = [*[1] * (seqs - verifying), *[1 + drafts] * verifying]
        yield _Step(name, "--draft or --max-num-seqs", contexts, new, seqs - verifying, verifying)
        yield from _beside(sizes, name, "--draft, --max-num-batched-tokens", contexts, new, verifying)


def _beside(
    sizes: Sizes, name: str, flags: str, contexts: Sequence[int], new: Sequence[int], verifying: int
) -> Iterator[_Step]:
    """A batch, `verifying` at its end, in which prompts take the place of one sequence, and of as few as fill the step.

    What a step with more sequences and fewer tokens takes lies between the two.
    """
    seqs, length = len(new), sizes.max_model_len

    def with_prompts(count: int) -> tuple[int, list[int]]:
        """Sequences that stay, decodes left out first, and the prompts' tokens."""
        stay = seqs - count
        taken = stay + (new[-1] - 1) * min(verifying, stay)
        return stay, _split(max(min(sizes.max_num_batched_tokens - taken, count * length), 0), count)

    def full(count: int) -> bool:
        return count == seqs or sum(with_prompts(count)[1]) < count * length

    for count in dict.fromkeys([1, next(filter(full, range(1, seqs + 1)))]):
        stay, prompts = with_prompts(count)
        if stay and prompts:
            verifies = min(verifying, stay)
            what = "prompt" if len(prompts) == 1 else f"of {len(prompts)} prompts"
            yield _Step(
                f"the end of the longest {what} ({length} tokens) beside {name}",
                f"{flags} or --max-num-seqs",
                [*contexts[seqs - stay :], length - prompts[0], *[0] * (len(prompts) - 1)],
                [*new[seqs - stay :], *prompts],
                stay - verifies,
                verifies,
            )


def _split(total: int, parts: int) -> list[int]:
    """`total` as `parts` numbers that differ by one at most, the larger ones first, those of zero left out."""
    return [n for i in range(parts) if (n := total // parts + (i < total % parts))]


def _contexts(sizes: Sizes, count: int) -> list[int]:
    """Cached tokens of `count` decoding sequences: the first as long as may be, the others share the rest."""
    longest = max(sizes.max_model_len - 1, 1)
    held = sizes.num_runs * sizes.layout.pages_per_slot * sizes.layout.page_tokens
    each = min(max((held - longest) // max(count - 1, 1), 1), longest)
    return [longest, *[each] * (count - 1)]


def _plan(sizes: Sizes, arena_runs: int, number: int, step: _Step) -> StepPlan:
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
