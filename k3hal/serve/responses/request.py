"""A body of OpenAI's `/v1/responses` as the body of a chat completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from k3hal.errors import RequestError
from k3hal.serve.efforts import folded_effort
from k3hal.serve.responses.items import Conversation
from k3hal.serve.responses.tools import Toolbox, spaced

Item = dict[str, Any]
ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
_REFUSED = {
    "background": "keep the connection, or ask again",
    "conversation": "send the items, or previous_response_id",
    "prompt": "send instructions and input",
}
OWN_NAMES = {
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "messages": "input",
}
"""What a chat completion calls otherwise."""


class CountRequest(BaseModel):
    """`POST /v1/responses/input_tokens`."""

    model_config = ConfigDict(extra="ignore", strict=True)
    RENDERED: ClassVar = (
        "max_tool_calls",
        "prompt_cache_options",
        "moderation",
        "background_options",
        "access_programs",
        "client_metadata",
    )

    model: str | None = None
    input: str | list[Any] | None = None
    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    previous_response_id: str | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None

    def items(self) -> list[Item]:
        """The input as items. Raises `RequestError` for anything else."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        for i, item in enumerate(self.input or ()):
            if not isinstance(item, dict):
                raise RequestError(f"input[{i}] must be an object", param=f"input[{i}]")
        return list(self.input or ())


class ResponsesRequest(CountRequest):
    """`POST /v1/responses`; `priority`, `cache_salt` and `seed` mean what they do in a chat completion."""

    stream: bool | None = None
    store: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    stream_options: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    seed: int | None = None


def chat_body(
    asked: CountRequest, earlier: Sequence[Item], own: Sequence[Item], tools: Toolbox
) -> tuple[dict[str, Any], dict[str, str]]:
    """The chat completion that asks for the same, and what the request calls the fields of it that may be wrong.

    The conversation is that of `earlier` items and the request's own. Raises `RequestError` naming the field that is
    wrong.
    """
    for name, instead in _REFUSED.items():
        if getattr(asked, name):
            raise RequestError(f"{name} is not supported", hint=instead, param=name)
    if asked.truncation not in (None, "disabled"):
        raise RequestError("truncation must be disabled: what is sent is what the model sees", param="truncation")
    conversation = Conversation(asked.instructions)
    for item in earlier:
        conversation.read(item, "previous_response_id")
    for i, item in enumerate(own):
        conversation.read(item, f"input[{i}]")
    body: dict[str, Any] = {"model": asked.model, "messages": conversation.out}
    if tools.declared:
        body["tools"] = tools.declared
    if asked.tool_choice is not None:
        body["tool_choice"] = _tool_choice(asked.tool_choice)
    if asked.parallel_tool_calls is not None:
        body["parallel_tool_calls"] = asked.parallel_tool_calls
    effort = (asked.reasoning or {}).get("effort")
    if effort == "none":
        body["thinking"] = False
    elif effort is not None:
        body["thinking_effort"] = folded_effort(effort, "reasoning.effort")
    answer = (asked.text or {}).get("format")
    if answer is not None:
        body["response_format"] = _format(answer)
    if isinstance(asked, ResponsesRequest):
        body |= _sampling(asked)
    return body, OWN_NAMES | conversation.names


def _sampling(asked: ResponsesRequest) -> dict[str, Any]:
    same = ("temperature", "top_p", "stream", "priority", "cache_salt", "seed")
    fields: dict[str, Any] = {name: getattr(asked, name) for name in same}
    wanted = asked.top_logprobs is not None or LOGPROBS in (asked.include or ())
    return fields | {
        "max_tokens": asked.max_output_tokens,
        "logprobs": wanted,
        "top_logprobs": asked.top_logprobs if wanted else None,
    }


def _tool_choice(choice: str | Mapping[str, Any]) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": spaced(choice.get("namespace"), choice.get("name"))}}
    return choice


def _format(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError("text.format must be an object", param="text.format")
    if value.get("type") != "json_schema":
        return {"type": value.get("type")}
    return {"type": "json_schema", "json_schema": {k: value[k] for k in ("name", "schema", "strict") if k in value}}
