"""The settings of `k3hal generate`: what is asked, how it is sampled, and the engine's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator

from k3hal.errors import UsageError
from k3hal.sampling_params import SamplingParams
from k3hal.settings import Settings

_SAMPLING = (
    "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "logprobs",
)  # fmt: skip
_SOURCES = ("prompt", "chat", "messages", "input")

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
CHAT: Endpoint = "/v1/chat/completions"
COMPLETION: Endpoint = "/v1/completions"


class GenerateSettings(Settings):
    """Field names are the flags' names; a `--config` file uses the same."""

    model: str | None = None
    served_model_name: str | None = None
    prompt: str | None = None
    chat: str | None = None
    messages: Path | None = None
    input: Path | None = None
    output: Path | None = None
    retry_failed: bool = False
    stream: bool | None = None
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
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    thinking_effort: str | None = None

    @field_validator("stop", "stop_token_ids", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        """A single value in a file stands for a list of one."""
        return [value] if isinstance(value, str | int) else value

    def check(self, *, as_json: bool) -> None:
        """Refuse flags that contradict each other and values out of range. Raises `UsageError` or `RequestError`."""
        given = [f"--{name}" for name in _SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            problem = f"{' and '.join(given)} exclude each other" if given else "nothing to generate from"
            raise UsageError(problem, hint="give one of --prompt, --chat, --messages and --input")
        if (self.input is None) != (self.output is None):
            lone, missing = ("--output", "--input") if self.input is None else ("--input", "--output")
            raise UsageError(f"{lone} needs {missing}", hint="a batch reads one file and writes another")
        if self.retry_failed and self.input is None:
            raise UsageError("--retry-failed is for a batch", hint="give --input and --output")
        if self.stream and (as_json or self.input is not None or (self.n or 1) > 1):
            raise UsageError("--stream prints one answer as text", hint="leave out --json, --input and --n")
        if self.logprobs is not None and not as_json and self.input is None:
            raise UsageError("--logprobs has no place in plain text", hint="add --json")
        if self.thinking_effort is not None and self.prompt is not None:
            raise UsageError("--thinking-effort shapes a chat", hint="use --chat or --messages")
        SamplingParams(**{name: value for name, value in self._sampling().items() if value is not None})

    def fields(self, endpoint: Endpoint) -> dict[str, Any]:
        """The sampling flags that were given, as fields of a request body."""
        fields = {name: value for name, value in self._sampling().items() if value is not None}
        if endpoint == CHAT:
            if "logprobs" in fields:
                fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
            if self.thinking_effort is not None:
                fields["thinking_effort"] = self.thinking_effort
        return fields

    def _sampling(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SAMPLING}
