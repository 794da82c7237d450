"""Parser and renderer on inputs made at random: briefly each time, and on a million of them at night."""

from __future__ import annotations

import random
from typing import Any

import pytest

from k3hal.errors import RequestError
from k3hal.serve.chat_prompt import render_chat
from k3hal.serve.media.images import Images
from k3hal.serve.parser import CallArguments, CallEnd, CallStart, Content, Event, OutputParser, Reasoning

from .markup import TOKENIZER, ids_of

COUNTS = [3000, pytest.param(1_000_000, marks=[pytest.mark.nightly, pytest.mark.timeout(7200)])]
TAGS = [
    "think",
    "response",
    "tools",
    "message",
    'call tool="f" index="1"',
    'argument key="x" type="string"',
    "argument",
]
# Markup, pieces of it, and text none of whose letters occurs in markup.
PIECES = [
    *(ids_of(text) for tag in TAGS for text in (f"⟦{tag}¦", f"⟧{tag}¦", f"⟦{tag}", f"⟧{tag}")),
    *(ids_of(text) for text in ("⟦", "⟧", "¦", "∎", "ÜÜ", "Ü", " ", "0", "<|close|>", '{"Ü":0}', "Ü\n")),
    *([token] for token in range(256) if TOKENIZER.token_bytes(token) in (b"\xc3", b"\x80")),
    *([token] for token in (TOKENIZER.special_base, TOKENIZER.special_base + 40)),
]
ALLOWED = frozenset('ÜÀ� \n0{}":<|>close')


def random_output(dice: random.Random) -> list[int]:
    return [token for _ in range(dice.randrange(1, 14)) for token in dice.choice(PIECES)]


def client_view(events: list[Event]) -> tuple[str, str, list[list[Any]]]:
    reasoning, content, calls = "", "", []
    for event in events:
        match event:
            case Reasoning(text=text):
                reasoning += text
            case Content(text=text):
                content += text
            case CallStart(call=index, name=name):
                assert index == len(calls)
                calls.append([name, "", False])
            case CallArguments(call=index, fragment=fragment):
                assert index == len(calls) - 1
                calls[index][1] += fragment
            case CallEnd(call=index):
                calls[index][2] = True
    return reasoning, content, calls


@pytest.mark.parametrize("count", COUNTS)
def test_any_output_reads_alike_in_any_pieces_and_shows_no_markup(count: int) -> None:
    dice = random.Random(count)
    for _ in range(count):
        ids, channel = random_output(dice), dice.choice(("reasoning", "content"))
        whole = OutputParser(TOKENIZER, channel)
        expected = client_view(whole.feed(ids) + whole.finish())
        pieces, events, at = OutputParser(TOKENIZER, channel), [], 0
        while at < len(ids):
            size = dice.randrange(1, 6)
            events += pieces.feed(ids[at : at + size])
            at += size
        assert client_view(events + pieces.finish()) == expected, ids
        assert pieces.recoveries == whole.recoveries, ids
        reasoning, content, calls = expected
        assert ALLOWED.issuperset(reasoning + content), (ids, expected)
        assert all(name == "f" for name, _, _ in calls), ids


KEYS = ["messages", "role", "content", "tools", "type", "function", "name", "arguments", "tool_calls", "id", "partial",
        "tool_call_id", "tool_choice", "response_format", "json_schema", "schema", "thinking", "text", "strict",
        "thinking_effort", "reasoning_content", "chat_template_kwargs", "parameters", "image_url"]  # fmt: skip
LEAVES = ["system", "user", "assistant", "tool", "function", "text", "image_url", "auto", "required", "json_object",
          "json_schema", "low", "<|open|>", "[EOS]", "", "\ud800", 0, 1.5, True, False, None]  # fmt: skip


def random_value(dice: random.Random, depth: int) -> Any:
    if depth <= 0 or dice.random() < 0.3:
        return dice.choice(LEAVES)
    if dice.random() < 0.4:
        return [random_value(dice, depth - 1) for _ in range(dice.randrange(3))]
    return {key: random_value(dice, depth - 1) for key in dice.sample(KEYS, dice.randrange(5))}


def random_body(dice: random.Random) -> dict[str, Any]:
    """A request that is nearly right: messages with known roles, and anything in any field."""
    messages = []
    for _ in range(dice.randrange(4)):
        message = random_value(dice, 3)
        message = message if isinstance(message, dict) else {}
        message |= {"role": dice.choice(["system", "user", "assistant", "tool"])}
        messages.append(message | ({"content": dice.choice(["hi", "<|close|>"])} if dice.random() < 0.7 else {}))
    body = random_value(dice, 3)
    body = body if isinstance(body, dict) else {}
    return body | {"messages": messages} if dice.random() < 0.9 else body


@pytest.mark.parametrize("count", COUNTS)
def test_any_request_is_rendered_or_refused_and_forges_nothing(count: int) -> None:
    dice, rendered = random.Random(count), 0
    for _ in range(count):
        body = random_body(dice)
        try:
            prompt = render_chat(body, images=Images())
            ids = prompt.ids(TOKENIZER)
        except RequestError:
            continue
        rendered += 1
        control = [TOKENIZER.decode([token]) for token in ids if TOKENIZER.is_special(token)]
        assert control == [segment.text for segment in prompt.segments if segment.markup], body
    assert rendered > count // 20
