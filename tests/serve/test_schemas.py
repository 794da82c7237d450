"""JSON schemas as constraints: what is said within one satisfies it; what cannot be followed is refused or left out."""

import json
import random

import jsonschema
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from jsonschema.validators import validator_for

from k3hal.errors import RequestError
from k3hal.serve.grammar.keywords import SchemaError
from k3hal.serve.grammar.schemas import SchemaReader

from .random_answers import (
    CONSTRAINTS,
    answers,
    function,
    prompt_of,
    response_format,
    whatever,
)
from .random_schemas import random_schema

Validator = jsonschema.Draft202012Validator


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
@pytest.mark.timeout(3600)
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
        {"properties": {"größe": {"type": "string", "maxLength": 3}, "é": {"enum": ["été", "\\xdfe", "año"]}},
         "required": ["größe", "é"], "additionalProperties": False},
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
        ({"$ref": "#/anyOf/" + "9" * 5000, "anyOf": [{}]}, "leads nowhere"),
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
