"""What the Python API returns, and how engine increments become it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from k3hal.engine.detokenize import IncrementalDetokenizer
from k3hal.engine.interface import EngineOutput, TokenLogprob
from k3hal.engine.stop_strings import StopStrings
from k3hal.sampling_params import SamplingParams
from k3hal.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    `text` has no special tokens and ends before a matched stop string or stop id unless
    `include_stop_str_in_output`; `token_ids` (and `logprobs`, one each, when asked for) include what matched.
    `finish_reason` is `stop`, `length`, `tool_calls` (chat only) or `error`, in which case `error` says why.
    `stop_reason` is the stop string or stop id that matched. `reasoning` and `tool_calls` are a chat's.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its `n` continuations. `num_cached_tokens` of the prompt did not have to be computed."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0


class Collector:
    """Gathers one sequence. `done` once it needs no further increment; `stopped_early` when the engine must be told."""

    def __init__(self, index: int, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._index = index
        self._params = params
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._finish: str | None = None
        self._stop_reason: int | str | None = None
        self._error: str | None = None
        self.num_cached_tokens = 0
        self.stopped_early = False

    @property
    def done(self) -> bool:
        return self._finish is not None

    def feed(self, output: EngineOutput) -> None:
        """Take an increment. After `done` nothing changes any more."""
        if self.done:
            return
        self.num_cached_tokens = output.num_cached_tokens
        for number, token in enumerate(output.token_ids):
            self._token_ids.append(token)
            if output.logprobs is not None:
                self._logprobs.append(output.logprobs[number])
            ends = output.finish_reason is not None and number == len(output.token_ids) - 1
            hidden = ends and output.stop_reason is not None and not self._params.include_stop_str_in_output
            self._add_text("" if hidden else self._detokenizer.add(token))
            if self._stops.matched is not None:
                self._finish, self._stop_reason = "stop", self._stops.matched
                self.stopped_early = output.finish_reason is None
                return
        if output.finish_reason is not None:
            self._end(output)

    def result(self) -> CompletionOutput:
        assert self._finish is not None
        return CompletionOutput(
            index=self._index,
            text="".join(self._text),
            token_ids=self._token_ids,
            finish_reason=self._finish,
            stop_reason=self._stop_reason,
            logprobs=self._logprobs if self._params.logprobs is not None else None,
            error=self._error,
        )

    def _add_text(self, text: str) -> None:
        """Pass text through the stop strings, which wait for `min_tokens` tokens."""
        armed = len(self._token_ids) > self._params.min_tokens
        self._text.append(self._stops.feed(text) if armed else self._stops.flush() + text)

    def _end(self, output: EngineOutput) -> None:
        self._text.append(self._stops.feed(self._detokenizer.flush()))
        if self._stops.matched is not None:
            self._finish, self._stop_reason = "stop", self._stops.matched
            return
        self._text.append(self._stops.flush())
        self._finish, self._stop_reason, self._error = output.finish_reason, output.stop_reason, output.error
