"""Sampling fields of a request, all the way down to a real engine and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from k3hal.engine.build import build_engine

HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def client(nano_dir: Path, serving: Any) -> Iterator[openai.OpenAI]:
    """A client of a server over the nano model."""
    built = build_engine(str(nano_dir), device="cpu", dtype="float32", max_model_len=1024, max_num_seqs=8)
    with (
        serving(built.engine, built.tokenizer) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in ("top_k", "min_p", "priority", "ignore_eos") if name in fields}
    extra |= {"return_token_ids": True, "ignore_eos": True}
    return client.completions.create(model="k3", prompt="Hello", max_tokens=8, extra_body=extra, **fields)


def ids(client: openai.OpenAI, **fields: Any) -> list[list[int]]:
    return [choice.token_ids for choice in complete(client, **fields).choices]


def test_choice_i_of_n_is_what_the_seed_plus_i_gives_alone(client: openai.OpenAI) -> None:
    together = ids(client, n=3, seed=11)
    assert together == [ids(client, seed=11 + i)[0] for i in range(3)]
    assert together == ids(client, n=3, seed=11)
    assert len({tuple(choice) for choice in together}) == 3


def test_greedy_is_reached_by_every_road(client: openai.OpenAI) -> None:
    greedy = ids(client, temperature=0)[0]
    for fields in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        assert ids(client, seed=3, **fields)[0] == greedy
    assert ids(client, temperature=0, priority=-5)[0] == greedy


def test_a_bias_decides(client: openai.OpenAI) -> None:
    assert ids(client, seed=1, logit_bias={"65": 100}) == [[65] * 8]
    greedy = ids(client, temperature=0)[0]
    assert greedy[0] not in ids(client, temperature=0, logit_bias={str(greedy[0]): -100})[0]


def test_logprobs_are_of_the_tokens_and_sorted(client: openai.OpenAI) -> None:
    choice = complete(client, temperature=0, logprobs=3).choices[0]
    shown = choice.logprobs
    # Control tokens, which a random model likes, have no text and none of these.
    assert 1 <= len(shown.tokens) <= 8
    for token, logprob, top in zip(shown.tokens, shown.token_logprobs, shown.top_logprobs, strict=True):
        assert list(top.values()) == sorted(top.values(), reverse=True)
        assert next(iter(top)) == token
        assert top[token] == pytest.approx(logprob) and logprob <= 0


def test_chat_logprobs_cover_the_content_alone(client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(
        model="k3", messages=HI, max_tokens=8, seed=4, logprobs=True, top_logprobs=2, extra_body={"thinking": False}
    )
    choice = answer.choices[0]
    pieces = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert pieces.decode("utf-8", "replace") == (choice.message.content or "")
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_stop_strings_and_ids_end_a_real_answer(client: openai.OpenAI) -> None:
    plain = complete(client, temperature=0)
    text = plain.choices[0].text
    word = next(piece for piece in (text[2:4], text[1:3]) if piece.strip() and "\ufffd" not in piece)
    cut = complete(client, temperature=0, stop=[word]).choices[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (text[: text.index(word)], "stop", word)
    greedy = plain.choices[0].token_ids
    body = {"stop_token_ids": [greedy[3]], "return_token_ids": True, "ignore_eos": True}
    by_id: Any = client.completions.create(model="k3", prompt="Hello", max_tokens=8, temperature=0, extra_body=body)
    end = greedy.index(greedy[3])
    assert by_id.choices[0].token_ids == greedy[: end + 1]
    assert by_id.choices[0].stop_reason == greedy[3]


def test_a_stream_says_what_a_whole_answer_does(client: openai.OpenAI) -> None:
    whole = complete(client, seed=9, n=2)
    body = {"return_token_ids": True, "ignore_eos": True}
    chunks: Any = client.completions.create(
        model="k3", prompt="Hello", max_tokens=8, seed=9, n=2, stream=True, extra_body=body,
        stream_options={"include_usage": True},
    )  # fmt: skip
    usage: Any = None
    texts, tokens = ["", ""], [[], []]
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.token_ids
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.token_ids for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens == 16
    assert usage.prompt_tokens == whole.usage.prompt_tokens


SCHEMA: Any = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def test_the_other_apis_force_calls_and_formats_too(client: openai.OpenAI) -> None:
    anthropic: Any = pytest.importorskip("anthropic")
    url = str(client.base_url).removesuffix("/v1/")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as other:
        tools = [{"name": "set", "input_schema": SCHEMA}, {"name": "other", "input_schema": SCHEMA}]
        asked: Any = {"model": "k3", "max_tokens": 300, "messages": HI, "thinking": {"type": "disabled"}}
        message = other.messages.create(**asked, tools=tools, tool_choice={"type": "tool", "name": "set"})
        calls = [block for block in message.content if block.type == "tool_use"]
        assert (message.stop_reason == "tool_use") == bool(calls)
        assert {call.name for call in calls} <= {"set"}
        assert all(isinstance(call.input["ok"], bool) for call in calls)
        formatted = other.messages.create(**asked, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
        assert json.loads(formatted.content[0].text) in ({"ok": True}, {"ok": False})
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}
    answer = client.responses.create(
        model="k3", input="Hi", reasoning={"effort": "none"}, text=text, max_output_tokens=300
    )
    assert json.loads(answer.output_text) in ({"ok": True}, {"ok": False})
