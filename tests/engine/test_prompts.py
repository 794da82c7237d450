"""What `LLM.generate` takes for prompts and parameters, and that nothing else is half taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from k3hal.engine.prompts import params_for_each, read_prompts
from k3hal.errors import RequestError
from k3hal.sampling_params import SamplingParams

ONE, TWO = SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("text", ["text"]),
        ("", [""]),
        ([], []),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        (("a", [1, 2]), ["a", [1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([[]], [[]]),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor([1, 2]), [[1, 2]]),
        ([torch.tensor([1, 2]), "a"], [[1, 2], "a"]),
        ([np.int64(1), torch.tensor(2)], [[1, 2]]),
        (range(3), [[0, 1, 2]]),
    ],
)
def test_prompts(prompts: Any, expected: list[Any]) -> None:
    read = read_prompts(prompts)
    assert read == expected
    assert all(type(token) is int for ids in read if not isinstance(ids, str) for token in ids)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "None is no prompt"),
        (3, "3 is no prompt"),
        (b"bytes", "b'bytes' is no prompt"),
        ({"a": 1}, "{'a': 1} is no prompt"),
        (["a", 3], "prompts[1] is 3, neither a text nor token ids"),
        ([1, "a"], "prompts[0] is 1, neither"),
        ([True, False], "prompts[0] is True, neither"),
        ([[1, 2.5]], "prompts[0] is [1, 2.5], neither"),
        ([["a"]], "prompts[0] is ['a'], neither"),
        ([[[1]]], "prompts[0] is [[1]], neither"),
        (["a", None], "prompts[1] is None, neither"),
        ([b"a"], "prompts[0] is b'a', neither"),
        (torch.tensor([0.5]), "prompts[0] is 0.5, neither"),
        (torch.tensor(3), "tensor(3) is no prompt"),
    ],
)
def test_anything_else_is_named(prompts: Any, message: str) -> None:
    with pytest.raises(RequestError) as error:
        read_prompts(prompts)
    assert str(error.value).startswith(message)
    assert error.value.param == "prompts"


def test_params_are_one_for_all_or_one_for_each() -> None:
    assert params_for_each(None, 2) == [SamplingParams()] * 2
    assert params_for_each(ONE, 2) == [ONE, ONE]
    assert params_for_each((ONE, TWO), 2) == [ONE, TWO]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([ONE], "2 prompts and 1 sampling parameters"),
        ({"max_tokens": 1}, "params is {'max_tokens': 1}"),
        ("greedy", "params is 'greedy'"),
        ([ONE, None], "params is [SamplingParams"),
    ],
)
def test_other_params_are_named(params: Any, message: str) -> None:
    with pytest.raises(RequestError) as error:
        params_for_each(params, 2)
    assert str(error.value).startswith(message)
