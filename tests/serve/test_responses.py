"""`/v1/responses`, with the `openai` client against a real server."""

import json
import threading
from typing import Any

import openai
import pytest

from k3hal.model.synthetic_vocab import synthetic_ranks
from k3hal.serve.responses.store import ResponseStore
from k3hal.tokenizer import Tokenizer

TOKENIZER = Tokenizer(synthetic_ranks())
TOOL: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object"},
    "strict": False,
}
ADD = ("Sum.", " \n", ("add", {"a": ("number", "1e2"), "b": ("string", "x")}), ("add", {}))


@pytest.fixture
def prompts(api):
    """The prompts that reach the engine, as text."""
    seen = []
    submit = api.server.engine.submit
    api.server.engine.submit = lambda r: (seen.append(TOKENIZER.decode(r.prompt_token_ids)), submit(r))[1]
    yield seen
    del api.server.engine.submit


def chat(api, messages, **body):
    """The prompt of a chat, as text."""
    return TOKENIZER.decode(api.http.post("/tokenize", json={"messages": messages, **body}).json()["tokens"])


def events_of(api, **body):
    text = api.http.post("/v1/responses", json={"input": "Hi", "stream": True, **body}).text
    parts = [dict(line.split(": ", 1) for line in part.split("\n")) for part in text.split("\n\n") if part]
    events = [json.loads(part["data"]) for part in parts]
    assert [part["event"] for part in parts] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_whole_response(api, turn):
    api.script(turn("Well.", "Hello"))
    answer = api.openai.responses.create(model="k3", input="Hi", instructions="Be kind.", metadata={"a": "b"})
    assert (answer.status, answer.output_text, answer.model) == ("completed", "Hello", "k3")
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "Well."
    assert answer.usage.output_tokens == len(turn("Well.", "Hello").ids)
    assert answer.usage.output_tokens_details.reasoning_tokens == len("Well.")
    assert (answer.usage.input_tokens_details.cached_tokens, answer.metadata) == (0, {"a": "b"})
    counted = api.openai.responses.input_tokens.count(model="k3", input="Hi", instructions="Be kind.")
    assert counted.input_tokens == answer.usage.input_tokens


@pytest.mark.parametrize("per_step", [1, 3, 1000])
def test_a_stream_ends_in_the_same_response_as_a_whole_one(api, calling, per_step):
    api.script(*[calling(*ADD, per_step=per_step)] * 2)
    asked = {"model": "k3", "input": "Hi", "tools": [TOOL]}
    whole = api.openai.responses.create(**asked)
    with api.openai.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert [item.type for item in whole.output] == ["reasoning", "function_call", "function_call"]
    assert [(c.name, c.arguments) for c in whole.output[1:]] == [("add", '{"a":1e2,"b":"x"}'), ("add", "{}")]

    def plainly(response):
        return [
            {k: v for k, v in i.to_dict().items() if k not in ("id", "call_id", "parsed_arguments")}
            for i in response.output
        ]

    assert plainly(streamed) == plainly(whole)
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"


def test_events_add_up_to_the_items_they_announce(api, turn):
    api.script(turn("Well.", "Hello there"))
    events = events_of(api, include=["message.output_text.logprobs"], top_logprobs=1)
    for kind, text in (("reasoning_text", "Well."), ("output_text", "Hello there")):
        deltas = [e for e in events if e["type"] == f"response.{kind}.delta"]
        done = next(e for e in events if e["type"] == f"response.{kind}.done")
        assert "".join(e["delta"] for e in deltas) == done["text"] == text
        assert {e["item_id"] for e in deltas} == {done["item_id"]}
    said = next(e for e in events if e["type"] == "response.output_text.done")
    assert "".join(entry["token"] for entry in said["logprobs"]) == "Hello there"
    assert said["logprobs"][0]["top_logprobs"][0]["logprob"] == 0.0
    items = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert items == events[-1]["response"]["output"]
    places = [e["output_index"] for e in events if "output_index" in e]
    assert places == sorted(places)


def test_a_conversation_of_items_is_rendered_as_the_same_chat(api, prompts, turn):
    api.script(turn("a", "b"))
    items = [
        {"role": "developer", "content": "Short."},
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Sum."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "See:"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1e2}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "and?"},
    ]  # fmt: skip
    api.openai.responses.create(model="k3", input=items, instructions="Be kind.", tools=[TOOL], tool_choice="required")
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": False}
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1e2}'}},
        {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
    ]
    messages = [
        {"role": "system", "content": "Be kind."}, {"role": "system", "content": "Short."},
        {"role": "user", "content": "go"},
        {"role": "assistant", "reasoning_content": "Sum.", "content": "See:", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "and?"},
    ]  # fmt: skip
    assert prompts == [chat(api, messages, tools=[{"type": "function", "function": function}], tool_choice="required")]


@pytest.mark.parametrize(
    ("body", "chat_body"),
    [
        ({"reasoning": {"effort": "none"}}, {"thinking": False}),
        ({"reasoning": {"effort": "minimal"}}, {"thinking_effort": "low"}),
        ({"reasoning": {"effort": "medium", "summary": "auto"}}, {"thinking_effort": "high"}),
        ({"reasoning": {"effort": None}}, {}),
        ({"text": {"format": {"type": "text"}}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
        ),
    ],
)
def test_what_shapes_the_prompt(api, prompts, turn, body, chat_body):
    api.script(turn("a", "b"))
    assert api.http.post("/v1/responses", json={"input": "Hi", **body}).status_code == 200
    assert prompts == [chat(api, [{"role": "user", "content": "Hi"}], **chat_body)]


def test_a_response_is_continued_by_its_id(api, prompts, calling, turn):
    api.script(calling(*ADD), turn("a", "b"), turn("c", "d"))
    first = api.openai.responses.create(model="k3", input="Hi", tools=[TOOL], instructions="Be kind.")
    outputs: Any = [
        {"type": "function_call_output", "call_id": c.call_id, "output": "5"}
        for c in first.output
        if c.type == "function_call"
    ]
    second = api.openai.responses.create(model="k3", input=outputs, tools=[TOOL], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    items = [{"role": "user", "content": "Hi"}, *[item.to_dict() for item in first.output], *outputs]
    api.openai.responses.create(model="k3", input=items, tools=[TOOL])
    # Instructions belong to one response; the rest is as if all of it had been sent.
    assert prompts[1] == prompts[2]
    assert "Be kind." in prompts[0]
    assert "Be kind." not in prompts[1]
    assert "<|open|>think<|sep|>Sum.<|close|>think" in prompts[1]


SPACE: Any = {
    "type": "namespace",
    "name": "agents",
    "tools": [{**TOOL, "name": "close"}, {"type": "custom", "name": "tell"}],
}
PATCH: Any = {
    "type": "custom", "name": "patch", "description": "Edits.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_custom_tools_and_namespaces(api, prompts, calling, turn, stream):
    text = 'line "one"\nline two'
    calls = (("patch", {"input": ("string", text)}), ("agents.close", {}), ("agents.tell", {"input": ("string", "hi")}))
    api.script(calling("Edit.", "", *calls), turn("a", "b"))
    asked = {"model": "k3", "input": "Hi", "tools": [PATCH, SPACE]}
    if stream:
        with api.openai.responses.stream(**asked) as events:
            inputs = [event.input for event in events if event.type == "response.custom_tool_call_input.done"]
            answer = events.get_final_response()
        assert inputs == [text, "hi"]
    else:
        answer = api.openai.responses.create(**asked)
    said = [item.to_dict() for item in answer.output[1:]]
    assert [(i["type"], i.get("namespace"), i["name"], i.get("input", i.get("arguments"))) for i in said] == [
        ("custom_tool_call", None, "patch", text),
        ("function_call", "agents", "close", "{}"),
        ("custom_tool_call", "agents", "tell", "hi"),
    ]
    results: Any = [{"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"} for item in said]
    items = [{"role": "user", "content": "Hi"}, *[item.to_dict() for item in answer.output], *results]
    api.openai.responses.create(model="k3", input=items, tools=[PATCH, SPACE])
    assert "The input follows this grammar (lark):\\nstart: X" in prompts[0]
    for index, name in enumerate(("patch", "agents.close", "agents.tell"), start=1):
        assert f'<|open|>call tool="{name}" index="{index}"<|sep|>' in prompts[1]
        assert f'<|open|>message role="tool" tool="{name}" index="{index}"<|sep|>ok<|close|>' in prompts[1]
    assert f'<|open|>argument key="input" type="string"<|sep|>{text}<|close|>' in prompts[1]


def test_tools_built_into_other_servers_are_left_out_and_told(running, api, turn):
    tools = [TOOL, {"type": "web_search"}, {**SPACE, "tools": [{"type": "mcp", "name": "m"}]}]
    api.script(turn("a", "b"))
    answer = api.http.post("/v1/responses", json={"input": "x", "tools": tools})
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (
        200,
        "tools[1].web_search, tools[2].tools[0].mcp",
    )
    with running([turn("a", "b")], refuse_unknown_fields=True) as server, server.client() as http:
        refused = http.post("/v1/responses", json={"input": "x", "tools": tools})
        assert (refused.status_code, "no built-in tools" in refused.text) == (400, True)


def test_responses_are_kept_until_deleted(api, turn):
    api.script(turn("a", "b"), turn("c", "d"))
    kept = api.openai.responses.create(model="k3", input="Hi")
    assert api.openai.responses.retrieve(kept.id) == kept
    reference = {"type": "item_reference", "id": kept.output[1].id}
    api.openai.responses.create(model="k3", input=[reference, {"role": "user", "content": "more"}], store=False)
    with pytest.raises(openai.BadRequestError, match="complete"):
        api.openai.responses.cancel(kept.id)
    api.openai.responses.delete(kept.id)
    for call in (api.openai.responses.retrieve, api.openai.responses.delete, api.openai.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            call(kept.id)


def test_what_must_not_be_stored_is_not(running, turn):
    with running([turn("a", "b")], max_stored_responses=0) as server, server.client() as http:
        answer = http.post("/v1/responses", json={"input": "Hi"}).json()
        assert answer["store"] is False
        assert http.get(f"/v1/responses/{answer['id']}").status_code == 404
    with running([turn("a", "b")]) as server, server.client() as http:
        answer = http.post("/v1/responses", json={"input": "Hi", "store": False}).json()
        assert answer["store"] is False
        assert http.post("/v1/responses", json={"input": "x", "previous_response_id": answer["id"]}).status_code == 404


def test_another_key_finds_nothing(running, turn):
    with running([turn("a", "b")], api_keys=("one", "two")) as server:
        one, two = (server.client(headers={"Authorization": f"Bearer {key}"}) for key in ("one", "two"))
        with one, two:
            answer = one.post("/v1/responses", json={"input": "Hi"}).json()
            assert one.get(f"/v1/responses/{answer['id']}").status_code == 200
            assert two.get(f"/v1/responses/{answer['id']}").status_code == 404
            reference = {"type": "item_reference", "id": answer["output"][0]["id"]}
            assert two.post("/v1/responses", json={"input": [reference]}).status_code == 400


def test_the_store_has_an_end():
    store = ResponseStore(max_responses=3, max_bytes=1000)
    for i in range(5):
        store.put("", {"id": f"r{i}"}, ())
    assert [name for name in ("r0", "r1", "r2", "r3", "r4") if name in store._stored] == ["r2", "r3", "r4"]
    store.get("", "r2")
    store.put("", {"id": "r5"}, ())
    assert list(store._stored) == ["r4", "r2", "r5"]
    store.put("", {"id": "big"}, ({"x": "y" * 970},))
    assert list(store._stored) == ["big"]
    store.put("", {"id": "huge"}, ({"x": "y" * 2000},))
    assert list(store._stored) == ["big"]
    store.delete("", "big")
    assert store._room == 1000


def test_sealed_thinking_comes_back(api, prompts, turn):
    api.script(turn("Secret plan.", "b"), turn("a", "b"))
    answer = api.openai.responses.create(model="k3", input="Hi", store=False, include=["reasoning.encrypted_content"])
    sealed: Any = {"type": "reasoning", "summary": [], "encrypted_content": answer.output[0].encrypted_content}
    items: Any = [
        {"role": "user", "content": "Hi"},
        sealed,
        answer.output[1].to_dict(),
        {"role": "user", "content": "So?"},
    ]
    api.openai.responses.create(model="k3", input=items)
    assert "<|open|>think<|sep|>Secret plan.<|close|>think" in prompts[1]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_off_is_incomplete(api, calling, stream):
    api.script(calling("", "so", ("add", {}), ("add", {"a": ("string", "x" * 50)})))
    asked = {"model": "k3", "input": "Hi", "max_output_tokens": 60, "tools": [TOOL]}
    if stream:
        with api.openai.responses.stream(**asked) as events:
            kinds = [event.type for event in events]
        assert kinds[-1] == "response.incomplete"
        return
    answer = api.openai.responses.create(**asked)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.type for item in answer.output] == ["message", "function_call"]


def test_a_stream_that_fails_says_so(running, turn):
    with running([turn("aaaa", "b", step_s=0.05)]) as server:
        threading.Timer(0.2, server.state.router.abort_all).start()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            last: Any = list(client.responses.create(model="k3", input="Hi", stream=True))[-1]
        assert (last.type, last.response.status, last.response.error.code) == (
            "response.failed",
            "failed",
            "server_error",
        )


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "input is missing"),
        ({"input": []}, 400, "input is missing"),
        ({"input": [3]}, 400, "input[0]"),
        ({"input": 3}, 400, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, 400, "role"),
        ({"input": [{"role": "user"}]}, 400, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, 400, "input_file"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, 400, "image"),
        ({"input": [{"type": "web_search_call"}]}, 400, "web_search_call"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "[1]"}]}, 400, "arguments"),
        ({"input": [{"type": "function_call"}]}, 400, ".name must be a non-empty string"),
        ({"input": [{"type": "item_reference", "id": []}]}, 400, "refers"),
        ({"input": "x", "model": "gpt"}, 404, "does not exist"),
        ({"input": "x", "previous_response_id": "resp_1"}, 404, "there is no response"),
        ({"input": "x", "background": True}, 400, "background"),
        ({"input": "x", "conversation": "c"}, 400, "conversation"),
        ({"input": "x", "truncation": "auto"}, 400, "truncation"),
        ({"input": "x", "tools": [3]}, 400, "tools[0] must be an object"),
        ({"input": "x", "tools": [{"type": "namespace", "name": "n"}]}, 400, "a list of tools"),
        ({"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [3]}]}, 400, "tools[0].tools[0]"),
        ({"input": "x", "tools": [TOOL, TOOL]}, 400, "twice"),
        ({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"}, 400, "no tools"),
        ({"input": "x", "tools": [{"type": "function"}]}, 400, ".name must be a non-empty string"),
        ({"input": "x", "tool_choice": "must"}, 400, "tool_choice"),
        ({"input": "x", "tool_choice": {"type": "mcp"}}, 400, "tool_choice"),
        ({"input": "x", "reasoning": {"effort": "huge"}}, 400, "reasoning.effort"),
        ({"input": "x", "reasoning": "high"}, 400, "reasoning"),
        ({"input": "x", "text": {"format": 1}}, 400, "text.format"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, 400, "text.format"),
        ({"input": "x", "max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"input": "x", "top_logprobs": 99}, 400, "logprobs"),
    ],
)
def test_malformed_requests(api, body, status, message):
    response = api.http.post("/v1/responses", json=body)
    assert response.status_code == status, response.text
    assert message in response.json()["error"]["message"]
