"""The nano model answers the same with the prefix cache as without, wherever the hit ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3hal.llm import LLM
from k3hal.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SIZES: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def plain(nano_dir: Path) -> Iterator[LLM]:
    with LLM(nano_dir, **SIZES, prefix_cache_policy="none") as model:
        yield model


@pytest.fixture
def cached(nano_dir: Path) -> Iterator[LLM]:
    with LLM(nano_dir, **SIZES, prefix_match_unit=64) as model:
        yield model


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 300, count).tolist()


def answer(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> tuple[list[int], int]:
    (output,) = llm.generate([prompt], params)
    return output.outputs[0].token_ids, output.num_cached_tokens


@pytest.mark.parametrize("length", [64, 65, 127, 128, 129, 200, 256, 385])
def test_a_resend_starts_from_its_last_unit(plain: LLM, cached: LLM, length: int) -> None:
    prompt = tokens(length, length)
    first, none = answer(cached, prompt)
    again, hit = answer(cached, prompt)
    assert none == 0
    assert hit >= (length - 1) // 64 * 64
    assert first == again == answer(plain, prompt)[0]


def test_a_conversation_reuses_what_it_decoded(plain: LLM, cached: LLM) -> None:
    history = tokens(1, 150)
    known = 0
    for turn in range(4):
        said, hit = answer(cached, history)
        assert said == answer(plain, history)[0]
        assert hit >= known
        known = len(history) + len(said) - 1
        history = [*history, *said, *tokens(turn + 2, 41)]
    assert known > 300


def test_siblings_share_their_prefix_from_the_third_on(plain: LLM, cached: LLM) -> None:
    shared = tokens(5, 320)
    hits = []
    for child in range(4):
        prompt = [*shared, *tokens(10 + child, 70)]
        said, hit = answer(cached, prompt)
        assert said == answer(plain, prompt)[0]
        hits.append(hit)
    assert hits[0] == 0
    assert hits[2:] == [320, 320]


def test_an_edit_in_the_middle_resumes_before_it(plain: LLM, cached: LLM) -> None:
    prompt = tokens(6, 500)
    answer(cached, prompt)
    for place in (100, 333):
        edited = [*prompt[:place], (prompt[place] + 1) % 300, *prompt[place + 1 :]]
        expected = answer(plain, edited)[0]
        said, hit = answer(cached, edited)
        assert said == expected
        assert hit <= place
        said, hit = answer(cached, edited)
        assert said == expected
        assert hit >= 448


def test_many_at_once_in_little_memory_are_preempted_and_resumed(nano_dir: Path, plain: LLM) -> None:
    budget = 0.0312
    prompts = [[*tokens(7, 100), *tokens(20 + i, 60 * i)] for i in range(4)]
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    with LLM(nano_dir, **SIZES, prefix_match_unit=64, memory_budget=budget) as tight:
        said = [output.outputs[0].token_ids for output in tight.generate(prompts, long)]
        stats = tight._engine.engine.stats()
    assert stats.preemptions > 0
    assert said == [output.outputs[0].token_ids for output in plain.generate(prompts, long)]


def test_sampled_answers_do_not_change(plain: LLM, cached: LLM) -> None:
    prompt = tokens(8, 300)
    sampled = SamplingParams(temperature=0.9, seed=4, max_tokens=16, ignore_eos=True)
    answers = [answer(llm, prompt, sampled)[0] for llm in (cached, cached, plain)]
    assert answers[0] == answers[1] == answers[2]


def test_logits_are_all_computed_whatever_is_cached(cached: LLM) -> None:
    prompt = tokens(9, 300)
    before = cached.logits(prompt)
    answer(cached, prompt)
    assert before.shape[0] == 300
    assert (cached.logits(prompt) == before).all()
