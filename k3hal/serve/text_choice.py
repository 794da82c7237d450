"""One choice of a plain completion: engine outputs in, text out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from k3hal.engine.detokenize import IncrementalDetokenizer
from k3hal.engine.interface import EngineOutput, TokenLogprob
from k3hal.sampling_params import SamplingParams
from k3hal.serve.http_errors import raise_if_failed
from k3hal.serve.stoppable_text import StoppableText
from k3hal.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    text: str
    logprobs: list[TokenLogprob]


class TextChoice:
    """Detokenizes one sequence; special tokens are left out. The attributes mean what they do in `ChatChoice`."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._min_tokens = params.min_tokens
        self._detok = IncrementalDetokenizer(tokenizer)
        self._text = StoppableText(params.stop, include=params.include_stop_str_in_output)
        self.cached_tokens = 0
        self.reasoning_tokens = 0
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.stopped_early = False

    @property
    def recoveries(self) -> Mapping[str, int]:
        """None: plain text has no form to recover."""
        return {}

    def feed(self, output: EngineOutput) -> TextDelta:
        """The text an output adds. Raises `HttpError` when the engine gave up."""
        raise_if_failed(output)
        self.cached_tokens = max(self.cached_tokens, output.num_cached_tokens)
        shown: list[str] = []
        for number, token in enumerate(output.token_ids):
            self.token_ids.append(token)
            hidden = self._tokenizer.is_special(token)
            logprob = output.logprobs[number] if output.logprobs and not hidden else None
            armed = len(self.token_ids) > self._min_tokens
            shown.append(self._text.feed(self._detok.add(token), logprob, armed=armed))
            if self._stopped():
                break
        if output.finish_reason is not None and self.finish_reason is None:
            shown.append(self._text.feed(self._detok.flush()))
            if not self._stopped():
                shown.append(self._text.flush())
                self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        return TextDelta("".join(shown), self._text.logprobs())

    def _stopped(self) -> bool:
        if self._text.matched is None:
            return False
        self.finish_reason, self.stop_reason, self.stopped_early = "stop", self._text.matched, True
        return True
