"""Grammars of whole answers: what they allow reads back as what was asked for, and nothing else is allowed."""

import json
import random
from collections.abc import Iterable
from typing import Any

import jsonschema
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from jsonschema.validators import validator_for

from k3hal.errors import RequestError
from k3hal.serve.grammar.answers import answer_grammar
from k3hal.serve.grammar.keywords import SchemaError
from k3hal.serve.grammar.schemas import SchemaReader
from k3hal.serve.xtml import Segment, close_tag, encode, open_tag
from k3hal.tokenizer import CLOSE, OPEN, SEP

from .random_answers import (
    CONSTRAINTS,
    TOKENIZER,
    USER,
    allowed_after,
    constraint_of,
    message_of,
    prompt_of,
    random_answer,
)
from .random_schemas import random_schema

Validator = jsonschema.Draft202012Validator


def response_format(schema, **fields):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": schema, **fields}}}


def function(name="f", schema=None, **fields):
    given = {} if schema is None else {"parameters": schema}
    return {"type": "function", "function": {"name": name, **given, **fields}}


def named(name):
    return {"type": "function", "function": {"name": name}}


def whatever(seeds, **body):
    """Messages put together at random within the constraint of a request; those that come to no end are left out."""
    prompt = prompt_of(**body)
    constraint = constraint_of(prompt)
    return [message_of(prompt, ids) for ids in (random_answer(constraint, seed) for seed in seeds) if ids]


def answers(seeds: Iterable[int] = range(6), **body: Any):
    found = whatever(seeds, **body)
    assert found, "no answer came to an end"
    return found


def ids_of(*segments):
    return encode([s for part in segments for s in (part if isinstance(part, list) else [part])], TOKENIZER)


def text(value):
    return Segment(value)


def opened(tag, *attributes):
    return list(open_tag(tag, *attributes))


def closed(tag):
    return list(close_tag(tag))


def check_schema(schema, seeds):
    """Whatever is said within a schema's constraint satisfies it, as an answer and as the arguments of a call."""
    kind = validator_for(schema, default=Validator)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    said = whatever(seeds, **response_format(schema))
    for message, reason in said:
        validator.validate(json.loads(message["content"]))
        assert reason == "stop"
    called = whatever(seeds, tools=[function(schema=schema, strict=True)], tool_choice="required")
    for message, reason in called:
        assert reason == "tool_calls"
        for call in message["tool_calls"]:
            validator.validate(json.loads(call["function"]["arguments"]))
    return len(said) + len(called)


def follows(schema):
    """Whether a grammar can follow a schema in full."""
    reader = SchemaReader(schema)
    try:
        reader.read()
    except SchemaError:
        return False
    return not reader.unfollowed


def check_random_schema(seed):
    schema = random_schema(random.Random(seed))
    Validator.check_schema(schema)
    if follows(schema):
        try:
            check_schema(schema, range(seed, seed + 2))
        except RequestError as error:  # nothing satisfies it, which the compiler finds out
            event(f"refused: {str(error).partition(': ')[2]:.40}")


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1_000_000))
def test_what_a_schema_allows_satisfies_it(seed):
    check_random_schema(seed)


@pytest.mark.nightly
@settings(max_examples=3000, deadline=None)
@given(st.integers(0, 1_000_000))
def test_what_a_schema_allows_satisfies_it_at_length(seed):
    check_random_schema(seed)


TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "right": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "v": {"const": 1}},
    "required": ["v"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema",
    [
        TREE,
        {"type": "object", "properties": {f"p{i}": {"type": "boolean"} for i in range(9)}, "required": ["p1", "p8"]},
        {
            "type": "object",
            "properties": {f"p{i}": {"type": "null"} for i in range(12)},
            "required": [f"p{i}" for i in range(10)],
        },
        {"type": "object", "properties": {"key": {}, "kez": {}}, "additionalProperties": {"type": "integer"}},
        {"type": "object", "properties": {"a": False, "b": {"type": "null"}}, "required": ["b"]},
        {"anyOf": [{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, {"$ref": "#/$defs/b"}],
         "$defs": {"b": {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"]}}},
        {"properties": {"a": {"type": "integer"}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"properties": {"名": {"type": "string", "enum": ["北京", "a&b\"<|close|>"]}}, "required": ["名"]},
        {"type": "object", "$id": "http://example.com/x", "$schema": "http://json-schema.org/draft-07/schema#",
         "definitions": {"p": {"type": "array", "items": [{"type": "null"}], "additionalItems": False}},
         "properties": {"p": {"$ref": "#/definitions/p"}}, "required": ["p"]},
    ],
)  # fmt: skip
def test_schemas_of_note(schema):
    assert check_schema({**schema, "type": "object"}, range(4))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "text"}, "there is no type 'text' at /type"),
        ({"type": 3}, "type must be a name"),
        ({"properties": []}, "must be an object at /properties"),
        ({"properties": {"a": 3}}, "a schema must be an object or a boolean at /properties/a"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "leads nowhere at /properties/a"),
        ({"$ref": "#"}, "lead to each other without end"),
        ({"anyOf": [{"$ref": "#"}]}, "Circular"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "is more than maxItems"),
        ({"type": "string", "minLength": -1}, "must be a whole number"),
        ({"type": "number", "minimum": "3"}, "must be a number"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "may have no value"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"], "additionalProperties": False}, "not allowed"),
        ({"type": "string", "pattern": "("}, "parenthesis"),
        ({"enum": []}, "no value is allowed"),
        ({"allOf": [{"type": "string"}, {"type": 3}]}, "keywords of the wrong type"),
    ],
)
def test_schemas_that_are_wrong_are_refused(schema, reason):
    with pytest.raises(RequestError, match=reason) as caught:
        CONSTRAINTS.constraint(prompt_of(**response_format(schema)))
    assert "\n" not in str(caught.value)


UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize(
    "part",
    [
        {"uniqueItems": True},
        {"not": {"type": "null"}},
        {"type": "string", "pattern": "(?=a)b"},
        {"$ref": "other.json"},
        {"type": "number", "multipleOf": 0.1},
        {"patternProperties": {"^a": {}}, "type": "object"},
        {"enum": ["a"], "minLength": 3},
    ],
)
def test_strict_refuses_what_it_cannot_follow_and_others_leave_it_out(part):
    schema = {"type": "object", "properties": {"a": part}}
    with pytest.raises(RequestError, match="strict output cannot follow /properties/a") as caught:
        CONSTRAINTS.constraint(prompt_of(**response_format(schema, strict=True)))
    assert caught.value.param == "response_format.json_schema.schema"
    with pytest.raises(RequestError, match="tool 'f' cannot be enforced") as caught:
        CONSTRAINTS.constraint(prompt_of(tools=[function(schema=schema, strict=True)]))
    assert caught.value.param == "tools"
    assert answers(range(6), **response_format(schema))
    assert answers(tools=[function(schema=schema)], tool_choice="required")


def test_a_schema_that_is_not_strict_may_be_beyond_all_grammars():
    wrong = {"type": "nonsense"}
    for message, _ in answers(range(6), **response_format(wrong, strict=False)):
        json.loads(message["content"])
    for message, _ in answers(tools=[function(schema=wrong)], tool_choice="required"):
        assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in message["tool_calls"])


def test_json_object():
    for message, _ in answers(response_format={"type": "json_object"}):
        assert isinstance(json.loads(message["content"]), dict)


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
        assert grammar is not None
        return CONSTRAINTS._cached(grammar).result()

    assert compiled("x") is compiled("x")
    assert compiled("y") is not compiled("x")
