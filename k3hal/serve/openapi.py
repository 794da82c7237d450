"""`GET /openapi.json`: the API as a document, made from the models that read the requests."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any, NamedTuple

from pydantic import BaseModel

from k3hal import __version__
from k3hal.serve.messages.request import CountRequest as MessagesCountRequest
from k3hal.serve.messages.request import MessagesRequest
from k3hal.serve.requests import ChatRequest, CompletionRequest
from k3hal.serve.responses.request import CountRequest as ResponsesCountRequest
from k3hal.serve.responses.request import ResponsesRequest
from k3hal.serve.tokens import Detokenize, Tokenize

_OBJECT: dict[str, Any] = {"type": "object"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_ANY_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "items": _OBJECT}]}
_MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": _ANY_TEXT,
        "name": _TEXT_OR_NULL,
        "reasoning_content": _TEXT_OR_NULL,
        "tool_calls": {"type": ["array", "null"], "items": _OBJECT},
        "tool_call_id": _TEXT_OR_NULL,
        "partial": {"type": ["boolean", "null"]},
    },
}
_FUNCTION = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string"}, "description": _TEXT_OR_NULL, "parameters": _OBJECT},
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
}
# What shapes a prompt is read by the renderer, not by a model.
_RENDERED: dict[str, Any] = {
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "tools": {"type": ["array", "null"], "items": _TOOL},
    "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required"]}, {"type": "null"}, _OBJECT]},
    "response_format": {"anyOf": [{"type": "null"}, _OBJECT]},
    "thinking": {"anyOf": [{"type": ["boolean", "null"]}, _OBJECT]},
    "thinking_effort": {"enum": ["low", "high", "max", None]},
    "reasoning_effort": {"enum": ["none", "low", "high", "max", None]},
    "enable_thinking": {"type": ["boolean", "null"]},
    "chat_template_kwargs": {"anyOf": [{"type": "null"}, _OBJECT]},
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _TEXT_OR_NULL,
                "code": _TEXT_OR_NULL,
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_REFUSALS = ("400", "401", "404", "408", "413", "415", "429", "500", "503", "504")


class _Post(NamedTuple):
    path: str
    does: str
    body: type[BaseModel]
    streams: bool = False
    rendered: bool = False


_POSTS = (
    _Post("/v1/chat/completions", "Answer a chat", ChatRequest, streams=True, rendered=True),
    _Post("/v1/chat/completions/render", "Show the prompt of a chat", ChatRequest, rendered=True),
    _Post("/v1/completions", "Continue a prompt", CompletionRequest, streams=True),
    _Post("/v1/responses", "Make a response", ResponsesRequest, streams=True),
    _Post("/v1/responses/input_tokens", "Count the tokens of a response's prompt", ResponsesCountRequest),
    _Post("/v1/messages", "Answer Anthropic's messages", MessagesRequest, streams=True),
    _Post("/v1/messages/count_tokens", "Count the tokens of their prompt", MessagesCountRequest),
    _Post("/tokenize", "Token ids of a text or a chat", Tokenize, rendered=True),
    _Post("/detokenize", "The text of token ids", Detokenize),
)
_GETS = {
    "/v1/models": "The served model under each of its names",
    "/v1/models/{name}": "One of them",
    "/v1/responses/{name}": "A stored response",
    "/health": "Whether the process lives",
    "/ping": "The same",
    "/ready": "Whether it wants traffic",
    "/load": "How busy it is",
    "/version": "Its version",
}


@lru_cache(maxsize=1)
def openapi() -> dict[str, Any]:
    """The document, in version 3.1 of its format."""
    schemas: dict[str, Any] = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    paths: dict[str, Any] = {}
    for post in _POSTS:
        paths.setdefault(post.path, {})["post"] = _post(post, schemas)
    for path, does in _GETS.items():
        paths.setdefault(path, {})["get"] = _operation(path, does, _json(_OBJECT))
    paths["/v1/responses/{name}"]["delete"] = _operation("/v1/responses/{name}", "Delete it", _json(_OBJECT))
    cancel = "/v1/responses/{name}/cancel"
    paths[cancel] = {"post": _operation(cancel, "Refused: no response is made in the background", _json(_OBJECT))}
    text = {"text/plain": {"schema": {"type": "string"}}}
    paths["/metrics"] = {"get": _operation("/metrics", "Prometheus metrics", text)}
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "K3HAL", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": keys},
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _post(post: _Post, schemas: dict[str, Any]) -> dict[str, Any]:
    name = post.path.strip("/").replace("/", "_").replace("v1_", "")
    schema = post.body.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= schema.pop("$defs", {})
    schemas[name] = _with_rendered(schema) if post.rendered else schema
    content = _json(_OBJECT)
    if post.streams:
        content |= {"text/event-stream": {"schema": {}}}
    body = {"required": True, "content": _json({"$ref": f"#/components/schemas/{name}"})}
    return _operation(post.path, post.does, content) | {"requestBody": body}


def _with_rendered(schema: dict[str, Any]) -> dict[str, Any]:
    schema = copy.deepcopy(schema)
    own = schema["properties"]
    schema["properties"] = _RENDERED | own
    if "messages" not in own:
        schema["required"] = [*schema.get("required", ()), "messages"]
    return schema


def _operation(path: str, does: str, content: dict[str, Any]) -> dict[str, Any]:
    error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    refusal = {"description": "Refused", "content": _json({"$ref": f"#/components/schemas/{error}"})}
    answers = {"200": {"description": "The answer", "content": content}, **dict.fromkeys(_REFUSALS, refusal)}
    if path in ("/health", "/ping", "/ready"):
        answers = {"200": answers["200"], "503": {"description": "No", "content": _json(_OBJECT)}}
    operation: dict[str, Any] = {"summary": does, "responses": answers}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
