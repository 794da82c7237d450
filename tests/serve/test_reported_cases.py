"""What went wrong elsewhere, by the report's name: malformed outputs, leaks, and requests that were refused or lost."""

import json

import pytest

from k3hal.engine.replay_file import ReplayLine
from k3hal.tokenizer import MEDIA_BEGIN

from .markup import TOKENIZER, ids_of

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '⟦call tool="f" index="1"¦'
DONE = "⟧tools¦⟧message¦∎"
ARGUMENT = '⟦argument key="x" type="string"¦'


def streamed(chunks):
    """The message that a stream's deltas add up to, and its finish reason."""
    message, calls, reason = {"reasoning_content": "", "content": ""}, [], None
    for chunk in chunks:
        (choice,) = chunk["choices"]
        reason = choice["finish_reason"] or reason
        for name in message:
            message[name] += choice["delta"].get(name) or ""
        for part in choice["delta"].get("tool_calls", []):
            if "id" in part:
                calls.append([part["function"]["name"], part["function"]["arguments"]])
            else:
                calls[part["index"]][1] += part["function"]["arguments"]
    return message["reasoning_content"], message["content"], calls, reason


def whole(answer):
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", [])]
    return message.get("reasoning_content", ""), message["content"] or "", calls, choice["finish_reason"]


def answers(api, text, **body):
    """What the client gets for an output, whole and streamed in steps of every size that matters, all equal."""
    ids = tuple(ids_of(text))
    fields = {"messages": HI, "tools": [TOOL], **body}
    api.script(ReplayLine(ids))
    response = api.http.post("/v1/chat/completions", json=fields)
    assert response.status_code == 200, response.text
    for per_step in (1, 2, 3, 7, len(ids)):
        api.script(ReplayLine(ids, per_step))
        chunks = api.stream(**fields)
        assert streamed(chunks) == whole(response.json())
        assert "<|" not in json.dumps([chunk["choices"] for chunk in chunks])
    return whole(response.json())


@pytest.mark.parametrize(
    ("output", "body", "expected"),
    [
        ("plan⟦response¦hi⟧response¦⟧message¦∎", {}, ("plan", "hi", [], "stop")),
        (f"plan⟦tools¦{CALL}⟧call¦{DONE}", {}, ("plan", "", [["f", "{}"]], "tool_calls")),
        ("all of it∎", {}, ("all of it", "", [], "stop")),
        ("p⟧think¦⟦response¦hi⟧response¦⟧message¦", {}, ("p", "hi", [], "stop")),
        ("p⟧think¦⟦response¦hi⟧response¦ \n⟧message¦ ∎", {}, ("p", "hi", [], "stop")),
        ('{"a":1}∎', {"thinking": False}, ("", '{"a":1}', [], "stop")),
        ('p⟧think¦{"a":1}∎', {}, ("p", '{"a":1}', [], "stop")),
        (f"p⟧think¦⟦response¦⟧response¦⟦tools¦{CALL}⟧call¦{DONE}", {"tools": []}, ("p", "", [], "stop")),
        (f"p⟧think¦⟦response¦no⟧response¦⟦tools¦{CALL}⟧call¦{DONE}", {"tool_choice": "none"}, ("p", "no", [], "stop")),
        ("p⟧think¦⟦response¦hi⟧resp", {}, ("p", "hi", [], "stop")),
        ("p⟧think¦⟦response¦hi⟧", {}, ("p", "hi", [], "stop")),
        (f'p⟧think¦⟦tools¦{CALL}⟦argument key="n" type="number"¦five⟧argument¦⟧call¦{DONE}', {},
         ("p", "", [["f", '{"n":"five"}']], "tool_calls")),
        (f'p⟧think¦⟦tools¦⟦call tool="other" index="1"¦⟦argument key="n" type="integer"¦5⟧argument¦⟧call¦{DONE}', {},
         ("p", "", [["other", '{"n":5}']], "tool_calls")),
        ("p⟧think¦⟦response¦hi⟧response¦■", {}, ("p", "hi", [], "stop")),
        (f'p⟧think¦⟦response¦⟧response¦⟦toolscall tool="f" index="1"¦⟧call¦{DONE}', {},
         ("p", "", [["f", "{}"]], "tool_calls")),
        ("p⟧think⟦response¦hi⟧response¦⟧message¦∎", {}, ("p", "hi", [], "stop")),
        (f'p⟧think¦⟦response¦⟧response¦⟦tools¦⟦call tool="f" index="7"¦⟧call¦{CALL}⟧call¦{DONE}', {},
         ("p", "", [["f", "{}"], ["f", "{}"]], "tool_calls")),
    ],
    ids=[
        "M1-no-close", "M1-calls-from-thinking", "M2-open-to-the-end", "M3-message-close", "M3-noise",
        "M7-no-response-element", "M7-after-thinking", "M8-no-tools-declared", "M9-none", "M9-partial-marker",
        "M9-bare-marker", "M10-number-that-is-none", "M12-undeclared-and-integer", "M13-eos",
        "M14-lost-separator", "M15-close-without-separator", "M19-any-index",
    ],
)  # fmt: skip
def test_malformed_outputs(api, output, body, expected):
    assert answers(api, output, **body) == expected


def test_m5_thinking_that_is_cut_off_is_no_answer(api):
    reasoning, content, calls, reason = answers(api, "a plan that goes on and on", max_tokens=5)
    assert (content, calls, reason) == ("", [], "length")
    assert "a plan that goes on and on".startswith(reasoning)
    assert reasoning


def test_text_that_spells_markup_is_text(api):
    api.script(ReplayLine(tuple(ids_of("<|close|>think<|sep|>⟧think¦⟦response¦<|end_of_msg|>⟧response¦∎"))))
    answer = api.http.post("/v1/chat/completions", json={"messages": HI}).json()
    assert whole(answer)[:2] == ("<|close|>think<|sep|>", "<|end_of_msg|>")


def test_m4_a_long_argument_streams_as_it_is_written(running):
    long = "words and more " * 270
    line = ReplayLine(tuple(ids_of(f"⟦tools¦{CALL}{ARGUMENT}{long}⟧argument¦⟧call¦{DONE}")))
    body = {"messages": HI, "tools": [TOOL]}
    with running([line], {"max_model_len": 20000}) as server, server.client() as http:
        _, _, ((name, arguments),), _ = whole(http.post("/v1/chat/completions", json=body).json())
        stream = http.post("/v1/chat/completions", json={**body, "stream": True}).text
    assert (name, json.loads(arguments)) == ("f", {"x": long})
    chunks = [json.loads(part.removeprefix("data: ")) for part in stream.split("\n\n")[:-2]]
    parts = [c["choices"][0]["delta"]["tool_calls"][0] for c in chunks if "tool_calls" in c["choices"][0]["delta"]]
    assert parts[0]["function"] == {"name": "f", "arguments": ""}
    assert len(parts) > 1000
    assert streamed(chunks)[2] == [[name, arguments]]


def test_a_call_that_is_cut_off_is_dropped_and_the_ones_before_it_stay(api):
    complete = f"{CALL}{ARGUMENT}y⟧argument¦⟧call¦"
    ids = ids_of(f"p⟧think¦⟦response¦⟧response¦⟦tools¦{complete}{CALL}{ARGUMENT}abc")
    api.script(ReplayLine(tuple(ids)))
    answer = api.http.post(
        "/v1/chat/completions", json={"messages": HI, "tools": [TOOL], "max_tokens": len(ids)}
    ).json()
    assert whole(answer)[2:] == ([["f", '{"x":"y"}']], "length")


def test_arguments_come_as_they_were_written(api):
    """Number literals, spaces and escapes are the model's, in the order it wrote them."""
    values = [
        ("a", "number", "1e400"),
        ("b", "number", "1.50"),
        ("c", "object", '{ "z":1 ,"a" : [ ] }'),
        ("d", "string", 'x"\\'),
    ]
    elements = "".join(f'⟦argument key="{k}" type="{t}"¦{v}⟧argument¦' for k, t, v in values)
    (call,) = answers(api, f"p⟧think¦⟦response¦⟧response¦⟦tools¦{CALL}{elements}⟧call¦{DONE}")[2]
    assert call[1] == '{"a":1e400,"b":1.50,"c":{ "z":1 ,"a" : [ ] },"d":"x\\"\\\\"}'


def seen_prompt(api, body):
    """The ids of the prompt that a request becomes."""
    return api.http.post("/tokenize", json=body).raise_for_status().json()["tokens"]


def test_b9_the_image_placeholder_is_text(api):
    ids = seen_prompt(api, {"messages": [{"role": "user", "content": "<|kimi_image_placeholder|>"}]})
    assert TOKENIZER.special(MEDIA_BEGIN) not in ids


def test_b17_malformed_arguments_in_the_history_stay_as_they_are(api, turn):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"s": oops'}}
    messages = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "c", "content": "ok"})
    text = TOKENIZER.decode(seen_prompt(api, {"messages": messages}))
    assert '<|open|>json type="object"<|sep|>{"s": oops<|close|>json<|sep|>' in text
    api.script(turn("", "fine"))
    assert api.http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200


def test_b25_reversed_tool_results_are_rendered_in_call_order(api):
    calls = [
        {"id": i, "type": "function", "function": {"name": n, "arguments": "{}"}} for i, n in (("1", "f"), ("2", "g"))
    ]
    results = [{"role": "tool", "tool_call_id": i, "content": f"result {i}"} for i in ("2", "1")]
    body = {"messages": [*HI, {"role": "assistant", "tool_calls": calls}, *results]}
    text = TOKENIZER.decode(seen_prompt(api, body))
    assert text.index("result 1") < text.index("result 2")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    ],
)
def test_b24_wrong_requests_are_refused_by_field(api, body, param):
    answer = api.http.post("/v1/chat/completions", json={"messages": HI, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["message"]


def test_b26_reasoning_is_taken_under_either_name(api):
    def prompt(name):
        return seen_prompt(api, {"messages": [*HI, {"role": "assistant", "content": "x", name: "why"}, *HI]})

    assert prompt("reasoning") == prompt("reasoning_content")


def test_b29_finish_reasons_are_the_apis_own(api, turn):
    api.script(turn("a", "b"))
    (choice,) = api.openai.chat.completions.create(model="k3", messages=HI).choices
    assert choice.finish_reason == "stop"
