"""Sampling: every feature against its definition, and no request ever depends on its neighbours."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3hal.dispatch.ops.sample import sample
from k3hal.engine.sampler import Sampler
from k3hal.engine.sampling import GenerationDefaults, resolve_sampling
from k3hal.engine.step_plan import RowBinding
from k3hal.engine.uniforms import uniforms
from k3hal.sampling_params import SamplingParams

V = 50
CPU = torch.device("cpu")


def bind(sampler: Sampler, row: int, tokens: list[int] | None = None, num_prompt: int = 1, **params: Any) -> None:
    asked = SamplingParams(**{"temperature": 0.0, **params})
    sampling = resolve_sampling(asked, GenerationDefaults(), eos_token_ids=(1,), room=1000)
    sampler.bind(RowBinding(row, sampling, np.array(tokens or [2], np.int64), num_prompt))


def logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def draw(sampler: Sampler, values: Tensor, rows: list[int], positions: list[int] | None = None) -> list[int]:
    return sampler.sample(values.clone(), np.array(rows), np.array(positions or [0] * len(rows)))[0]


def penalised(row: Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> Tensor:
    """The penalties' definition, token by token."""
    result = row.clone()
    for token in range(V):
        count = output.count(token)
        if count or token in prompt:
            factor = params.repetition_penalty
            result[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        result[token] -= params.frequency_penalty * count + (params.presence_penalty if count else 0.0)
    return result


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=8),
    output=st.lists(st.integers(0, V - 1), max_size=8),
    presence=st.sampled_from([0.0, 0.7, -1.0]),
    frequency=st.sampled_from([0.0, 0.4, -0.5]),
    repetition=st.sampled_from([1.0, 1.5, 0.6]),
    seed=st.integers(0, 1000),
)
def test_penalties_equal_their_definition(
    prompt: list[int], output: list[int], presence: float, frequency: float, repetition: float, seed: int
) -> None:
    params: dict[str, Any] = {
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "repetition_penalty": repetition,
    }
    sampler = Sampler(V, 3, CPU, sample)
    bind(sampler, 0)
    bind(sampler, 2, prompt + output, len(prompt), **params)
    values = logits(2, seed)
    for _ in range(4):
        expected = int(penalised(values[1], prompt, output, SamplingParams(**params)).argmax())
        assert draw(sampler, values, [0, 2]) == [int(values[0].argmax()), expected]
        output = [*output, expected]


def test_a_row_forgets_the_penalties_of_its_previous_sequence() -> None:
    sampler = Sampler(V, 2, CPU, sample)
    values = logits(1)
    best = int(values.argmax())
    bind(
        sampler, 0, [best], 1, repetition_penalty=50.0, logit_bias={best: -100.0}, min_tokens=1, stop_token_ids=(best,)
    )
    assert draw(sampler, values, [0]) != [best]
    bind(sampler, 0)
    assert draw(sampler, values, [0]) == [best]


def test_more_penalised_rows_than_the_table_starts_with() -> None:
    sampler = Sampler(V, 12, CPU, sample)
    values = logits(12)
    for row in range(12):
        bind(sampler, row, [int(values[row].argmax())], 1, repetition_penalty=100.0)
    expected = [
        int(penalised(v, [int(v.argmax())], [], SamplingParams(repetition_penalty=100.0)).argmax()) for v in values
    ]
    assert draw(sampler, values, list(range(12))) == expected


def test_logit_bias_and_banned_ids_touch_their_rows_only() -> None:
    sampler = Sampler(V, 3, CPU, sample)
    values = torch.zeros(3, V)
    values[:, 1] = 5.0
    bind(sampler, 0, min_tokens=2)
    bind(sampler, 1, logit_bias={7: 10.0, 1: -1.0})
    bind(sampler, 2)
    assert draw(sampler, values, [0, 1, 2], [0, 0, 0]) == [0, 7, 1]
    assert draw(sampler, values, [2, 1, 0], [9, 9, 1]) == [1, 7, 0]
    assert draw(sampler, values[:1], [0], [2]) == [1], "from min_tokens outputs on the end is allowed"


def test_ignore_eos_leaves_the_end_id_unbanned() -> None:
    sampler = Sampler(V, 1, CPU, sample)
    values = torch.zeros(1, V)
    values[:, 1] = 5.0
    bind(sampler, 0, min_tokens=2, ignore_eos=True)
    assert draw(sampler, values, [0]) == [1]


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"presence_penalty": 0.5}])
def test_a_seeded_row_is_the_same_in_any_batch(params: dict[str, Any]) -> None:
    values = logits(1, 5)
    alone = Sampler(V, 1, CPU, sample)
    bind(alone, 0, seed=42, temperature=4.0, **params)
    expected = [draw(alone, values, [0], [position])[0] for position in range(12)]
    crowd = Sampler(V, 4, CPU, sample)
    for row in range(3):
        bind(crowd, row, seed=row, temperature=row / 2)
    bind(crowd, 3, seed=42, temperature=4.0, **params)
    got = []
    for position in range(12):
        rows = [position % 3, (position + 1) % 3, 3]
        got.append(draw(crowd, torch.cat((logits(2, position), values)), rows, [7, 9, position])[2])
    assert got == expected
    assert len(set(expected)) > 1


def test_sampled_tokens_follow_the_distribution() -> None:
    values = torch.tensor([[0.0, 1.0, 2.0] + [-torch.inf] * (V - 3)])
    sampler = Sampler(V, 1, CPU, sample)
    bind(sampler, 0, temperature=1.0, seed=7)
    count = 3000
    tokens = [draw(sampler, values, [0], [position])[0] for position in range(count)]
    expected = values[0].softmax(0)
    for token in range(3):
        p = float(expected[token])
        assert abs(tokens.count(token) / count - p) < 4 * math.sqrt(p * (1 - p) / count)


def test_uniforms_are_uniform_and_independent_across_seeds_and_positions() -> None:
    seeds = np.arange(200, dtype=np.uint64).repeat(200)
    positions = np.tile(np.arange(200), 200)
    values = uniforms(seeds, positions)
    assert values.min() >= 0.0
    assert values.max() < 1.0
    assert len(np.unique(values)) == values.size
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    chi_square = float(((counts - 400) ** 2 / 400).sum())
    assert 50 < chi_square < 170  # 99 degrees of freedom
    square = values.reshape(200, 200)
    for shifted in (
        np.corrcoef(square[1:].ravel(), square[:-1].ravel()),
        np.corrcoef(square[:, 1:].ravel(), square[:, :-1].ravel()),
    ):
        assert abs(shifted[0, 1]) < 0.02
    assert uniforms(np.array([2**64 - 1], np.uint64), np.array([0])).shape == (1,)


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    sampler = Sampler(V, 3, CPU, sample)
    values = logits(3)
    bind(sampler, 0, logprobs=3, logit_bias={4: 100.0}, temperature=0.0)
    bind(sampler, 1)
    bind(sampler, 2, logprobs=0, temperature=2.0, seed=1)
    tokens, logprobs = sampler.sample(values.clone(), np.array([0, 1, 2]), np.zeros(3, np.int64))
    assert logprobs is not None
    raw = values.log_softmax(-1)
    first, none, last = logprobs
    assert none is None
    assert first is not None
    assert last is not None
    assert (first.token_id, tokens[0]) == (4, 4)
    assert first.logprob == pytest.approx(float(raw[0, 4]), abs=1e-6)
    top = raw[0].topk(3)
    assert [t for t, _ in first.top] == top.indices.tolist()
    assert [p for _, p in first.top] == pytest.approx(top.values.tolist(), abs=1e-6)
    assert last.top == ()
    assert last.logprob == pytest.approx(float(raw[2, tokens[2]]), abs=1e-6)


def test_without_requests_for_them_there_are_no_logprobs() -> None:
    sampler = Sampler(V, 1, CPU, sample)
    bind(sampler, 0)
    assert sampler.sample(logits(1), np.array([0]), np.array([0]))[1] is None


def test_greedy_rows_never_reach_the_sampling_operator() -> None:
    def refuse(*arguments: Tensor) -> Tensor:
        raise AssertionError("called for a greedy batch")

    sampler = Sampler(V, 2, CPU, refuse)
    bind(sampler, 0)
    bind(sampler, 1)
    tied = torch.zeros(2, V)
    tied[0, [9, 4, 30]] = 2.0
    assert draw(sampler, tied, [0, 1]) == [4, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_gives_no_token(bad: float) -> None:
    sampler = Sampler(V, 2, CPU, sample)
    bind(sampler, 0, temperature=1.0, seed=0, frequency_penalty=1.0)
    bind(sampler, 1, temperature=1.0, seed=0)
    values = logits(2)
    expected = draw(sampler, values, [1, 0])[0]
    values[1, 3] = bad
    assert draw(sampler, values, [1, 0]) == [expected, -1]


def test_defaults_fill_what_a_request_leaves_open() -> None:
    defaults = GenerationDefaults(temperature=0.3, top_p=0.9, top_k=7, min_p=0.1)
    open_params = resolve_sampling(SamplingParams(max_tokens=None), defaults, eos_token_ids=(1,), room=9)
    assert (open_params.temperature, open_params.top_p, open_params.top_k, open_params.min_p) == (0.3, 0.9, 7, 0.1)
    assert open_params.max_tokens == 9
    given_params = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, seed=-1, ignore_eos=True)
    closed = resolve_sampling(given_params, defaults, eos_token_ids=(1,), room=9)
    assert (closed.temperature, closed.top_p, closed.top_k, closed.min_p) == (0.0, 1.0, 0, 0.0)
    assert (closed.seed, closed.end_ids, closed.max_tokens) == (2**64 - 1, frozenset(), 9)
