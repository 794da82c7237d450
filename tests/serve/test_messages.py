"""Anthropic's `/v1/messages`, with its own client against a real server."""

import json
import threading
from typing import Any

import anthropic
import pytest

from k3hal.model.synthetic_vocab import synthetic_ranks
from k3hal.serve.messages.conversation import RAW_INPUT
from k3hal.tokenizer import Tokenizer

TOKENIZER = Tokenizer(synthetic_ranks())
HI: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}


ADD = ("Sum.", " \n", ("add", {"a": ("number", "1e2"), "b": ("string", "x")}), ("add", {}))


@pytest.fixture(scope="module")
def client(api):
    with anthropic.Anthropic(base_url=api.server.url, api_key="none", max_retries=0) as made:
        yield made


def render(api, body):
    """The prompt that a body of the messages API becomes, as its number of tokens and as the engine got it."""
    seen = []
    submit = api.server.engine.submit
    api.server.engine.submit = lambda request: (seen.append(request), submit(request))[1]
    try:
        answer = api.http.post("/v1/messages", json={"max_tokens": 1, **body})
    finally:
        del api.server.engine.submit
    assert answer.status_code == 200, answer.text
    return TOKENIZER.decode(seen[0].prompt_token_ids)


def chat(api, messages, **body):
    ids = api.http.post("/tokenize", json={"messages": messages, **body}).json()["tokens"]
    return TOKENIZER.decode(ids)


def test_a_whole_answer(api, client, turn):
    api.script(turn("Well.", "Hello"))
    message = client.messages.create(model="k3", max_tokens=100, messages=HI, system="Be kind.")
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == ("Well.", "Hello")
    assert message.content[0].signature
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "k3")
    assert message.id.startswith("msg_")
    assert message.usage.output_tokens == len(turn("Well.", "Hello").ids)
    counted = client.messages.count_tokens(model="k3", messages=HI, system="Be kind.")
    assert message.usage.input_tokens == counted.input_tokens > 10


def test_a_stream_has_the_same_answer_as_a_whole_one(api, client, calling):
    api.script(calling(*ADD), calling(*ADD))
    asked = {"model": "k3", "max_tokens": 500, "messages": HI, "tools": [TOOL]}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "tool_use", "tool_use"]
    assert (
        [b.input for b in whole.content[1:]] == [b.input for b in streamed.content[1:]] == [{"a": 100.0, "b": "x"}, {}]
    )
    assert streamed.content[0] == whole.content[0]
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


def test_every_event_is_named_as_its_data(api, turn):
    api.script(turn("a", "b"))
    text = api.http.post("/v1/messages", json={"max_tokens": 99, "messages": HI, "stream": True}).text
    events = [dict(line.split(": ", 1) for line in part.split("\n")) for part in text.split("\n\n") if part]
    assert [event["event"] for event in events] == [json.loads(event["data"])["type"] for event in events]
    assert "DONE" not in text


@pytest.mark.parametrize(
    ("line", "asked", "reason", "sequence"),
    [
        (("a", "stop here now"), {"stop_sequences": ["here"]}, "stop_sequence", "here"),
        (("a", "b"), {"max_tokens": 3}, "max_tokens", None),
        (("a", "x" * 3000), {"max_tokens": 5000}, "model_context_window_exceeded", None),
        (("a", "b"), {}, "end_turn", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_why_an_answer_ends(api, client, turn, line, asked, reason, sequence, stream):
    api.script(turn(*line, per_step=100))
    asked = {"model": "k3", "max_tokens": 500, "messages": HI, **asked}
    if stream:
        with client.messages.stream(**asked) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**asked)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


def test_arguments_that_are_no_object_come_through_and_back(api, client, calling):
    api.script(calling("", "", ("add", '{"a": oops')), calling(*ADD))
    message = client.messages.create(model="k3", max_tokens=500, messages=HI, tools=[TOOL])
    assert message.content[0].input == {RAW_INPUT: '{"a": oops'}
    history = [*HI, {"role": "assistant", "content": [b.to_dict() for b in message.content]}]
    history.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": message.content[0].id}]})
    assert '<|open|>json type="object"<|sep|>{"a": oops<|close|>json' in render(api, {"messages": history})


def test_a_call_that_was_cut_off_is_no_block(api, client, calling):
    api.script(calling("", "so", ("add", {"a": ("string", "x" * 50)})))
    message = client.messages.create(model="k3", max_tokens=30, messages=HI, tools=[TOOL])
    assert [block.type for block in message.content] == ["text"]
    assert message.stop_reason == "max_tokens"


def test_a_conversation_is_rendered_as_the_same_chat(api, turn):
    api.script(turn("a", "b"))
    blocks = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Sum.", "signature": "s"}]},
        {"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "zzz"},
            {"type": "text", "text": "Let me "}, {"type": "text", "text": "see."},
            {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1, "b": [True]}},
            {"type": "tool_use", "id": "t2", "name": "add", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t2", "content": "two"},
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "one"}]},
            {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "Note."},
    ]  # fmt: skip
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [True]}}},
        {"id": "t2", "type": "function", "function": {"name": "add", "arguments": ""}},
    ]
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "go"},
        {"role": "assistant", "reasoning_content": "Sum.", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": "two"},
        {"role": "user", "content": "and?"},
        {"role": "system", "content": "Note."},
    ]
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    system = [{"type": "text", "text": "x-anthropic-billing-header: v=1;"}, {"type": "text", "text": "Be kind."}]
    body = {"messages": blocks, "system": system, "tools": [TOOL], "tool_choice": {"type": "any"}}
    tools = [{"type": "function", "function": function}]
    assert render(api, body) == chat(api, messages, tools=tools, tool_choice="required")


@pytest.mark.parametrize(
    ("body", "chat_body"),
    [
        ({"thinking": {"type": "disabled"}}, {"thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {}),
        ({"output_config": {"effort": "medium"}}, {"thinking_effort": "high"}),
        ({"output_config": {"effort": "low"}}, {"thinking_effort": "low"}),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
        ),
    ],
)
def test_what_shapes_the_prompt(api, turn, body, chat_body):
    api.script(turn("a", "b"))
    assert render(api, {"messages": HI, **body}) == chat(api, HI, **chat_body)


def test_tools_built_into_other_models_are_left_out_and_told(running, api, turn):
    tools = [{"type": "web_search_20250305", "name": "web_search"}, TOOL]
    api.script(*[turn("a", "b")] * 3)
    asked = {"messages": HI, "max_tokens": 99, "tools": tools}
    answer = api.http.post("/v1/messages", json=asked)
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, "tools[0].web_search_20250305")
    assert render(api, {"messages": HI, "tools": tools}) == render(api, {"messages": HI, "tools": [TOOL]})
    with running([turn("a", "b")], refuse_unknown_fields=True) as server, server.client() as http:
        refused = http.post("/v1/messages", json=asked)
        assert (refused.status_code, "no built-in tools" in refused.text) == (400, True)


def test_an_open_answer_is_continued(api, turn):
    api.script(turn("a", "b"))
    messages = [*HI, {"role": "assistant", "content": "The answer is ("}]
    assert render(api, {"messages": messages}).endswith("<|open|>response<|sep|>The answer is (")


def test_hidden_thinking_comes_back_in_its_signature(api, client, turn):
    api.script(turn("Secret plan.", "b"), turn("Secret plan.", "b"), turn("x", "y"))
    asked = {"model": "k3", "max_tokens": 500, "messages": HI, "thinking": {"type": "adaptive", "display": "omitted"}}
    message = client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        assert events.get_final_message().content[0] == message.content[0]
    assert (message.content[0].type, message.content[0].thinking) == ("thinking", "")
    history = [*HI, {"role": "assistant", "content": [b.to_dict() for b in message.content]}, *HI]
    assert "<|open|>think<|sep|>Secret plan.<|close|>think" in render(api, {"messages": history})


@pytest.mark.parametrize(
    ("body", "status", "kind", "message"),
    [
        (b"{", 400, "invalid_request_error", "not JSON"),
        ({"messages": HI, "max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({}, 400, "invalid_request_error", "messages is missing"),
        ({"model": "gpt", "messages": HI}, 404, "not_found_error", "does not exist"),
        ({"messages": [{"role": "tool", "content": ""}]}, 400, "invalid_request_error", "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "invalid_request_error", "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400, "invalid_request_error", "document"),
        ({"messages": [3]}, 400, "invalid_request_error", "messages[0].role"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": HI, "max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": HI, "temperature": "x"}, 400, "invalid_request_error", "temperature"),
        ({"messages": HI, "thinking": {"type": "hard"}}, 400, "invalid_request_error", "thinking.type"),
        ({"messages": HI, "thinking": True}, 400, "invalid_request_error", "thinking"),
        ({"messages": HI, "output_config": {"effort": "huge"}}, 400, "invalid_request_error", "output_config.effort"),
        ({"messages": HI, "output_config": {"format": 1}}, 400, "invalid_request_error", "output_config.format"),
        ({"messages": HI, "tool_choice": {"type": "must"}}, 400, "invalid_request_error", "tool_choice.type"),
        ({"messages": HI, "tools": [{"name": "f"}]}, 400, "invalid_request_error", "tools[0].input_schema"),
        ({"messages": HI, "tools": [1]}, 400, "invalid_request_error", "tools[0]"),
        ({"messages": HI, "tools": [{"input_schema": {}}]}, 400, "invalid_request_error", "tools[0].name"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": "x"}]}]},
            400, "invalid_request_error", "messages[0].content[0].input",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}]},
            400, "invalid_request_error", "image",
        ),
    ],
)  # fmt: skip
def test_malformed_requests(api, body, status, kind, message):
    content = body if isinstance(body, bytes) else json.dumps({"max_tokens": 9, **body}).encode()
    paths = ["/v1/messages"]
    if message not in ("max_tokens", "temperature"):  # which counting does not read
        paths.append("/v1/messages/count_tokens")
    for path in paths:
        response = api.http.post(path, content=content)
        assert response.status_code == status, response.text
        assert response.json()["type"] == "error"
        assert response.json()["error"]["type"] == kind
        assert message in response.json()["error"]["message"]


def test_the_client_sees_its_own_kinds_of_errors(running, turn):
    with running([turn("a", "b")], api_keys=("secret",)) as server:
        wrong = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
        with wrong, pytest.raises(anthropic.AuthenticationError, match="API key"):
            wrong.messages.create(model="k3", max_tokens=9, messages=HI)
        right = anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0)
        with right:
            assert right.messages.create(model="k3", max_tokens=99, messages=HI).stop_reason == "end_turn"
            assert [(m.id, m.display_name) for m in right.models.list()] == [("k3", "k3"), ("alias", "alias")]
            with pytest.raises(anthropic.NotFoundError) as caught:
                right.messages.create(model="claude", max_tokens=9, messages=HI)
            assert (caught.value.request_id or "").startswith("req-")


def test_a_stream_that_fails_ends_in_an_error_event(running, turn):
    with running([turn("aaaa", "b", step_s=0.05)]) as server:
        threading.Timer(0.2, server.state.router.abort_all).start()
        with (
            anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client,
            client.messages.stream(model="k3", max_tokens=99, messages=HI) as events,
            pytest.raises(anthropic.APIStatusError, match="stopped before"),
        ):
            events.get_final_message()
