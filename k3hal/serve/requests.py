"""The request bodies the server reads, and how their fields become sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from k3hal.errors import RequestError
from k3hal.sampling_params import SamplingParams
from k3hal.serve.chat_prompt import RENDER_FIELDS
from k3hal.serve.fields import renamed

MAX_STOP_STRINGS = 32
_MOST_DIGITS = 20
"""Of a token id: Python refuses to read numbers of some thousands."""
Prompt = str | list[str] | list[int] | list[list[int]]
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(BaseModel):
    """What chat and plain completions share. Unknown fields are ignored; null is the same as absent."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    request_id: str | None = Field(default=None, max_length=256)
    cache_salt: str | None = None
    return_token_ids: bool | None = None

    def sampling(self, defaults: Mapping[str, Any], vocab_size: int, **fields: Any) -> SamplingParams:
        """The sampling parameters; what the request leaves open comes from the checkpoint's `defaults`.

        `fields` are set over what the request says. Raises `RequestError` naming the field that is out of range.
        """
        given = {name: getattr(self, name) for name in SamplingParams.__dataclass_fields__ if hasattr(self, name)}
        given["logit_bias"] = _logit_bias(self.logit_bias, vocab_size)
        given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(given["stop"]) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop must hold at most {MAX_STOP_STRINGS} texts, got {len(given['stop'])}", param="stop"
            )
        check_ids(self.stop_token_ids or (), vocab_size, "stop_token_ids")
        given |= fields
        for name in _DEFAULTED:
            if given[name] is None:
                given[name] = defaults.get(name)
        limit = given.pop("max_tokens")
        return SamplingParams(max_tokens=limit, **{name: value for name, value in given.items() if value is not None})


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`; the fields that shape the prompt are read by the renderer."""

    RENDERED: ClassVar = RENDER_FIELDS

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def params(self, defaults: Mapping[str, Any], vocab_size: int) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.add_generation_prompt is False or self.continue_final_message:
            raise RequestError(
                'the prompt always ends with an open answer; to continue a text, mark the last message "partial": true',
                param="continue_final_message" if self.continue_final_message else "add_generation_prompt",
            )
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        with renamed(names):
            return self.sampling(defaults, vocab_size, max_tokens=limit, logprobs=logprobs)


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Prompt
    truncate_prompt_tokens: int | None = Field(default=None, ge=1)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None

    def params(self, defaults: Mapping[str, Any], vocab_size: int) -> SamplingParams:
        if self.suffix:
            raise RequestError("suffix is not supported", param="suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("best_of is not supported unless it equals n", param="best_of")
        if self.echo and self.logprobs is not None:
            raise RequestError("echo with logprobs is not supported", param="logprobs")
        limit = 16 if self.max_tokens is None else self.max_tokens
        return self.sampling(defaults, vocab_size, max_tokens=limit, logprobs=self.logprobs)


R = TypeVar("R", bound=BaseModel)


_EXPECTED = {
    "prompt": "a text, a list of texts, token ids, or a list of those",
    "stop": "a text or a list of texts",
}
"""What fields of several types take; the validator would name only the first type."""


def read_request(kind: type[R], body: Mapping[str, Any]) -> R:
    """Validate a body. Raises `RequestError` naming the first field that is wrong."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        param = str(problem["loc"][0]) if problem["loc"] else None
        if problem["type"] == "missing":
            raise RequestError(f"{param} is missing", param=param) from None
        if param in _EXPECTED:
            raise RequestError(f"{param} must be {_EXPECTED[param]}, got {body[param]!r:.100}", param=param) from None
        raise RequestError(f"{param}: {problem['msg'].lower()}, got {problem['input']!r:.100}", param=param) from None


def check_prompt(ids: list[int], vocab_size: int, context: int, param: str) -> None:
    """Refuse an empty prompt, unknown ids, and a prompt that leaves no room for one token. `param` is its field."""
    if not ids:
        raise RequestError("the prompt is empty", param=param)
    if len(ids) >= context:
        raise RequestError(
            f"the prompt has {len(ids)} tokens, but the context is {context} and must hold at least one more",
            param=param,
        )
    check_ids(ids, vocab_size, param)


def check_ids(ids: list[int] | tuple[int, ...], vocab_size: int, param: str) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(f"{param}: token id {token} is outside the vocabulary of {vocab_size}", param=param)


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not bias:
        return None
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= _MOST_DIGITS) or int(key) >= vocab_size:
            raise RequestError(
                f"logit_bias keys are token ids below {vocab_size}, got {key!r:.100}", param="logit_bias"
            )
    return {int(key): value for key, value in bias.items()}
