"""Sampling parameters: every field's type and range, checked where they are made."""

from __future__ import annotations

from typing import Any

import pytest

from k3hal.errors import RequestError
from k3hal.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", 0, "n must be in [1, 128], got 0"),
        ("n", 1.5, "n must be an integer, got 1.5"),
        ("temperature", -1, "temperature must be in [0, 100], got -1"),
        ("temperature", float("nan"), "temperature must be a finite number, got nan"),
        ("temperature", "hot", "temperature must be a finite number, got 'hot'"),
        ("top_p", 0, "top_p must be in (0, 1], got 0"),
        ("top_k", -2, "top_k must be in [-1, 2147483648], got -2"),
        ("top_k", 2.5, "top_k must be an integer, got 2.5"),
        ("min_p", 1.5, "min_p must be in [0, 1], got 1.5"),
        ("presence_penalty", 3, "presence_penalty must be in [-2, 2], got 3"),
        ("frequency_penalty", -3, "frequency_penalty must be in [-2, 2], got -3"),
        ("repetition_penalty", 0, "repetition_penalty must be in (0, 100], got 0"),
        ("max_tokens", 0, "max_tokens must be in [1, 2147483648], got 0"),
        ("max_tokens", 2.5, "max_tokens must be an integer, got 2.5"),
        ("max_tokens", True, "max_tokens must be an integer, got True"),
        ("min_tokens", -1, "min_tokens must be in [0, 2147483648], got -1"),
        ("min_tokens", 17, "min_tokens is 17, more than max_tokens 16"),
        ("logprobs", 21, "logprobs must be in [0, 20], got 21"),
        ("seed", 2**64, f"seed must be in [{-(2**63)}, {2**64 - 1}], got {2**64}"),
        ("seed", 1.5, "seed must be an integer, got 1.5"),
        ("stop", 3, "stop must be a list of texts, got 3"),
        ("stop", ["a", 3], "stop must be a list of texts, got ['a', 3]"),
        ("stop", b"a", "stop must be a list of texts, got b'a'"),
        ("stop", [""], "stop must not hold an empty text"),
        ("stop_token_ids", 5, "stop_token_ids must be a list of token ids, got 5"),
        ("stop_token_ids", "5", "stop_token_ids must be a list of token ids, got '5'"),
        ("stop_token_ids", [True], "stop_token_ids must be a list of token ids, got [True]"),
        ("logit_bias", [1], "logit_bias must map token ids to numbers, got [1]"),
        ("logit_bias", {"5": 1}, "logit_bias keys are token ids, got '5'"),
        ("logit_bias", {5: 101}, "logit_bias must be in [-100, 100], got 101"),
        ("ignore_eos", "no", "ignore_eos must be true or false, got 'no'"),
        ("include_stop_str_in_output", 1, "include_stop_str_in_output must be true or false, got 1"),
    ],
)
def test_a_wrong_value_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value})
    assert (error.value.message, error.value.param) == (message, field)


def test_sequences_become_tuples() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2])  # pyright: ignore[reportArgumentType]
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (1, 2))
    assert SamplingParams(stop="end").stop == ("end",)  # pyright: ignore[reportArgumentType]


def test_each_continuation_of_a_seed_has_its_own() -> None:
    seeded = SamplingParams(n=3, seed=2**63 - 1, temperature=0.5)
    assert [seeded.continuation(i).seed for i in range(3)] == [2**63 - 1, 0, 1]
    assert {seeded.continuation(i).n for i in range(3)} == {1}
    assert SamplingParams(n=2).continuation(1) == SamplingParams()
    assert SamplingParams(seed=7).continuation(0) == SamplingParams(seed=7)
