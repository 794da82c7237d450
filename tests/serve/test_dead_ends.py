"""Answers that can never be completed: refused where that shows before, and where not the request's own fault."""

import json

import numpy as np
import pytest
import xgrammar
from starlette.testclient import TestClient

from k3hal.engine.build import build_engine
from k3hal.engine.interface import ConstraintError, DeadEndError
from k3hal.serve.app import create_app
from k3hal.serve.grammar.dead_ends import FORM, dead_end
from k3hal.serve.state import ServerConfig, ServerState

NEVER = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
MAYBE = {"type": "object", "properties": {"next": {"$ref": "#"}}}
HI = [{"role": "user", "content": "Hi"}]
# Greedy: a drawn token ends an answer now and then before the third.
CHAT = {"messages": HI, "thinking": False, "max_tokens": 40, "temperature": 0}


class Blind:
    """A constraint, and its matcher, that lets anything come and fails with `error` after three tokens."""

    def __init__(self, error):
        self.error = error
        self.seen = 0

    def matcher(self):
        return Blind(self.error)

    def fill(self, mask: np.ndarray) -> bool:
        if self.seen == 3:
            raise self.error
        return False

    def accept(self, token_id: int) -> None:
        self.seen += 1


@pytest.fixture(scope="module")
def served(nano_dir):
    built = build_engine(str(nano_dir), device="cpu", dtype="float32", max_model_len=512, max_num_seqs=4)
    state = ServerState(built.engine, built.tokenizer, ServerConfig(model_names=("nano",), warm_up="off"))
    with TestClient(create_app(state)) as client:
        yield client, state


@pytest.fixture
def api(served, monkeypatch):
    """`api(error)` is a client of a server whose every answer meets that error after three tokens."""
    client, state = served

    def prepared(error):
        async def of(_):
            return Blind(error)

        monkeypatch.setattr(state.constraints, "of", of)
        return client

    return prepared


def test_the_compiler_writes_grammars_in_the_form_that_is_read():
    assert json.loads(xgrammar.Grammar.from_ebnf('root ::= "a"').serialize_json())["__VERSION__"] == FORM


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ('root ::= "a" root | "b"', None),
        ('root ::= ("a" | "")+ [b-d]* [^e]', None),
        ('root ::= "a"\nnever_used ::= "b" never_used', None),
        ('root ::= x{0,3}\nx ::= "a" | "b"', None),
        ('root ::= "a" root', "root"),
        ('root ::= "a" | "b" x\nx ::= "c" y\ny ::= "d" x', "root"),
        ('root ::= "a" x*\nx ::= "b" x', "root_1"),
        ("root ::= [^\\0-\\U0010ffff]", "root"),
    ],
)
def test_a_part_that_no_text_satisfies_is_found(source, rule):
    assert dead_end(xgrammar.Grammar.from_ebnf(source)) == rule


def test_a_long_chain_of_rules_takes_no_longer_than_it_is():
    rules = [f'r{i} ::= "a" r{i + 1}' for i in range(5000)]
    assert dead_end(xgrammar.Grammar.from_ebnf("\n".join(["root ::= r0", *rules, 'r5000 ::= "b"']))) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": NEVER}}},
         "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": NEVER}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"type": "integer", "minimum": 2, "maximum": 1}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"enum": []}}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": r"a[^\s\S]|b"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": 'root ::= "a" root'}}, "structured_outputs.grammar"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"x": NEVER}, "required": ["x"]}, "strict": True}}]}, "tools"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_can_never_be_completed_is_refused_before_it_begins(served, fields, param, stream):
    answer = served[0].post("/v1/chat/completions", json={**CHAT, **fields, "stream": stream})
    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["param"], "\n" in answer.json()["error"]["message"]) == (param, False)


def test_recursion_that_may_end_is_followed(served):
    fields = {"response_format": {"type": "json_schema", "json_schema": {"name": "m", "schema": MAYBE}}}
    answer = served[0].post("/v1/chat/completions", json={**CHAT, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"].startswith("{")


def test_a_dead_end_later_on_is_the_requests_fault(api):
    client = api(DeadEndError("as planned"))
    body = {**CHAT, "response_format": {"type": "json_object"}}
    whole = client.post("/v1/chat/completions", json=body)
    expected = {
        "message": "the answer is not complete, and response_format allows nothing that continues it",
        "type": "invalid_request_error", "param": "response_format", "code": "constraint_dead_end",
    }  # fmt: skip
    assert (whole.status_code, whole.json()["error"]) == (400, expected)
    streamed = client.post("/v1/chat/completions", json={**body, "stream": True})
    events = [line.removeprefix("data: ") for line in streamed.text.split("\n") if line]
    assert streamed.status_code == 200
    assert json.loads(events[-1])["error"] == expected
    assert not any(json.loads(event).get("choices", [{}])[0].get("finish_reason") for event in events)


def test_every_api_says_so_in_its_own_words(api):
    client = api(DeadEndError("as planned"))
    form = {"format": {"type": "json_object"}}
    asked = {"input": "Hi", "reasoning": {"effort": "none"}, "text": form, "temperature": 0}
    error = client.post("/v1/responses", json=asked).json()["error"]
    assert (error["param"], error["code"]) == ("text.format", "constraint_dead_end")
    streamed = client.post("/v1/responses", json={**asked, "stream": True}).text
    assert "event: response.failed" in streamed and "text.format allows nothing" in streamed
    tool = {"name": "f", "input_schema": {"type": "object"}, "strict": True}
    message = {"max_tokens": 40, "messages": HI, "thinking": {"type": "disabled"}, "tools": [tool]}
    answer = client.post("/v1/messages", json=message)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "tools allows nothing that continues it" in answer.json()["error"]["message"]


def test_a_constraint_that_breaks_otherwise_is_the_servers_fault(api):
    answer = api(ConstraintError("as planned")).post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
