"""Drafts before the nano model: fewer steps and the same answers, whatever else goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3hal.engine.ngram import continuation
from k3hal.engine.options import EngineOptions
from k3hal.engine.request import Request
from k3hal.errors import UsageError
from k3hal.llm import LLM
from k3hal.sampling_params import SamplingParams

SIZES: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 512, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
MIXED = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=5, max_tokens=12, logprobs=3),
    SamplingParams(temperature=0.7, seed=6, top_k=20, top_p=0.9, min_p=0.01, max_tokens=12, min_tokens=4),
    SamplingParams(temperature=1.0, seed=7, max_tokens=9, presence_penalty=0.4, frequency_penalty=0.2),
    SamplingParams(temperature=1.0, seed=8, logit_bias={5: 4.0, 7: -50.0}, max_tokens=6, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, seed=9, n=2, max_tokens=8),
]

Ends = list[tuple[list[int], str | None, Any]]


class Foreseen:
    """A drafter that knows what will be said, and at every `wrong`-th call says something else in one place."""

    def __init__(self, texts: list[list[int]], count: int, wrong: int) -> None:
        self.texts, self.count, self.wrong = texts, count, wrong
        self.calls = 0

    def propose(self, requests: list[Request], limits: list[int]) -> list[np.ndarray]:
        return [self._guess(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def _guess(self, request: Request, limit: int) -> np.ndarray:
        known = request.token_ids.tolist()
        text = next((text for text in self.texts if text[: len(known)] == known), known)
        self.calls += 1
        # Different counts, so that the sequences of a step differ in width.
        drafts = np.array(text[len(known) :][: min(limit, 1 + self.calls % self.count)], np.int64)
        if drafts.size and self.calls % self.wrong == 0:
            drafts[self.calls % drafts.size] ^= 1
        return drafts


@pytest.fixture(scope="module")
def plain(nano_dir: Path) -> Iterator[LLM]:
    with LLM(nano_dir, **SIZES, prefix_cache_policy="none") as model:
        yield model


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 300, count).tolist()


def say(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> Ends:
    outputs = llm.generate(prompts, params)
    return [(one.token_ids, one.finish_reason, one.logprobs) for output in outputs for one in output.outputs]


def foresee(llm: LLM, prompts: list[list[int]], ends: Ends, wrong: int = 3) -> Foreseen:
    texts = [[*prompt, *said] for prompt in prompts for said, _, _ in ends]
    drafter = Foreseen(texts, 5, wrong)
    scheduler(llm).drafter = drafter
    return drafter


def scheduler(llm: LLM) -> Any:
    engine: Any = llm._engine.engine
    return engine.core.scheduler


def steps(llm: LLM) -> int:
    return llm._engine.engine.stats().steps


@pytest.mark.parametrize("wrong", [1, 3, 10**9])
def test_right_and_wrong_drafts_change_nothing(nano_dir: Path, plain: LLM, wrong: int) -> None:
    prompts = [tokens(i, 5 + 60 * i) for i in range(4)]
    before = steps(plain)
    expected = say(plain, prompts)
    alone = steps(plain) - before
    with LLM(nano_dir, **SIZES, draft="ngram:5", max_num_batched_tokens=128) as llm:
        drafter = foresee(llm, prompts, expected, wrong)
        assert say(llm, prompts) == expected
        assert drafter.calls > 20 and steps(llm) < alone


def test_sampled_answers_are_the_same_with_drafts(nano_dir: Path, plain: LLM) -> None:
    prompts = [[3 + i] * (5 + 7 * i) for i in range(len(MIXED))]
    expected = say(plain, prompts, MIXED)
    with LLM(nano_dir, **SIZES, draft="ngram:5") as llm:
        foresee(llm, prompts, expected, 4)
        got = say(llm, prompts, MIXED)
    assert [end[:2] for end in got] == [end[:2] for end in expected]
    for (_, _, mine), (_, _, other) in zip(got, expected, strict=True):
        assert (mine is None) == (other is None)
        for a, b in zip(mine or (), other or (), strict=True):
            assert (a.token_id, a.logprob) == (b.token_id, pytest.approx(b.logprob, abs=1e-4))


def test_the_next_turn_finds_what_was_kept_of_drafts(nano_dir: Path, plain: LLM) -> None:
    prompt = tokens(3, 150)
    with LLM(nano_dir, **SIZES, draft="ngram:5", prefix_match_unit=16) as llm:
        for turn in range(3):
            expected = say(plain, [prompt])
            foresee(llm, [prompt], expected)
            (output,) = llm.generate([prompt], GREEDY)
            assert output.outputs[0].token_ids == expected[0][0]
            if turn:
                assert output.num_cached_tokens >= len(prompt) - 10 - 16, "the answer before was decoded with drafts"
            prompt = [*prompt, *expected[0][0], *tokens(10 + turn, 10)]


def test_preempted_sequences_go_on_with_drafts(nano_dir: Path, plain: LLM) -> None:
    prompts = [[*tokens(7, 100), *tokens(20 + i, 60 * i)] for i in range(4)]
    long = SamplingParams(temperature=0.0, max_tokens=180, ignore_eos=True)
    expected = say(plain, prompts, long)
    with LLM(nano_dir, **SIZES, draft="ngram:5", prefix_match_unit=64, memory_budget=0.06) as llm:
        hold = scheduler(llm).cache._store  # little memory, however much the budget leaves
        taken = [hold.take_slot(row=True) for _ in range(max(hold.room // hold.run - 9, 0))]
        foresee(llm, prompts, expected, 5)
        assert say(llm, prompts, long) == expected
        assert llm._engine.engine.stats().preemptions > 0 and taken


def test_a_text_that_repeats_itself_takes_fewer_steps(nano_dir: Path, plain: LLM) -> None:
    """With the drafter of the option itself: an answer that the prompt has already."""
    first = tokens(30, 40)
    prompt = [*first, *say(plain, [first])[0][0], *first]
    loop = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias={9: 100.0})
    expected = say(plain, [prompt], loop)
    with LLM(nano_dir, **SIZES, draft="ngram:4") as llm:
        assert say(llm, [prompt], loop) == expected
        assert steps(llm) < 16


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 9, [3, 4, 1, 2, 3, 4, 1, 2, 3]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, [4]),
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1, [3]),
        ([5, 5, 5], 3, [5, 5, 5]),
        ([1, 2, 3], 4, []),
        ([3, 1, 2, 3], 4, []),
        ([1], 4, []),
        ([1, 2, 1, 2], 0, []),
    ],
)
def test_what_followed_before_is_proposed(text: list[int], count: int, expected: list[int]) -> None:
    assert continuation(np.array(text, np.int64), count).tolist() == expected


@pytest.mark.parametrize(
    "text", ["", "ngram", "ngram:", "ngram:0", "ngram:33", "ngram:-1", "ngram:x", "ngram:٣", "eagle:3"]
)
def test_a_wrong_drafter_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"draft is .*ngram:N with N from 1 to 32"):
        EngineOptions.of(draft=text)


def test_drafts_need_tokens_that_are_known() -> None:
    with pytest.raises(UsageError, match="draft 'ngram:3' and async_depth 2 are both given"):
        EngineOptions.of(draft="ngram:3", async_depth=2)


def test_the_memory_of_drafts_is_planned_and_has_a_name(nano_dir: Path) -> None:
    from k3hal.cli.memory_table import WHAT

    with LLM(nano_dir, **SIZES, draft="ngram:5") as llm:
        parts = {name: size for name, size, _ in llm._engine.memory.items()}
        config = llm._engine.runner.model.cfg  # pyright: ignore[reportAttributeAccessIssue]
    assert parts["drafts"] > 4 * (5 + 1) * 4 * config.vocab_size and parts.keys() <= WHAT.keys()
