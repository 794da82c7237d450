"""The two halves of vLLM's parsing against K3HAL's parser, which reads both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k3hal.model.synthetic_vocab import synthetic_ranks
from k3hal.serve.parser import CallArguments, CallEnd, CallStart, Content, OutputParser, Reasoning
from k3hal.tokenizer import CLOSE, END_OF_MSG, EOS, OPEN, SEP, Tokenizer
from k3hal.vllm.parsing import Answer, Ends, Piece, Thinking

TOKENIZER = Tokenizer(synthetic_ranks())
MARKERS = {"⟦": OPEN, "⟧": CLOSE, "¦": SEP, "∎": END_OF_MSG, "■": EOS}
CALL = '⟦call tool="f" index="1"¦⟦argument key="k" type="string"¦v⟧argument¦⟧call¦'
SOUP = st.lists(
    st.one_of(
        st.sampled_from(
            [f"{mark}{name}¦" for mark in "⟦⟧" for name in ("think", "response", "tools", "message", "call", "other")]
        ),
        st.sampled_from(["⟧think", "⟦", "⟧", "¦", "∎", "■", " ", "\n", CALL, f"⟦tools¦{CALL}⟧tools¦", "think", "é"]),
        st.text("ab <|>\n你", max_size=5),
    ),
    max_size=12,
).map("".join)
SIZES = st.lists(st.integers(1, 5), max_size=30)


class Read(NamedTuple):
    reasoning: str
    content: str
    calls: list[tuple[str, str]]
    ended: list[int]


def ids_of(text: str) -> list[int]:
    """Token ids of text in which ⟦ ⟧ ¦ ∎ ■ stand for the open, close, sep, end-of-message and [EOS] tokens."""
    ids: list[int] = []
    plain = ""
    for char in text:
        if char in MARKERS:
            ids += [*TOKENIZER.encode_ordinary(plain), TOKENIZER.special(MARKERS[char])]
            plain = ""
        else:
            plain += char
    return ids + TOKENIZER.encode_ordinary(plain)


def chunks(ids: Sequence[int], sizes: list[int]) -> list[Sequence[int]]:
    found, at = [], 0
    for size in [*sizes, max(1, len(ids))]:
        found.append(ids[at : at + size])
        at += size
    return found


def by_halves(ids: Sequence[int], sizes: list[int]) -> Read:
    thinking, answer = Thinking(TOKENIZER), Answer(TOKENIZER)
    pieces, reasoning = [], ""
    for chunk in chunks(ids, sizes):
        if thinking.ended:
            pieces.append(answer.feed(chunk))
            continue
        reasoning += thinking.feed(chunk)
        if thinking.ended:
            pieces.append(answer.feed(thinking.answer))
    reasoning += thinking.finish()
    pieces.append(answer.finish())
    return Read(reasoning + "".join(p.reasoning for p in pieces), "".join(p.content for p in pieces), *joined(pieces))


def joined(pieces: list[Piece]) -> tuple[list[tuple[str, str]], list[int]]:
    names = {number: name for piece in pieces for number, name in piece.calls.items()}
    calls = [(name, "".join(p.arguments.get(number, "") for p in pieces)) for number, name in sorted(names.items())]
    return calls, [number for piece in pieces for number in piece.ended]


def by_one(ids: Sequence[int]) -> Read:
    parser = OutputParser(TOKENIZER, "reasoning")
    events = [*parser.feed(ids), *parser.finish()]
    calls: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, CallStart):
            calls[event.call] = [event.name, ""]
        elif isinstance(event, CallArguments):
            calls[event.call][1] += event.fragment
    return Read(
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        "".join(event.text for event in events if isinstance(event, Content)),
        [(name, arguments) for name, arguments in calls.values()],
        [event.call for event in events if isinstance(event, CallEnd)],
    )


@given(SOUP, SIZES)
@example(f"⟧think⟧think¦{CALL}", [])
@example("a⟦response⟧other¦b", [1, 1, 1])
@example("⟧think∎b", [])
def test_the_halves_read_what_the_whole_parser_reads(text: str, sizes: list[int]) -> None:
    ids = ids_of(text)
    assert by_halves(ids, sizes) == by_one(ids)


@pytest.mark.parametrize("sizes", [[], [3, 1, 4], [1] * 200])
def test_a_turn_is_read(sizes: list[int]) -> None:
    text = f"I add.⟧think¦⟦response¦So.⟧response¦⟦tools¦{CALL}⟧tools¦⟧message¦∎"
    assert by_halves(ids_of(text), sizes) == ("I add.", "So.", [("f", '{"k":"v"}')], [0])


def test_without_thinking_the_answer_is_read_from_its_first_token() -> None:
    answer = Answer(TOKENIZER)
    assert answer.feed(ids_of("Yes.⟧response¦∎")).content + answer.finish().content == "Yes."


@pytest.mark.parametrize(
    ("text", "tokens"), [("1 2⟧think¦c", 3), ("⟧think¦", 0), ("1⟦response¦b", 1), ("1⟧other¦2", 2), ("", 0)]
)
def test_thinking_is_counted_without_its_markup(text: str, tokens: int) -> None:
    thinking = Thinking(TOKENIZER)
    thinking.feed(ids_of(text))
    assert thinking.tokens == tokens


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        ("⟦message¦⟦think¦", False),
        ("⟦think¦so⟧think¦", True),
        ("⟦think¦so⟧think¦⟦response¦a⟧response¦⟦think¦", False),
        ("⟦message¦⟦response¦", True),
        ("⟦think¦a⟦tools¦", True),
        ("⟦think¦think", False),
        ("", False),
    ],
)
def test_the_newest_channel_decides(text: str, ended: bool) -> None:
    ends = Ends(TOKENIZER)
    assert ends(ids_of(text)) == ended
    assert ends(ids_of("x" * 50 + text)) == ended
