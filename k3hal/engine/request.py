"""One sequence in the engine: its tokens, how many of them are computed, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from k3hal.engine.cache.interface import SequenceCache
from k3hal.engine.cache.keys import NO_CONTEXT, PrefixContext, UnitKeys
from k3hal.engine.constraint import Constraint
from k3hal.engine.interface import EngineRequest, FinishReason, RequestTiming
from k3hal.engine.sampling import GenerationDefaults, Sampling, resolve_sampling
from k3hal.errors import RequestError

NO_ROW = -1


def check_token_ids(token_ids: Sequence[int] | np.ndarray, vocab_size: int, max_model_len: int) -> np.ndarray:
    """The prompt as int64 [T]. Raises `RequestError` when it is empty, too long, or holds a foreign id."""
    try:
        ids = np.asarray(token_ids)
    except ValueError as error:
        raise RequestError("a prompt must be a flat list of token ids", param="prompt") from error
    if ids.size == 0:
        raise RequestError("the prompt is empty", hint="give at least one token", param="prompt")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError("a prompt must be a flat list of integer token ids", param="prompt")
    if ids.size >= max_model_len:
        raise RequestError(
            f"the prompt has {ids.size} tokens and the model takes at most {max_model_len - 1}, so that one can follow",
            hint="shorten the prompt or raise --max-model-len",
            param="prompt",
        )
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if bad.size:
        raise RequestError(f"token id {bad[0]} is outside the vocabulary of {vocab_size}", param="prompt")
    return ids.astype(np.int64)


@dataclass(slots=True, eq=False)
class Request:
    """A sequence and its progress.

    The first `num_tokens` of `buffer` are the prompt and what was generated. Once every step that is planned has run,
    the cache holds the first `num_computed` tokens, in row `row`, whose pages take `capacity` tokens, and `pending`
    more tokens have been sampled; `last_epoch` is the last of those steps. `surplus` tokens follow in `buffer` that
    were sampled behind the end of a request which ended while steps were under way: the cache holds them, nobody gets
    them. `spoilt` when what the cache holds is not to be trusted, `verifying` while a step with drafts of it is under
    way. `keys` name its prefixes to the cache, in its `context`. `rank` orders requests: lower priority numbers first,
    then arrival.
    """

    id: str
    sampling: Sampling
    rank: tuple[int, int]
    buffer: np.ndarray
    num_prompt: int
    arrival: float
    num_tokens: int = 0
    num_computed: int = 0
    pending: int = 0
    surplus: int = 0
    spoilt: bool = False
    verifying: bool = False
    last_epoch: int = -1
    row: int = NO_ROW
    capacity: int = 0
    last_token: int = -1
    num_cached_tokens: int = 0
    scheduled: float = 0.0
    first_token: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = field(default=None)
    dead_end: bool = False
    context: PrefixContext = NO_CONTEXT
    keys: UnitKeys | None = None
    constraint: Constraint | None = None

    @classmethod
    def create(
        cls,
        request: EngineRequest,
        sequence: int,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        defaults: GenerationDefaults,
    ) -> Request:
        """Check a request and give it its place (`sequence`, growing). Raises `RequestError`."""
        ids = check_token_ids(request.prompt_token_ids, vocab_size, max_model_len)
        if request.images:
            raise RequestError("the served model takes text only", param="messages")
        params = request.params
        foreign = [t for t in (*params.stop_token_ids, *(params.logit_bias or ())) if not 0 <= t < vocab_size]
        if foreign:
            name = "stop_token_ids" if foreign[0] in params.stop_token_ids else "logit_bias"
            raise RequestError(f"{name} holds {foreign[0]}, outside the vocabulary of {vocab_size}", param=name)
        sampling = resolve_sampling(params, defaults, eos_token_ids=eos_token_ids, room=max_model_len - ids.size)
        return cls(
            id=request.request_id,
            sampling=sampling,
            rank=(request.priority, sequence),
            buffer=ids,
            num_prompt=ids.size,
            num_tokens=ids.size,
            arrival=request.arrival_time,
            context=request.context,
            constraint=request.constraint,
        )

    @property
    def token_ids(self) -> np.ndarray:
        return self.buffer[: self.num_tokens]

    @property
    def computed(self) -> np.ndarray:
        """The tokens the cache holds. All of them must be known."""
        return self.buffer[: self.num_computed]

    @property
    def known(self) -> bool:
        """Whether every token that the cache holds is known."""
        return self.num_computed <= self.num_tokens + self.surplus

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens, known or about to be, that are not in the cache yet; at least one while the request is alive."""
        return self.num_tokens + self.pending - self.num_computed

    @property
    def decoding(self) -> bool:
        """Whether one token on top of a valid state is all that is left."""
        return self.remaining == 1 and self.num_computed > 0

    @property
    def full(self) -> bool:
        """Whether what is under way gives it the last token it may have."""
        return self.num_output + self.pending >= self.sampling.max_tokens

    def append(self, token: int) -> None:
        """Take one generated token and see whether it ends the request.

        No end comes before `min_tokens`, but where a constraint leaves nothing else.
        """
        self._write(self.num_tokens, token)
        self.last_token = token
        self.num_tokens += 1
        sampling = self.sampling
        armed = self.num_output >= sampling.min_tokens
        if armed and token in sampling.stop_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif token in sampling.end_ids and (armed or self.constraint is not None):
            self.finish_reason = "stop"
        elif self.num_output >= sampling.max_tokens:
            self.finish_reason = "length"

    def set_capacity(self, cache: SequenceCache) -> None:
        """Remember the tokens its row has pages for; without pages only the table's width limits it."""
        pages = int(cache.num_pages[self.row])
        self.capacity = pages * cache.page_tokens if pages else cache.longest_sequence()

    def append_surplus(self, token: int) -> None:
        """Take a token that was sampled behind the end; -1 for one that could not be."""
        self.spoilt = self.spoilt or token < 0
        self._write(self.num_tokens + self.surplus, max(token, 0))
        self.surplus += 1

    def _write(self, place: int, token: int) -> None:
        if place == self.buffer.size:
            self.buffer = np.concatenate((self.buffer, np.zeros(max(self.buffer.size, 64), np.int64)))
        self.buffer[place] = token

    def timing(self) -> RequestTiming:
        """The request's life so far; called when it has ended."""
        return RequestTiming(self.arrival, self.scheduled, self.first_token, time.monotonic())
