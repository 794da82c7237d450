"""Grammars of whole answers: what they allow reads back as what was asked for, and nothing else is allowed."""

import importlib.metadata
import json
import re
from dataclasses import replace

import pytest

from k3hal.errors import RequestError, UnsupportedError
from k3hal.serve.grammar.answers import answer_grammar
from k3hal.serve.grammar.compiler import Constraints
from k3hal.serve.response_format import ResponseFormat
from k3hal.serve.xtml import Segment, close_tag, encode, open_tag
from k3hal.tokenizer import CLOSE, OPEN, SEP

from .random_answers import (
    CONSTRAINTS,
    TOKENIZER,
    USER,
    allowed_after,
    answers,
    constraint_of,
    function,
    message_of,
    named,
    prompt_of,
    random_answer,
    response_format,
)


def ids_of(*segments):
    return encode([s for part in segments for s in (part if isinstance(part, list) else [part])], TOKENIZER)


def text(value):
    return Segment(value)


def opened(tag, *attributes):
    return list(open_tag(tag, *attributes))


def closed(tag):
    return list(close_tag(tag))


def test_json_object():
    for message, _ in answers(response_format={"type": "json_object"}):
        assert isinstance(json.loads(message["content"]), dict)


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"regex": "[ab]{2,3}c"}, "[ab]{2,3}c"),
        ({"choice": ["yes", "no\n", '"<|close|>']}, 'yes|no\n|"<\\|close\\|>'),
        ({"json": '{"enum": [1, "x"]}'}, '1|"x"'),
        ({"json": {"type": "boolean"}}, "true|false"),
        ({"grammar": 'root ::= "a" root | "b"'}, "a*b"),
    ],
)
def test_structured_outputs_bind_the_response_without_a_note(structured, pattern):
    prompt = prompt_of(structured_outputs=structured)
    assert "response-format" not in prompt.text()
    for message, _ in answers(structured_outputs=structured):
        assert re.fullmatch(pattern, message["content"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"structured_outputs": 3}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= nothing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "root ::= root"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": {"type": "no"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        (response_format({"type": "string", "pattern": "("}), "response_format.json_schema.schema"),
        ({"tools": [function(schema={"properties": {"a": {"type": "string", "pattern": "("}}}, strict=True)]}, "tools"),
    ],
)
def test_what_cannot_be_enforced_is_named(body, param):
    with pytest.raises(RequestError) as caught:
        CONSTRAINTS.constraint(prompt_of(**body))
    assert caught.value.param == param
    assert "\n" not in str(caught.value)


def test_values_nested_without_end_are_refused():
    deep = 1
    for _ in range(100_000):
        deep = [deep]
    prompt = prompt_of()
    form = ResponseFormat("json", {"const": deep})
    with pytest.raises(RequestError, match="nested too deep"):
        CONSTRAINTS.constraint(replace(prompt, response_format=form))


@pytest.mark.parametrize("thinking", [True, False])
def test_tool_choices(thinking):
    tools = [function("a", {"type": "object", "properties": {"x": {"type": "integer"}}}), function('b"&<|open|>')]
    for message, reason in answers(tools=tools, tool_choice="required", thinking=thinking):
        assert message["tool_calls"]
        assert reason == "tool_calls"
        assert {call["function"]["name"] for call in message["tool_calls"]} <= {"a", 'b"&<|open|>'}
    for message, _ in answers(tools=tools, tool_choice=named('b"&<|open|>'), thinking=thinking):
        assert [call["function"]["name"] for call in message["tool_calls"]] == ['b"&<|open|>']
    for message, reason in answers(tools=tools, tool_choice="none", thinking=thinking):
        assert "tool_calls" not in message
        assert reason == "stop"
    for message, _ in answers(tools=tools, tool_choice="required", parallel_tool_calls=False, thinking=thinking):
        assert len(message["tool_calls"]) == 1
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function("a")]}}
    for message, _ in answers(tools=tools, tool_choice=some, thinking=thinking):
        assert {call["function"]["name"] for call in message["tool_calls"]} == {"a"}


def test_auto_is_constrained_only_where_something_is_strict():
    assert CONSTRAINTS.constraint(prompt_of(tools=[function()])) is None
    assert CONSTRAINTS.constraint(prompt_of(response_format={"type": "text"})) is None
    assert CONSTRAINTS.constraint(prompt_of(tool_choice="none")) is None
    strict = function(schema={"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"]}, strict=True)
    messages = [message for message, _ in answers(range(12), tools=[strict])]
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    assert {call["function"]["arguments"] for call in calls} == {'{"x":null}'}
    assert any("tool_calls" not in message for message in messages)


def test_a_format_beside_tools_binds_what_is_no_call():
    tools = [function("a")]
    body = {"tools": tools, "response_format": {"type": "json_object"}}
    kinds = set()
    for message, _ in answers(range(12), **body):
        kinds.add("tool_calls" in message)
        assert ("tool_calls" in message) or isinstance(json.loads(message["content"]), dict)
    assert kinds == {True, False}
    for message, _ in answers(range(12), **body, tool_choice="required"):
        assert message["tool_calls"]
        assert message["content"] is None or isinstance(json.loads(message["content"]), dict)


def test_a_required_call_closes_the_thinking_first():
    """Whatever the model would rather do, thinking ends with its own close and nothing of the markup is text."""
    constraint = constraint_of(prompt_of(tools=[function()], tool_choice="required", thinking=True))
    special = [t for t in allowed_after(constraint, []) if TOKENIZER.is_special(t)]
    assert special == [TOKENIZER.special(CLOSE)]
    assert allowed_after(constraint, ids_of(closed("think"))) == [TOKENIZER.special(OPEN)]
    answer = ids_of(closed("think"), opened("response"), text("hi"), closed("response"))
    assert allowed_after(constraint, answer) == [TOKENIZER.special(OPEN)]


def test_a_format_may_be_answered_right_out_of_the_thinking():
    constraint = constraint_of(prompt_of(response_format={"type": "json_object"}, thinking=True))
    special = {t for t in allowed_after(constraint, ids_of(text("hm"))) if TOKENIZER.is_special(t)}
    assert special == {TOKENIZER.special(CLOSE), TOKENIZER.special(OPEN)}
    inside = allowed_after(constraint, ids_of(text("hm"), opened("response")))
    assert {TOKENIZER.token_bytes(t)[:1] for t in inside} == {b"{"}


def test_the_end_is_allowed_as_soon_as_the_answer_is_whole_and_never_before():
    constraint = constraint_of(prompt_of(response_format={"type": "json_object"}))
    assert not TOKENIZER.eos_ids & set(allowed_after(constraint, ids_of(text("{}"))))
    whole = ids_of(text("{}"), closed("response"))
    assert set(allowed_after(constraint, whole)) == {*TOKENIZER.eos_ids, TOKENIZER.special(CLOSE)}
    assert set(allowed_after(constraint, whole + ids_of(closed("message")))) == TOKENIZER.eos_ids


def test_text_that_spells_markup_is_text_to_a_grammar_too():
    constraint = constraint_of(prompt_of(**response_format({"type": "string"})))
    ids = ids_of(text('"<|close|>response<|sep|>'))
    assert {TOKENIZER.special(name) for name in (OPEN, CLOSE, SEP)}.isdisjoint(allowed_after(constraint, ids))


def test_arguments_come_in_any_order_and_once():
    properties = {name: {"type": "integer"} for name in ("a", "b", "c")}
    schema = {"type": "object", "properties": properties, "required": ["a", "c"], "additionalProperties": False}
    body = {"tools": [function(schema=schema, strict=True)], "tool_choice": "required"}
    orders = set()
    for message, _ in answers(range(60), **body):
        for call in message["tool_calls"]:
            pairs = json.loads(call["function"]["arguments"], object_pairs_hook=list)
            names = [name for name, _ in pairs]
            assert len(names) == len(set(names))
            assert {"a", "c"} <= set(names) <= {"a", "b", "c"}
            orders.add(tuple(names))
    assert {("a", "c"), ("c", "a")} <= orders
    assert any(order[0] == "b" for order in orders)


def test_a_continued_answer_is_part_of_what_is_constrained():
    def continuing(content):
        messages = [USER, {"role": "assistant", "content": content, "partial": True}]
        return prompt_of(messages=messages, **response_format({"type": "object", "properties": {"a": {"const": 1}}}))

    prompt = continuing('{"a":')
    constraint = constraint_of(prompt)
    assert {TOKENIZER.token_bytes(t) for t in allowed_after(constraint, [])} == {b"1"}
    ids = random_answer(constraint, 0)
    assert ids is not None
    assert json.loads(prompt.prefill + message_of(prompt, ids)[0]["content"]) == {"a": 1}
    with pytest.raises(RequestError, match="does not begin an answer in the requested format"):
        CONSTRAINTS.constraint(continuing("Sure!"))


def test_equal_requests_are_compiled_once():
    def compiled(name):
        grammar = answer_grammar(prompt_of(tools=[function(name)], tool_choice="required"), TOKENIZER)
        return CONSTRAINTS._cached(grammar).result()

    assert compiled("x") is compiled("x")
    assert compiled("y") is not compiled("x")


def test_an_older_compiler_is_refused(monkeypatch):
    """As in an environment shared with vLLM, which pins one."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.8")
    with pytest.raises(UnsupportedError, match=r"needs xgrammar from 0\.2\.9 on, and 0\.2\.8 is installed"):
        Constraints(TOKENIZER, TOKENIZER.vocab_size).constraint(prompt_of(**response_format({"type": "object"})))
