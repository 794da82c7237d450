"""What every endpoint needs: the engine, the tokenizer, the configuration, and whether the server is ready."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from k3hal.engine.interface import Constraint, Engine, EngineRequest, PrefixContext
from k3hal.errors import DrainingError
from k3hal.sampling_params import SamplingParams
from k3hal.serve.grammar.compiler import Constraints
from k3hal.serve.http_errors import HttpError
from k3hal.serve.keys import KeyRing, Limits
from k3hal.serve.metrics import Metrics
from k3hal.serve.responses.store import ResponseStore
from k3hal.serve.router import Generation, Router
from k3hal.serve.thinking import ThinkingDefaults
from k3hal.tokenizer import END_OF_MSG, Tokenizer

WarmUp = Literal["off", "quick", "full"]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the server behaves. `model_names` are the ids it answers to, the first one being its own."""

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None
    limits: Limits = field(default_factory=Limits)
    """What a key may do that says nothing else; without keys, what all clients together may."""
    cors_origins: tuple[str, ...] = ()
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    thinking: ThinkingDefaults = field(default_factory=ThinkingDefaults)
    metrics_compat: bool = True
    refuse_unknown_fields: bool = False
    kimi_strict_params: bool = False
    max_body_bytes: int = 64 * 1024 * 1024
    body_timeout: float = 60.0
    """Seconds that a client may take to send a body."""
    drain_delay: float = 0.0
    """Seconds between being told to stop, when `/ready` turns, and refusing new requests."""
    drain_timeout: float = 30.0
    keep_alive: float = 15.0
    """Seconds between comments on a stream that waits for its first token."""
    warm_up: WarmUp = "quick"
    request_timeout: float | None = None
    """Seconds that an answer may take, its waiting included."""
    write_timeout: float = 60.0
    head_timeout: float = 30.0
    idle_timeout: float = 5.0
    """Seconds: of a client that does not read, of a request's head, of a connection between requests."""
    log_prompts: bool = False
    max_stored_responses: int = 256
    max_stored_bytes: int = 256 * 1024 * 1024
    page: bool = True
    """Whether the page at `/` is served."""
    plan: Mapping[str, Any] | None = None
    """The dispatch plan in the form of a plan file, for the page; None where the engine has none."""


class ServerState:
    """The running server. Whether it is `ready`, `leaving` or `draining` changes over its life; the rest does not."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, config: ServerConfig) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.keys = KeyRing(config.api_keys, config.api_key_file, config.limits)
        self.router = Router(engine)
        self.constraints = Constraints(tokenizer, engine.info.vocab_size)
        self.metrics = Metrics(engine, config.model_names[0], compat=config.metrics_compat)
        self.responses = ResponseStore(config.max_stored_responses, config.max_stored_bytes)
        self.created = int(time.time())
        self.leaving = False
        self.draining = False
        self._warm = False
        self._end_of_message = tokenizer.special(END_OF_MSG)

    @property
    def ready(self) -> bool:
        """Whether the server wants traffic: warmed up and not shutting down."""
        return self._warm and not self.leaving

    @property
    def status(self) -> Literal["starting", "ready", "draining", "dead"]:
        """The same in a word, with why not; whatever it was, a server without an engine is dead."""
        if self.engine.stats().dead is not None:
            return "dead"
        return "ready" if self.ready else "draining" if self.leaving else "starting"

    def warmed_up(self) -> None:
        self._warm = True
        self.metrics.ready = True

    def leave(self) -> None:
        """Want no more traffic, but answer what still comes: whoever sends it learns of that from `/ready`."""
        self.leaving = True
        self.metrics.ready = False

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.leave()
        self.draining = True

    def model_name(self, asked: str | None) -> str:
        """The model a request means; 404 if it is not served here."""
        if asked is None:
            return self.config.model_names[0]
        if asked not in self.config.model_names:
            raise HttpError(
                404,
                f"the model {asked!r:.100} does not exist; this server has {', '.join(self.config.model_names)}",
                kind="invalid_request_error",
                code="model_not_found",
                param="model",
            )
        return asked

    def submit(
        self,
        name: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        priority: int | None,
        cache_salt: str | None = None,
        constraint: Constraint | None = None,
    ) -> Generation:
        """Queue `params.n` sequences per prompt, numbered prompt by prompt.

        Only requests of the same `cache_salt` share cached prefixes. A `constraint` holds for every sequence.
        """
        if self.draining:
            raise DrainingError("the server is shutting down")
        requests = [
            EngineRequest(
                f"{name}-{p * params.n + i}",
                prompt,
                params.continuation(i),
                priority=priority or 0,
                context=context,
                constraint=constraint,
            )
            for p, prompt in enumerate(prompts)
            for context in [self._context(prompt, cache_salt)]
            for i in range(params.n)
        ]
        return self.router.submit(requests)

    def _context(self, prompt: Sequence[int], cache_salt: str | None) -> PrefixContext:
        """Whom a prompt shares prefixes with, and the ends of its messages, where others may part from it."""
        ends = [i + 1 for i, token in enumerate(prompt) if token == self._end_of_message]
        return PrefixContext(salt=cache_salt or "", boundaries=tuple(ends))


def new_id(prefix: str, asked: str | None = None) -> str:
    """An id that begins with `prefix`; one the client asked for is kept, made unique."""
    return f"{prefix}{asked}-{uuid.uuid4().hex[:8]}" if asked else f"{prefix}{uuid.uuid4().hex}"
