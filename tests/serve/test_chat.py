"""Chat completions of a running server, asked with the `openai` client and with plain HTTP."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3hal.engine.replay_file import ReplayLine
from k3hal.model.synthetic_vocab import synthetic_ranks
from k3hal.serve.xtml import Segment, close_tag, element, encode, open_tag
from k3hal.tokenizer import END_OF_MSG, Tokenizer

TOKENIZER = Tokenizer(synthetic_ranks())
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def joined(chunks, field):
    return "".join(c["choices"][0]["delta"].get(field) or "" for c in chunks if c["choices"])


def test_chat(api, turn):
    line = turn("because", "Hello world")
    api.script(line)
    answer = api.openai.chat.completions.create(model="k3", messages=HI, reasoning_effort="low")
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Hello world", "stop")
    assert choice.message.reasoning_content == "because"
    assert answer.usage.completion_tokens == len(line.ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(line.ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(TOKENIZER.encode_ordinary("because"))


def test_chat_stream(api, turn):
    api.script(turn("because", "Hello wörld"))
    options = {"include_usage": True}
    chunks = list(api.openai.chat.completions.create(model="k3", messages=HI, stream=True, stream_options=options))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Hello wörld"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens > 0
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_usage_can_come_with_every_chunk(api, plain):
    api.script(plain("abc"))
    chunks = api.stream(thinking=False, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [c["usage"]["completion_tokens"] for c in chunks] == sorted(c["usage"]["completion_tokens"] for c in chunks)


def test_thinking_off_and_cut_off_reasoning(api, plain):
    api.script(plain("Hello"), plain("Hello"))
    off = api.openai.chat.completions.create(model="k3", messages=HI, extra_body={"thinking": {"type": "disabled"}})
    assert off.choices[0].message.content == "Hello"
    cut = api.openai.chat.completions.create(model="k3", messages=HI)
    assert cut.choices[0].finish_reason == "stop"
    assert (cut.choices[0].message.content, cut.choices[0].message.reasoning_content) == (None, "Hello")


def test_max_tokens_inside_reasoning(api, plain):
    api.script(plain("Hello Hello Hello"))
    answer = api.openai.chat.completions.create(model="k3", messages=HI, max_completion_tokens=2, max_tokens=9)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content is None
    assert answer.usage.completion_tokens == 2


def test_reasoning_can_be_left_out(api, turn):
    api.script(turn("because", "hi"), turn("because", "hi"))
    whole = api.http.post("/v1/chat/completions", json={"messages": HI, "include_reasoning": False}).json()
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "hi"}
    assert joined(api.stream(include_reasoning=False), "reasoning_content") == ""


def test_n_choices_take_one_line_each(api, turn):
    lines = [turn("a", "first"), turn("b", "second"), turn("c", "third")]
    api.script(*lines)
    answer = api.openai.chat.completions.create(model="k3", messages=HI, n=3)
    assert [c.message.content for c in answer.choices] == ["first", "second", "third"]
    assert answer.usage.completion_tokens == sum(len(line.ids) for line in lines)
    api.script(*lines)
    text = {0: "", 1: "", 2: ""}
    for chunk in api.openai.chat.completions.create(model="k3", messages=HI, n=3, stream=True):
        text[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert text == {0: "first", 1: "second", 2: "third"}


@pytest.mark.parametrize(
    ("fields", "content", "stop"),
    [
        ({"stop": "lo wo"}, "Hel", "lo wo"),
        ({"stop": ["xyz", "wor"]}, "Hello ", "wor"),
        ({"stop": "wor", "include_stop_str_in_output": True}, "Hello wor", "wor"),
        ({"stop": "nowhere"}, "Hello world, user", None),
        ({"stop": "e", "min_tokens": 12}, "Hello world, us", "e"),
    ],
)
def test_stop_strings_match_across_tokens_in_the_answer(api, turn, fields, content, stop):
    api.script(turn("", "Hello world, user"), turn("", "Hello world, user", per_step=50))
    for stream in (False, True):
        if stream:
            chunks = api.stream(**fields)
            got = joined(chunks, "content"), chunks[-1]["choices"][0].get("stop_reason")
        else:
            answer = api.http.post("/v1/chat/completions", json={"messages": HI, **fields}).json()["choices"][0]
            got = answer["message"]["content"], answer["stop_reason"]
            assert answer["finish_reason"] == "stop"
        assert got == (content, stop)


def test_a_stop_string_in_the_reasoning_ends_the_answer(api, turn):
    api.script(turn("one two", "three"))
    choice = api.openai.chat.completions.create(model="k3", messages=HI, stop=["two"]).choices[0]
    assert (choice.message.reasoning_content, choice.message.content) == ("one ", None)
    assert choice.finish_reason == "stop"


def test_a_stop_string_is_not_found_across_channels(api, turn):
    api.script(turn("ab", "cd"))
    choice = api.openai.chat.completions.create(model="k3", messages=HI, stop=["bc"]).choices[0]
    assert (choice.message.reasoning_content, choice.message.content) == ("ab", "cd")


def test_chat_logprobs_cover_the_content_tokens_only(api, turn):
    line = turn("because", "Hé", per_step=3)
    api.script(line, line)
    answer = api.openai.chat.completions.create(model="k3", messages=HI, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert bytes(b for e in entries for b in e.bytes).decode() == "Hé"
    assert all(e.logprob == 0.0 and e.top_logprobs[0].bytes == e.bytes for e in entries)
    chunks = api.stream(logprobs=True)
    streamed = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert [e["bytes"] for e in streamed] == [e.bytes for e in entries]


def test_logprobs_end_where_a_stop_string_cuts(api, turn):
    api.script(turn("", "abcdef"))
    answer = api.openai.chat.completions.create(model="k3", messages=HI, logprobs=True, stop=["de"])
    assert [e.token for e in answer.choices[0].logprobs.content] == ["a", "b", "c"]


def call_line(**fields):
    segments = [Segment("p"), *close_tag("think"), *element("response", ""), *open_tag("tools")]
    for index in ("1", "2"):
        segments += open_tag("call", ("tool", "f"), ("index", index))
        segments += element("argument", "long text", ("key", "x"), ("type", "string"))
        segments += close_tag("call")
    segments += [*close_tag("tools"), *close_tag("message"), Segment(END_OF_MSG, True)]
    return ReplayLine(tuple(encode(segments, TOKENIZER)), **fields)


def test_tool_calls(api):
    api.script(call_line(), call_line(per_step=4))
    message = api.openai.chat.completions.create(model="k3", messages=HI, tools=[TOOL]).choices[0]
    assert message.finish_reason == "tool_calls"
    assert message.message.content is None
    assert [c.function.arguments for c in message.message.tool_calls] == ['{"x":"long text"}'] * 2
    assert len({c.id for c in message.message.tool_calls}) == 2
    calls = {}
    for chunk in api.openai.chat.completions.create(model="k3", messages=HI, tools=[TOOL], stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            calls[part.index] = calls.get(part.index, "") + part.function.arguments
    assert calls == {0: '{"x":"long text"}', 1: '{"x":"long text"}'}


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_calls_nobody_asked_for_are_dropped(api, fields):
    api.script(call_line())
    choice = api.http.post("/v1/chat/completions", json={"messages": HI, **fields}).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    assert "<|" not in json.dumps(choice)


def test_token_ids_on_request(api, turn):
    line = turn("a", "b", per_step=2)
    api.script(line, line)
    whole = api.http.post("/v1/chat/completions", json={"messages": HI, "return_token_ids": True}).json()
    assert whole["choices"][0]["token_ids"] == list(line.ids)
    chunks = api.stream(return_token_ids=True)
    assert [t for c in chunks for t in c["choices"][0].get("token_ids", [])] == list(line.ids)


PIECES = st.lists(
    st.sampled_from(
        [*range(40, 60), *TOKENIZER.encode_ordinary("é"), 256, 368, 370, 371, 372, 373, 374, 261, 289, 296, 300]
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PIECES, st.integers(1, 7), st.sampled_from([[], ["I"], ["JJ", "KL"]]), st.integers(1, 50))
def test_streamed_and_whole_answers_are_equal(api, ids, per_step, stop, max_tokens):
    api.script(ReplayLine(tuple(ids)), ReplayLine(tuple(ids), per_step))
    fields = {"stop": stop, "max_tokens": max_tokens}
    whole = api.http.post("/v1/chat/completions", json={"messages": HI, **fields}).json()
    chunks = api.stream(stream_options={"include_usage": True}, **fields)
    message, last = whole["choices"][0]["message"], chunks[-2]["choices"][0]
    assert joined(chunks, "content") == (message["content"] or "")
    assert joined(chunks, "reasoning_content") == message.get("reasoning_content", "")
    assert last["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["usage"] == whole["usage"]
