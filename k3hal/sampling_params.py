"""How one request is sampled. Plain data; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from k3hal.errors import RequestError

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling, length and stopping of one request (names as in OpenAI's and vLLM's APIs).

    `temperature`, `top_p`, `top_k` and `min_p` left at None take the checkpoint's generation defaults.
    `top_k` 0 or -1 is off. `max_tokens` None runs to the context length. `logprobs` is the number of
    alternatives reported per token (0: only the chosen token's; None: none). `stop` strings are matched on text
    by the layer that owns the text; `stop_token_ids` add to the model's end ids, all unused under `ignore_eos`
    except `stop_token_ids`. `seed` makes a request reproducible whatever else is in the batch.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple_of(str, "stop", stop, "texts"))
        object.__setattr__(self, "stop_token_ids", _tuple_of(int, "stop_token_ids", self.stop_token_ids, "token ids"))
        _check_integer("n", self.n, 1, 128)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_integer("top_k", self.top_k, -1, 2**31)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check_integer("max_tokens", self.max_tokens, 1, 2**31)
        _check_integer("min_tokens", self.min_tokens, 0, 2**31)
        _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_integer("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r:.100}", param=name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}", param="min_tokens"
            )
        if any(not s for s in self.stop):
            raise RequestError("stop must not hold an empty text", param="stop")
        _check_bias(self.logit_bias)

    def continuation(self, index: int) -> SamplingParams:
        """The parameters of number `index` of the `n` continuations: with a seed, each has its own."""
        if self.n == 1:
            return self
        seed = None if self.seed is None else (self.seed + index) % 2**63
        return replace(self, n=1, seed=seed)


def _tuple_of(kind: type, name: str, value: Any, what: str) -> tuple[Any, ...]:
    """`value`, a list or another sequence of `kind`, as a tuple. Raises `RequestError`."""
    items = tuple(value) if isinstance(value, Sequence | Set) and not isinstance(value, str | bytes) else None
    if items is None or not all(isinstance(item, kind) and not isinstance(item, bool) for item in items):
        raise RequestError(f"{name} must be a list of {what}, got {value!r:.100}", param=name)
    return items


def _check_bias(bias: Any) -> None:
    if bias is not None and not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {bias!r:.100}", param="logit_bias")
    for token, value in (bias or {}).items():
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise RequestError(f"logit_bias keys are token ids, got {token!r:.100}", param="logit_bias")
        _check_range("logit_bias", value, -100.0, 100.0)


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    """Raise a `RequestError` naming the field unless `value` is None or an integer in range."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r:.100}", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be in [{low}, {high}], got {value}", param=name)


def _check_range(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise a `RequestError` naming the field unless `value` is None or a finite number in range."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, got {value!r:.100}", param=name)
    if value < low or value > high or (open_low and value <= low):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value:g}", param=name)
