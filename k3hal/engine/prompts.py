"""What callers of the Python API may call prompts."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from k3hal.errors import RequestError
from k3hal.sampling_params import SamplingParams


def read_prompts(prompts: Any) -> list[str | list[int]]:
    """A text, token ids, or several of either as a list; arrays and tensors of ids count as lists.

    Raises `RequestError` naming the first item that is neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts)
    if items is None:
        raise RequestError(f"{_shown(prompts)} is no prompt", hint=_EXPECTED, param="prompts")
    if items and all(map(_is_id, items)):
        return [[operator.index(item) for item in items]]
    return [_read(item, f"prompts[{number}]") for number, item in enumerate(items)]


def params_for_each(params: Any, count: int) -> list[SamplingParams]:
    """The parameters of `count` prompts: one for all (None: the defaults) or one for each."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    items = _items(params)
    if items is None or not all(isinstance(item, SamplingParams) for item in items):
        raise RequestError(
            f"params is {_shown(params)}", hint="it is a SamplingParams, or one for each", param="params"
        )
    if len(items) != count:
        raise RequestError(f"{count} prompts and {len(items)} sampling parameters", param="params")
    return items


_EXPECTED = "give a text, token ids, or a list of texts or of token ids"


def _read(item: Any, where: str) -> str | list[int]:
    if isinstance(item, str):
        return item
    ids = _items(item)
    if ids is None or not all(map(_is_id, ids)):
        raise RequestError(f"{where} is {_shown(item)}, neither a text nor token ids", hint=_EXPECTED, param="prompts")
    return [operator.index(token) for token in ids]


def _items(value: Any) -> list[Any] | None:
    """The items of a list, tuple, array or tensor; None for anything else, text and bytes included."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray) else None


def _is_id(item: Any) -> bool:
    """Whether `item` is an integer, numpy and torch scalars included; their longer arrays also have `__index__`."""
    return hasattr(item, "__index__") and not isinstance(item, bool) and getattr(item, "ndim", 0) == 0


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
