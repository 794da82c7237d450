"""Every refusal names the field that is wrong, in the words of the API that was asked."""

import itertools

import pytest
from starlette.testclient import TestClient

from k3hal.engine.replay import ReplayEngine
from k3hal.engine.replay_file import ReplayLine
from k3hal.serve.app import create_app
from k3hal.serve.requests import ChatRequest, CompletionRequest
from k3hal.serve.responses.request import ResponsesRequest
from k3hal.serve.state import ServerConfig, ServerState

from .conftest import HI, TOKENIZER

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
LONG = "x " * 600
SCHEMA = {"type": "no"}
WRONG = {"type": "json_schema", "name": "s", "schema": SCHEMA}
IMAGE = {"type": "image", "source": {"type": "base64", "data": "", "media_type": "image/png"}}


@pytest.fixture(scope="module")
def http():
    engine = ReplayEngine([ReplayLine((1, 2, 3), 1, 0)], TOKENIZER, max_model_len=700)
    config = ServerConfig(model_names=("k3",), warm_up="off")
    with TestClient(create_app(ServerState(engine, TOKENIZER, config))) as client:
        yield client


def error_of(http, path, body):
    answer = http.post(path, json=body)
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert "\n" not in error["message"] and len(error["message"]) < 300
    return error


def chat(**fields):
    return {"messages": HI, "max_tokens": 5, **fields}


def call(**function):
    return [*HI, {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}]


def function(**fields):
    return {"type": "function", "name": "f", **fields}


ARGUMENTS = "messages[1].tool_calls[0].function.arguments"
NAMED = [
    (CHAT, chat(messages=[{"role": "user", "content": LONG}]), "messages"),
    (CHAT, chat(messages=call(name=3)), "messages[1].tool_calls[0].function.name"),
    (CHAT, chat(messages=call(name="f", arguments="[1]")), ARGUMENTS),
    (CHAT, chat(messages=call(name="f", arguments="[" * 100_000)), ARGUMENTS),
    (CHAT, chat(messages=call(name="f", arguments='{"a":' * 900 + "1" + "}" * 900)), ARGUMENTS),
    (CHAT, chat(messages=[*HI, {"role": "tool", "tool_call_id": "z", "content": "x"}]), "messages[1].tool_call_id"),
    (CHAT, chat(chat_template_kwargs=3), "chat_template_kwargs"),
    (CHAT, chat(thinking={"type": "some"}), "thinking.type"),
    (CHAT, chat(thinking={"effort": "medium"}), "thinking.effort"),
    (CHAT, chat(stream_options={"include_usage": 3}), "stream_options"),
    (TEXT, {"prompt": LONG}, "prompt"),
    (TEXT, {"prompt": ["a"] * 100, "n": 100}, "n"),
    ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
    ("/tokenize", {"messages": [{}]}, "messages[0].role"),
    ("/detokenize", {"tokens": [10**9]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {}, "tokens"),
    (RESPONSES, {}, "input"),
    (RESPONSES, {"input": LONG}, "input"),
    (RESPONSES, {"input": [3]}, "input[0]"),
    (RESPONSES, {"input": [{"role": "cook", "content": "x"}]}, "input[0].role"),
    (RESPONSES, {"instructions": "a", "input": [{"role": "cook", "content": "x"}]}, "input[0].role"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    (RESPONSES, {"input": [{"type": "function_call", "name": 3}]}, "input[0].name"),
    (RESPONSES, {"input": [{"type": "function_call", "name": "f", "arguments": "[1]"}]}, "input[0].arguments"),
    (RESPONSES, {"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "z", "output": "x"}]}, "input[0].call_id"),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "z"}]}, "input[0].output"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "z"}]}, "input[0]"),
    (RESPONSES, {"input": "x", "previous_response_id": "z"}, "previous_response_id"),
    (RESPONSES, {"input": "x", "tools": [3]}, "tools[0]"),
    (RESPONSES, {"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
    (RESPONSES, {"input": "x", "tools": [{"type": "custom"}]}, "tools[0].name"),
    (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}, function(parameters=3)]}, "tools[1].parameters"),
    (RESPONSES, {"input": "x", "tools": [function(strict=3)]}, "tools[0].strict"),
    (RESPONSES, {"input": "x", "tools": [function(), function()]}, "tools[1].name"),
    (RESPONSES, {"input": "x", "tools": [{"type": "namespace", "name": "s", "tools": [function(parameters=3)]}]},
     "tools[0].tools[0].parameters"),
    (RESPONSES, {"input": "x", "tools": [function(strict=True, parameters={"not": {}})]}, "tools"),
    (RESPONSES, {"input": "x", "tool_choice": "required"}, "tool_choice"),
    (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text.format.name"),
    (RESPONSES, {"input": "x", "text": {"format": WRONG}}, "text.format.schema"),
    (RESPONSES, {"input": "x", "reasoning": {"effort": 3}}, "reasoning.effort"),
    (RESPONSES, {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ("/v1/responses/input_tokens", {"input": [{"role": "cook", "content": "x"}]}, "input[0].role"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), NAMED)
def test_param_names_the_field(http, path, body, param):
    error = error_of(http, path, body)
    assert error["param"] == param
    assert "messages[" not in error["message"] or "messages" in body


def user(*blocks):
    return [{"role": "user", "content": list(blocks)}]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": user({"type": "tool_result", "content": "x"})}, "messages[0].content[0].tool_use_id"),
        ({"messages": user({"type": "text", "text": "x"}, IMAGE)}, "messages[0].content[1]"),
        ({"messages": user({"type": "zz"})}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}, *HI]},
         "messages[0].content[0].name"),
        ({"messages": [{"role": "assistant", "content": [{"type": "text", "text": "x"}, {
            "type": "tool_use", "name": "f", "input": {"__raw_arguments__": "[1]"}}]}, *HI]},
         "messages[0].content[1].input"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search_1"}, {"name": "f", "input_schema": {}, "strict": 3}]}, "tools[1].strict"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 33}, "stop_sequences"),
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "output_config.format.schema"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("system", [{}, {"system": "Be brief."}])
def test_messages_name_the_field_in_their_text(http, fields, named, system):
    error = error_of(http, MESSAGES, {"messages": HI, "max_tokens": 5, **system, **fields})
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith((f"{named} ", f"{named}:"))


ODD = [1, "x", [], {}, True, 1.5, [1], ["x"], {"a": 1}, -1, ""]
BASES = {
    CHAT: (chat(), [*ChatRequest.model_fields, *ChatRequest.RENDERED]),
    TEXT: ({"prompt": "x", "max_tokens": 5}, CompletionRequest.model_fields),
    RESPONSES: ({"input": "x"}, ResponsesRequest.model_fields),
    "/tokenize": ({"prompt": "x"}, ["model", "prompt", "return_token_strs"]),
    "/detokenize": ({"tokens": [1]}, ["model", "tokens"]),
}


@pytest.mark.parametrize("path", BASES)
def test_a_field_of_another_type_is_taken_or_named(http, path):
    """Whatever a field holds, the server neither fails nor blames another field."""
    body, fields = BASES[path]
    refused = 0
    for field, value in itertools.product(fields, ODD):
        answer = http.post(path, json={**body, field: value})
        assert answer.status_code in (200, 400, 404), (field, value, answer.text)
        if answer.status_code != 200:
            refused += 1
            param = answer.json()["error"]["param"] or ""
            assert param.split(".")[0].split("[")[0] == field, (field, value, answer.text)
    assert refused > 3 * len(list(fields))


SPELLINGS = {
    "thinking": ("x", 1, 0, [], "true"),
    "enable_thinking": ("x", 1, 0, [], {}, "true"),
    "thinking_effort": (1, [], {}, True),
    "preserve_thinking": ("x", 1, 0, [], {}, False),
}


@pytest.mark.parametrize("beside", [{}, {"thinking": True}, {"thinking": False}, {"thinking_effort": "low"}])
@pytest.mark.parametrize("name", SPELLINGS)
def test_template_arguments_are_of_their_types_even_where_another_spelling_wins(http, name, beside):
    for value in SPELLINGS[name]:
        body = chat(**beside, chat_template_kwargs={name: value})
        assert error_of(http, CHAT, body)["param"] == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": True, "enable_thinking": "x"}, "enable_thinking"),
        ({"thinking": True, "reasoning_effort": 7}, "reasoning_effort"),
        ({"thinking_effort": "low", "reasoning_effort": 7}, "reasoning_effort"),
        ({"thinking": {"effort": "low"}, "thinking_effort": 5}, "thinking_effort"),
    ],
)
def test_so_are_the_fields_that_lose(http, fields, param):
    assert error_of(http, CHAT, chat(**fields))["param"] == param


def test_a_value_that_does_not_count_is_not_judged(http):
    assert http.post(CHAT, json=chat(thinking_effort="low", reasoning_effort="medium")).status_code == 200


def test_unknown_template_arguments_are_told(http):
    answer = http.post(CHAT, json=chat(chat_template_kwargs={"thinking": True, "mood": "good"}))
    assert answer.status_code == 200
    assert answer.headers["X-Ignored-Fields"] == "chat_template_kwargs.mood"
