"""Bodies that say everything an API has, spoilt in a place or three: refused in one line that names the field."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from k3hal.engine.replay import ReplayEngine
from k3hal.engine.replay_file import ReplayLine
from k3hal.serve.app import create_app
from k3hal.serve.state import ServerConfig, ServerState

from .conftest import TOKENIZER

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 1},
        "b": {"anyOf": [{"type": "string", "maxLength": 3}, {"$ref": "#/$defs/x"}]},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"x": {"enum": [1, "z", None]}},
}
FORMAT = {"name": "n", "schema": SCHEMA, "strict": True}


def function(name: str) -> dict[str, Any]:
    return {"name": name, "description": "d", "parameters": SCHEMA, "strict": True}


def called(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "f", "arguments": arguments}}


CHAT = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "system", "tools": [{"type": "function", "function": function("g")}]},
        {"role": "user", "name": "u", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "reasoning_content": "r",
         "tool_calls": [called("c", '{"a": 1e2}'), called("d", {"a": {"q": [1]}})]},
        {"role": "tool", "tool_call_id": "d", "content": "1"},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "2"}]},
        {"role": "user", "content": "y"},
    ],
    "tools": [{"type": "function", "function": function("f")}],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}},
    "response_format": {"type": "json_schema", "json_schema": FORMAT},
    "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "stop": ["a", "b"], "logit_bias": {"1": 2},
    "stream_options": {"include_usage": True}, "thinking": {"type": "enabled", "effort": "low", "keep": "all"},
    "chat_template_kwargs": {"thinking": True, "preserve_thinking": True},
}  # fmt: skip
RESPONSE = {
    "instructions": "i",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "o", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "e", "name": "k", "input": "z"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "e", "output": [{"type": "input_text", "text": "x"}]},
    ],
    "tools": [
        {"type": "function", **function("f")},
        {"type": "custom", "name": "k", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", **function("f")}]},
        {"type": "web_search"},
    ],
    "text": {"format": {"type": "json_schema", **FORMAT}, "verbosity": "low"},
    "reasoning": {"effort": "high"}, "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    "max_output_tokens": 3, "metadata": {"a": "b"},
}  # fmt: skip
MESSAGE = {
    "max_tokens": 3,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "q"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}, {"type": "redacted_thinking"}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1"}]},
            {"type": "text", "text": "y"}]},
    ],
    "tools": [{"name": "f", "input_schema": SCHEMA, "strict": True}, {"type": "web_search_20250305", "name": "w"}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
    "stop_sequences": ["z"],
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/render": CHAT,
    "/v1/responses": RESPONSE,
    "/v1/responses/input_tokens": RESPONSE,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": MESSAGE,
}
ODD: list[Any] = [
    None, 1, -1, 1.5, 1e300, 2**63, True, "", "x", "a" * 1000, "\u0000", "<|close|>", [], [1], ["x"], [None], [[]],
    {}, {"": ""}, {"a": 1}, {"type": "x"}, {"type": 1}, {"type": "image", "source": {}}, {"type": "image_url"},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything within `value`."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from places(part, (*path, key))


def spoil(body: dict[str, Any], random: random.Random) -> None:
    """Put something odd in one place, or nothing at all."""
    *path, last = random.choice(list(places(body)))
    at: Any = body
    for key in path:
        at = at[key]
    if random.random() < 0.15:
        del at[last]
    else:
        at[last] = copy.deepcopy(random.choice(ODD))


@pytest.mark.parametrize("count", [300, pytest.param(50_000, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])])
def test_whatever_is_wrong_is_named_in_a_line(count: int) -> None:
    engine = ReplayEngine([ReplayLine((1, 2, 3), 1, 0)], TOKENIZER, max_model_len=8000)
    state = ServerState(engine, TOKENIZER, ServerConfig(model_names=("k3",), warm_up="off"))
    choose = random.Random(count)
    refused = 0
    with TestClient(create_app(state)) as http:
        for path, body in BODIES.items():
            assert http.post(path, json=body).status_code == 200, path
        for _ in range(count):
            path = choose.choice(list(BODIES))
            body = copy.deepcopy(BODIES[path])
            for _ in range(choose.choice([1, 1, 2, 3])):
                spoil(body, choose)
            answer = http.post(path, json=body)
            assert answer.status_code in (200, 400, 404), (path, body, answer.text)
            if answer.status_code != 200:
                refused += 1
                check_named(answer.json()["error"], path, body)
    assert 0.3 < refused / count < 0.95


def check_named(error: dict[str, Any], path: str, body: dict[str, Any]) -> None:
    message = error["message"]
    assert message and "\n" not in message and len(message) < 400, (path, body, message)
    if path.startswith("/v1/messages"):
        return  # Anthropic's errors have no other field
    field = (error["param"] or "").split(".")[0].split("[")[0]
    assert field in body or (field and field in message), (path, body, error)
