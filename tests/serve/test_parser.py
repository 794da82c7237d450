"""The output parser: well-formed turns, the malformed ones seen in practice, and independence of chunking."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.serve.chat_prompt import Channel
from k3hal.serve.parser import CallArguments, CallEnd, CallStart, Content, OutputParser, Reasoning
from k3hal.serve.xtml import Segment, close_tag, element, encode, open_tag
from k3hal.tokenizer import END_OF_MSG

from .markup import TOKENIZER, ids_of


def summary(events):
    """What a client ends up with: reasoning, content, and `[name, arguments, complete]` per call."""
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
                calls[index][1] += fragment
            case CallEnd(call=index):
                calls[index][2] = True
    return reasoning, content, calls


def parse(ids, channel: Channel = "reasoning", sizes=None):
    parser = OutputParser(TOKENIZER, channel)
    events, at = [], 0
    for size in [*(sizes or []), len(ids)]:
        events += parser.feed(ids[at : at + size])
        at += size
    return summary(events + parser.finish()), parser


CALL = '⟦call tool="f" index="1"¦'


@pytest.mark.parametrize(
    ("text", "expected", "recovery"),
    [
        ("plan⟧think¦⟦response¦hi⟧response¦⟧message¦∎", ("plan", "hi", []), None),
        ("plan⟧think¦⟦response¦ hi \n⟧response¦⟧message¦∎", ("plan", " hi \n", []), None),
        ("plan⟦response¦hi⟧response¦⟧message¦∎", ("plan", "hi", []), "unclosed_think"),
        ("plan⟧response¦⟧message¦∎", ("plan", "", []), "unclosed_think"),
        ("plan∎", ("plan", "", []), None),
        ("plan", ("plan", "", []), None),
        ("plan⟧think¦⟦response¦hi■", ("plan", "hi", []), None),
        ("plan⟧think¦⟦response¦hi⟧resp", ("plan", "hi", []), None),
        ("plan⟧think⟦response¦hi⟧response∎", ("plan", "hi", []), None),
        ("plan⟧think¦\n⟦response hi⟧response¦∎", ("plan", " hi", []), "missing_separator"),
        ("plan⟧think¦\nhi⟧message¦∎", ("plan", "\nhi", []), "unopened_response"),
        ("plan⟧think¦\n⟦response¦hi⟧response¦\n⟧message¦\n∎", ("plan", "hi", []), None),
        ("⟦think¦plan⟧think¦⟦response¦hi∎", ("plan", "hi", []), None),
        ("a⟦message role=\"assistant\"¦⟦think¦b⟧think¦⟦response¦hi∎", ("ab", "hi", []), None),
        ("<|close|>think<|sep|>∎", ("<|close|>think<|sep|>", "", []), None),
        ("p⟧think¦⟦response¦hi⟧response¦⟧message¦∎⟦response¦more", ("p", "hi", []), None),
        ("p⟧think¦⟦response¦hi⟧response¦⟦response¦more⟧response¦∎", ("p", "hi", []), None),
    ],
)  # fmt: skip
def test_channels(text, expected, recovery):
    result, parser = parse(ids_of(text))
    assert result == expected
    assert list(parser.recoveries) == ([recovery] if recovery else [])


def test_thinking_off_starts_in_the_answer():
    assert parse(ids_of('{"a":1}∎'), "content")[0] == ("", '{"a":1}', [])
    assert parse(ids_of("⟦response¦hi⟧response¦∎"), "content")[0] == ("", "hi", [])
    assert parse(ids_of("⟦think¦why⟧think¦⟦response¦hi∎"), "content")[0] == ("why", "hi", [])


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (f'{CALL}⟦argument key="x" type="number"¦1e2⟧argument¦⟧call¦', [["f", '{"x":1e2}', True]]),
        (f'{CALL}⟦argument key="x" type="string"¦a"\n⟧argument¦⟧call¦', [["f", '{"x":"a\\"\\n"}', True]]),
        (f'{CALL}⟦argument key="x" type="number"¦five⟧argument¦⟧call¦', [["f", '{"x":"five"}', True]]),
        (f'{CALL}⟦argument key="x" type="number"¦NaN⟧argument¦⟧call¦', [["f", '{"x":"NaN"}', True]]),
        (f'{CALL}⟦argument key="x"¦y⟧argument¦⟦argument type="null" key="z"¦null⟧argument¦⟧call¦',
         [["f", '{"x":"y","z":null}', True]]),
        (f'{CALL}⟦argument  key = "a&quot;&amp;" type="array"¦[1, 2]⟧argument¦⟧call¦',
         [["f", '{"a\\"&":[1, 2]}', True]]),
        (f"{CALL}⟧call¦ noise ⟦call index=\"7\" tool=\"g\"¦⟧call¦", [["f", "{}", True], ["g", "{}", True]]),
        (f'{CALL}⟦json type="object"¦{{"s": oops⟧json¦⟧call¦', [["f", '{"s": oops', True]]),
        (f'{CALL}⟦json type="object"¦{{}}⟧json¦⟦argument key="x"¦y⟧argument¦⟧call¦', [["f", "{}", True]]),
        (f'{CALL}⟦argument key="x"¦y⟧argument¦⟦json type="object"¦{{}}⟧json¦⟧call¦', [["f", '{"x":"y"}', True]]),
        ('⟦call index="1"¦⟦argument key="x"¦y⟧argument¦⟧call¦', []),
        (f'{CALL}⟦argument key="x"¦abc', [["f", '{"x":"abc', False]]),
        (f"{CALL}⟧call¦{CALL}⟦argument", [["f", "{}", True], ["f", "", False]]),
        (f'{CALL}⟦argument key="x"¦y⟧call¦{CALL}⟧tools¦', [["f", '{"x":"y"}', True], ["f", "{}", True]]),
        (f'{CALL}⟦argument key="x"¦y{CALL}⟧call¦', [["f", '{"x":"y"}', True], ["f", "{}", True]]),
    ],
)  # fmt: skip
def test_tool_calls(calls, expected):
    result, _ = parse(ids_of(f"p⟧think¦⟦response¦hi⟧response¦⟦tools¦{calls}"))
    assert result == ("p", "hi", expected)


def test_calls_straight_from_reasoning_and_with_a_lost_separator():
    result, parser = parse(ids_of('p⟦toolscall tool="f" index="1"¦⟧call¦⟧tools¦⟧message¦∎'))
    assert result == ("p", "", [["f", "{}", True]])
    assert set(parser.recoveries) == {"unclosed_think", "missing_separator"}


def test_a_long_string_argument_streams():
    parser = OutputParser(TOKENIZER, "content")
    ids = ids_of(f'⟦tools¦{CALL}⟦argument key="x" type="string"¦' + "long " * 800)
    fragments = [event for token_id in ids for event in parser.feed([token_id]) if isinstance(event, CallArguments)]
    assert len(fragments) > 800


def test_a_marker_followed_by_endless_text_does_not_swallow_it_for_ever():
    result, parser = parse(ids_of("⟦" + "x" * 5000 + "⟧response¦∎"), "content")
    assert result[1].strip("x") == ""
    assert parser.recoveries["overlong_tag"] == 1


def test_events_name_the_token_they_come_from():
    parser = OutputParser(TOKENIZER, "content")
    ids = TOKENIZER.encode_ordinary("aé")
    assert parser.feed(ids) == [Content("a", 0), Content("", 1), Content("é", 2)]
    parser = OutputParser(TOKENIZER, "reasoning")
    assert parser.feed([*ids, TOKENIZER.special(END_OF_MSG)]) == [
        Reasoning("a", 0),
        Reasoning("", 1),
        Reasoning("é", 2),
    ]


TEXT = st.text(alphabet='ab<|"\\\n é{}1', max_size=12)
KEY = st.text(alphabet='k&"é', min_size=1, max_size=4)
ARGUMENTS = st.dictionaries(KEY, st.one_of(TEXT, st.integers(), st.booleans(), st.none(), st.lists(st.integers())))
TURN = st.tuples(TEXT, TEXT, st.lists(st.tuples(KEY, ARGUMENTS), max_size=3))
KINDS = {str: "string", int: "number", bool: "boolean", type(None): "null", list: "array"}


def turn_ids(reasoning, content, calls):
    segments = [Segment(reasoning), *close_tag("think"), *element("response", content)]
    if calls:
        segments += open_tag("tools")
        for number, (name, arguments) in enumerate(calls, start=1):
            segments += open_tag("call", ("tool", name), ("index", str(number)))
            for key, value in arguments.items():
                body = value if isinstance(value, str) else json.dumps(value)
                segments += element("argument", body, ("key", key), ("type", KINDS[type(value)]))
            segments += close_tag("call")
        segments += close_tag("tools")
    return encode([*segments, *close_tag("message"), Segment(END_OF_MSG, True)], TOKENIZER)


@settings(deadline=None, max_examples=100)
@given(TURN, st.lists(st.integers(1, 9), max_size=40))
def test_a_rendered_turn_reads_back_whatever_the_chunks(turn, sizes):
    reasoning, content, calls = turn
    result, parser = parse(turn_ids(*turn), sizes=sizes)
    assert result[:2] == (reasoning, content)
    assert [(name, json.loads(text), complete) for name, text, complete in result[2]] == [
        (name, arguments, True) for name, arguments in calls
    ]
    assert not parser.recoveries
    assert parser.done


SOUP = st.lists(
    st.one_of(
        st.sampled_from(["⟦", "⟧", "¦", "∎", *(f"⟦{t}¦" for t in ("think", "response", "tools", "argument"))]),
        st.sampled_from(["response", "think", "tools", CALL, 'call tool="f"', " ", "x", "é", "⟧call¦", "⟧argument¦"]),
    ),
    max_size=30,
).map("".join)


@settings(deadline=None, max_examples=200)
@given(SOUP, st.sampled_from(["reasoning", "content"]), st.lists(st.integers(1, 5), max_size=40))
def test_any_output_parses_alike_for_any_chunking_and_leaks_no_marker(text, channel, sizes):
    ids = ids_of(text)
    whole, first = parse(ids, channel)
    chunked, second = parse(ids, channel, sizes)
    assert whole == chunked
    assert first.recoveries == second.recoveries
    assert "<|" not in json.dumps(whole)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=60))
def test_random_tokens_never_break_the_parser(ids):
    (reasoning, content, calls), _ = parse(ids)
    assert len(reasoning + content) <= sum(len(TOKENIZER.token_bytes(i)) for i in ids)
    assert all(name for name, _, _ in calls)
