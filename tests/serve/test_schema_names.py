"""Names of properties that need an escape in JSON, or are not ASCII: no other property takes their place."""

import json

import pytest
import xgrammar

from k3hal.serve.grammar.closing import closed_where_needed
from k3hal.serve.grammar.compiler import _json
from k3hal.serve.grammar.schemas import SchemaReader

BYTES = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)], xgrammar.VocabType.RAW, stop_token_ids=[0])


def accepts(schema, text):
    """Whether the grammar of a schema lets a text be said, and end."""
    grammar = _json(xgrammar, json.dumps(closed_where_needed(SchemaReader(schema).read())), (",", ":"))
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(BYTES).compile_grammar(grammar))
    return matcher.accept_string(text) and matcher.accept_token(0)


def nested(schema):
    return {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/o"}}], "$defs": {"o": schema}}


@pytest.mark.parametrize("name", ['k"&', "a\\b", "n\nm", "é", "名"])
@pytest.mark.parametrize("extra", [True, {"type": "integer"}])
def test_what_is_said_beside_an_odd_name_is_json_and_of_its_schema(name, extra):
    schema = {"type": "object", "properties": {name: {"const": "x"}}, "additionalProperties": extra}
    said = json.dumps({name: "x"}, ensure_ascii=False, separators=(",", ":"))
    other = said.replace('"x"', "1")
    raw = f'{{"{name}":1}}'
    for of, form in ((schema, "{}"), (nested(schema), "[{}]")):
        assert accepts(of, form.format(said)) and accepts(of, form.format("{}"))
        assert not accepts(of, form.format(other)), "a second property of the name, of another kind"
        assert not accepts(of, form.format(raw)) and not accepts(of, form.format('{"k"B":1}'))


def test_beside_plain_names_other_properties_stay():
    schema = {"type": "object", "properties": {"key": {"const": "x"}}, "additionalProperties": {"type": "integer"}}
    assert accepts(schema, '{"key":"x","é":1}') and accepts(schema, '{"kez":1}') and not accepts(schema, '{"key":1}')


def test_what_only_looks_like_an_object_stays_as_it_is():
    value = {"type": "object", "properties": {"é": 1}, "additionalProperties": True}
    assert closed_where_needed({"enum": [value], "const": value}) == {"enum": [value], "const": value}
