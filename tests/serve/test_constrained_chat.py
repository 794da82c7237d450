"""Constrained chats of a real model over HTTP. Its weights are random: what a grammar forgets to forbid, it says."""

import contextlib
import json
import threading
import time
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from k3hal.engine.build import build_engine
from k3hal.llm import LLM
from k3hal.model.synthetic_vocab import synthetic_ranks
from k3hal.sampling_params import SamplingParams
from k3hal.serve.server import Server, bind, url_of
from k3hal.serve.state import ServerConfig, ServerState
from k3hal.tokenizer import CLOSE, OPEN, Tokenizer

TOKENIZER = Tokenizer(synthetic_ranks())
HI: Any = [{"role": "user", "content": "Hi"}]
# A model that knows nothing seldom closes anything; this makes its answers end within a test's time.
ENDING = [TOKENIZER.special(CLOSE), *sorted(TOKENIZER.eos_ids), *(TOKENIZER.encode_ordinary(c)[0] for c in '"}]')]
BIAS = {str(token): 6.0 for token in ENDING}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["a", "b", None]},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 3},
    },
    "required": ["name", "kind", "parts"],
    "additionalProperties": False,
    "$defs": {"part": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
                       "required": ["n"], "additionalProperties": False}},
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "make", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
VALIDATE = jsonschema.Draft202012Validator(SCHEMA).validate


@contextlib.contextmanager
def served(directory, **options):
    """A client of a server over the nano model."""
    built = build_engine(str(directory), device="cpu", dtype="float32", **options)
    state = ServerState(built.engine, built.tokenizer, ServerConfig(model_names=("nano",), warm_up="off"))
    ready = threading.Event()
    server = Server(state, announce=lambda _: ready.set(), begun=time.monotonic())
    with bind("127.0.0.1", 0) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            assert ready.wait(20)
            with openai.OpenAI(base_url=f"{url_of(sock)}/v1", api_key="none", max_retries=0, timeout=120) as client:
                yield client, built.engine
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def client(nano_dir):
    """Prompts go in small chunks, and eight sequences share a step."""
    with served(nano_dir, max_model_len=2048, max_num_seqs=8, max_num_batched_tokens=64) as (client, _):
        yield client


def ask(client, thinking, **body):
    """The choices of a chat that was let run to its end."""
    fields = {"model": "nano", "messages": HI, "max_tokens": 900, "logit_bias": BIAS, "seed": 1, **body}
    return client.chat.completions.create(**fields, extra_body={"thinking": thinking}).choices


@pytest.mark.parametrize("thinking", [True, False])
def test_a_schema_holds_for_every_choice(client, thinking):
    choices = ask(client, thinking, response_format=FORMAT, n=4, temperature=1.5, logprobs=True)
    assert [choice.finish_reason for choice in choices] == ["stop"] * 4
    for choice in choices:
        VALIDATE(json.loads(choice.message.content))
        assert bytes(b for e in choice.logprobs.content for b in e.bytes).decode() == choice.message.content
        assert bool(getattr(choice.message, "reasoning_content", None)) == thinking
    assert len({choice.message.content for choice in choices}) > 1


@pytest.mark.parametrize("thinking", [True, False])
def test_required_calls_are_valid_calls(client, thinking):
    choices = ask(client, thinking, tools=TOOLS, tool_choice="required", n=4)
    for choice in choices:
        assert choice.finish_reason == "tool_calls"
        for call in choice.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            assert call.function.name in ("make", "stop")
            if call.function.name == "make":
                VALIDATE(arguments)
            else:
                assert arguments == {}


@pytest.mark.parametrize("thinking", [True, False])
def test_a_named_call_is_that_call_and_no_other(client, thinking):
    choice = {"type": "function", "function": {"name": "make"}}
    for answer in ask(client, thinking, tools=TOOLS, tool_choice=choice, n=2):
        (call,) = answer.message.tool_calls
        assert call.function.name == "make"
        VALIDATE(json.loads(call.function.arguments))


def test_no_call_comes_where_none_may(client):
    for choice in ask(client, False, tools=TOOLS, tool_choice="none", n=4):
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"


def test_json_object(client):
    for choice in ask(client, False, response_format={"type": "json_object"}, n=4):
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


def test_streams_say_what_whole_answers_say(client):
    body = {"tools": TOOLS, "tool_choice": "required", "temperature": 0.8}
    (whole,) = ask(client, True, **body)
    calls, content, reasoning = {}, "", ""
    fields = {"model": "nano", "messages": HI, "max_tokens": 900, "logit_bias": BIAS, "seed": 1, **body}
    for chunk in client.chat.completions.create(**fields, stream=True, extra_body={"thinking": True}):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for part in delta.tool_calls or []:
            name, arguments = calls.get(part.index, ("", ""))
            calls[part.index] = (part.function.name or name, arguments + (part.function.arguments or ""))
    expected = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert list(calls.values()) == expected
    assert content == (whole.message.content or "")
    assert reasoning == whole.message.reasoning_content


def test_greedy_choices_stop_strings_and_token_limits_apply(client):
    (cut,) = ask(client, False, response_format=FORMAT, temperature=0, stop=['"kind"'])
    assert cut.finish_reason == "stop"
    assert cut.message.content.startswith('{"name":"')
    assert cut.message.content.endswith('",')
    (short,) = ask(client, False, response_format=FORMAT, temperature=0, max_tokens=5)
    assert short.finish_reason == "length"
    assert '{"name":"'.startswith(short.message.content[:9])


def test_preempted_sequences_keep_to_their_schema(nano_dir):
    """Memory for two or three sequences of many: what was preempted goes on in the middle of its grammar."""
    text = {"type": "string", "minLength": 300, "maxLength": 320}
    schema = {"type": "object", "properties": {"text": text, "end": {"const": "é"}}, "required": ["text", "end"]}
    form = {"type": "json_schema", "json_schema": {"name": "long", "schema": schema}}
    options = {"max_model_len": 1024, "max_num_seqs": 6, "max_num_batched_tokens": 64, "prefix_cache_policy": "none"}
    with served(nano_dir, memory_budget=0.031, **options) as (client, engine):
        choices = ask(client, False, response_format=form, n=5)
        assert engine.stats().preemptions > 0
    for choice in choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)


def test_unconstrained_neighbours_say_what_they_would_alone(client):
    def plain():
        fields = {"model": "nano", "messages": HI, "max_tokens": 60, "seed": 3}
        return client.chat.completions.create(**fields, extra_body={"thinking": False, "ignore_eos": True}).choices[0]

    alone = plain().message.content
    thread = threading.Thread(target=ask, args=(client, True), kwargs={"response_format": FORMAT, "n": 4})
    thread.start()
    beside = [plain().message.content for _ in range(3)]
    thread.join()
    assert beside == [alone] * 3


def test_a_model_that_would_rather_open_than_close_still_closes_its_thinking(client):
    """Calls in the middle of the reasoning are what it wants; what comes are calls after it."""
    bias = {**BIAS, str(TOKENIZER.special(OPEN)): 100.0}
    for choice in ask(
        client, True, tools=TOOLS[1:], tool_choice="required", parallel_tool_calls=False, logit_bias=bias, n=2
    ):
        assert choice.message.tool_calls
        assert "<|" not in (choice.message.reasoning_content or "")
        assert choice.finish_reason == "tool_calls"


def test_required_calls_beside_a_format(client):
    for choice in ask(client, False, tools=TOOLS, tool_choice="required", response_format=FORMAT, n=3):
        assert choice.message.tool_calls
        if choice.message.content:
            VALIDATE(json.loads(choice.message.content))


PICK = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2, 3]}},
    "required": ["n"],
    "additionalProperties": False,
}


def test_the_other_apis_are_held_to_it_too(client):
    form = {"type": "json_schema", "name": "pick", "schema": PICK, "strict": True}
    answer = client.responses.create(
        model="nano", input="Hi", text={"format": form}, reasoning={"effort": "none"}, max_output_tokens=200
    )
    assert json.loads(answer.output_text)["n"] in (1, 2, 3)
    base = str(client.base_url).removesuffix("/v1/")
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, timeout=120) as other:

        def called() -> Any:
            return other.messages.create(
                model="nano",
                max_tokens=1500,
                messages=HI,
                thinking={"type": "disabled"},
                tools=[{"name": "pick", "input_schema": PICK}],
                tool_choice={"type": "tool", "name": "pick"},
            )

        # What comes before the call is free, and may take all the tokens there are.
        message = next(answer for answer in (called() for _ in range(8)) if answer.stop_reason != "max_tokens")
    (call,) = (block for block in message.content if block.type == "tool_use")
    assert message.stop_reason == "tool_use"
    assert call.input["n"] in (1, 2, 3)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
         "response_format.json_schema.schema"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}]},
         "tools"),
        ({"messages": [*HI, {"role": "assistant", "content": "no", "partial": True}], "response_format": FORMAT},
         "messages"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused(client, body, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, False, **body)
    assert caught.value.param == param


def test_the_python_api_is_held_to_it_too(nano_dir):
    with LLM(str(nano_dir), device="cpu", dtype="float32", max_model_len=2048) as llm:
        params = SamplingParams(max_tokens=600, seed=2, n=2, logit_bias={int(k): v for k, v in BIAS.items()})
        for output in llm.chat(HI, params, response_format=FORMAT, thinking=False).outputs:
            VALIDATE(json.loads(output.text))
        called = llm.chat(HI, params, tools=TOOLS, tool_choice="required").outputs
        assert all(output.tool_calls and output.finish_reason == "tool_calls" for output in called)
