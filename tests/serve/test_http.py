"""Answers of a running server, asked with the `openai` client and with plain HTTP."""

import json
from collections import deque
from collections.abc import Sequence

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3hal import __version__
from k3hal.engine.replay_file import ReplayLine
from k3hal.model.synthetic_vocab import synthetic_ranks
from k3hal.serve.xtml import Segment, close_tag, element, encode, open_tag
from k3hal.tokenizer import END_OF_MSG, Tokenizer

TOKENIZER = Tokenizer(synthetic_ranks())
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class Script(Sequence):
    """Replay lines that are used up in order, so that a test sets just the answers it is about to ask for."""

    def __init__(self):
        self.lines = deque()

    def __len__(self):
        return 1

    def __getitem__(self, _):
        return self.lines.popleft()


class Scripted:
    """A server whose next answers a test sets."""

    def __init__(self, server, script):
        self.server = server
        self._script = script
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        self.http = server.client()

    def script(self, *lines):
        """The answers of the next sequences, one each."""
        self._script.lines = deque(lines)

    def stream(self, **body):
        """The chunks of a streamed chat, checked to end as a stream must."""
        response = self.http.post("/v1/chat/completions", json={"messages": HI, "stream": True, **body})
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
        assert events[-1] == "[DONE]"
        return [json.loads(part) for part in events[:-1]]


@pytest.fixture(scope="module")
def api(running):
    script = Script()
    with running(script, {"max_model_len": 2000}) as server:
        scripted = Scripted(server, script)
        yield scripted
        scripted.http.close()
        scripted.openai.close()


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


def test_completions(api, plain):
    api.script(plain("Hello wörld"), plain("Hello wörld"))
    whole = api.openai.completions.create(model="alias", prompt="x", max_tokens=50, logprobs=1)
    assert (whole.choices[0].text, whole.choices[0].finish_reason, whole.model) == ("Hello wörld", "stop", "alias")
    assert "".join(whole.choices[0].logprobs.tokens[:3]) == "Hello w"
    # Bytes inside a character are no text; they are told apart all the same.
    assert whole.choices[0].logprobs.tokens[3:5] == [r"bytes:\xc3", r"bytes:\xb6"]
    assert whole.choices[0].logprobs.top_logprobs[3] == {r"bytes:\xc3": 0.0}
    parts = list(api.openai.completions.create(model="k3", prompt="x", max_tokens=50, stream=True))
    assert "".join(part.choices[0].text for part in parts) == "Hello wörld"
    assert parts[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "texts", "tokens"),
    [
        ("ab", ["aba", "abb"], 2),
        (["ab", "c"], ["aba", "abb", "cc", "cd"], 3),
        ([64, 65], ["aba", "abb"], 2),
        ([[64], [65, 66]], ["aa", "ab", "bcc", "bcd"], 3),
    ],
)
def test_completion_prompts_of_every_form_are_echoed_with_n(api, plain, prompt, texts, tokens):
    api.script(*(plain(c) for c in "abcd"))
    answer = api.openai.completions.create(model="k3", prompt=prompt, echo=True, n=2)
    assert [c.text for c in answer.choices] == texts
    assert answer.usage.prompt_tokens == tokens


def test_max_tokens_of_completions_defaults_to_16(api, plain):
    api.script(plain("x" * 30))
    answer = api.openai.completions.create(model="k3", prompt="x")
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


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


def test_models(api):
    assert [model.id for model in api.openai.models.list()] == ["k3", "alias"]
    assert api.openai.models.retrieve("k3").to_dict()["max_model_len"] == 2000
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        api.openai.models.retrieve("gpt/5")


def test_tokenize_and_detokenize(api):
    answer = api.http.post("/tokenize", json={"prompt": "Hello<|sep|>", "return_token_strs": True}).json()
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 2000)
    assert answer["token_strs"][0] == "Hello"
    assert api.http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "Hello<|sep|>"}
    chat = api.http.post("/tokenize", json={"messages": HI, "thinking": False}).json()
    assert chat["tokens"][0] == TOKENIZER.special("<|open|>")


def test_plain_endpoints(api):
    assert api.http.get("/health").json() == {"status": "ok"}
    assert api.http.get("/ready").json() == {"status": "ready"}
    assert api.http.get("/version").json() == {"version": __version__}


def test_metrics_under_both_names(api, turn):
    api.script(turn("a", "b"))
    api.http.post("/v1/chat/completions", json={"messages": HI})
    text = api.http.get("/metrics").text
    labels = 'engine="0",model_name="k3"'
    for name in ("num_requests_running", "kv_cache_usage_perc", "prompt_tokens_total", "generation_tokens_total"):
        assert f"\nvllm:{name}{{{labels}}} " in text
        assert f"\nk3hal_{name}{{{labels}}} " in text
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="k3"}' in text
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert f"vllm:{name}_bucket" in text
    assert f"k3hal_ready{{{labels}}} 1.0" in text
    assert "vllm:ready" not in text
    assert "vllm:parser_recoveries" not in text


LONG = "x" * 3000
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("chat/completions", b"{", 400, None),
        ("chat/completions", b"[]", 400, None),
        ("chat/completions", b"", 400, None),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "\xff"}]}', 400, None),
        ("chat/completions", {}, 400, "messages"),
        ("chat/completions", {"model": "gpt"}, 404, "model"),
        ("chat/completions", {"model": 3}, 400, "model"),
        ("chat/completions", {"stream": "yes"}, 400, "stream"),
        ("chat/completions", {"stream_options": []}, 400, "stream_options"),
        ("chat/completions", {"temperature": -1}, 400, "temperature"),
        ("chat/completions", {"temperature": "hot"}, 400, "temperature"),
        ("chat/completions", {"top_p": 0}, 400, "top_p"),
        ("chat/completions", {"top_k": -2}, 400, "top_k"),
        ("chat/completions", {"min_p": 2}, 400, "min_p"),
        ("chat/completions", {"presence_penalty": 3}, 400, "presence_penalty"),
        ("chat/completions", {"repetition_penalty": 0}, 400, "repetition_penalty"),
        ("chat/completions", {"n": 0}, 400, "n"),
        ("chat/completions", {"n": True}, 400, "n"),
        ("chat/completions", {"max_tokens": 0}, 400, "max_tokens"),
        ("chat/completions", {"max_tokens": 1.5}, 400, "max_tokens"),
        ("chat/completions", {"min_tokens": 9, "max_tokens": 3}, 400, "min_tokens"),
        ("chat/completions", {"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ("chat/completions", {"logit_bias": {"625": 1}}, 400, "logit_bias"),
        ("chat/completions", {"logit_bias": {"1": 101}}, 400, "logit_bias"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, 400, "logprobs"),
        ("chat/completions", {"top_logprobs": 2}, 400, "top_logprobs"),
        ("chat/completions", {"stop": [""]}, 400, "stop"),
        ("chat/completions", {"stop": ["x"] * 33}, 400, "stop"),
        ("chat/completions", {"stop_token_ids": [625]}, 400, "stop_token_ids"),
        ("chat/completions", {"seed": "x"}, 400, "seed"),
        ("chat/completions", {"continue_final_message": True}, 400, "continue_final_message"),
        ("chat/completions", {"tools": [TOOL], "tool_choice": TOOL}, 400, "tool_choice"),
        ("chat/completions", {"messages": IMAGE}, 400, "messages[0].content[0]"),
        ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}, 400, "prompt"),
        ("completions", {}, 400, "prompt"),
        ("completions", {"prompt": ""}, 400, "prompt"),
        ("completions", {"prompt": []}, 400, "prompt"),
        ("completions", {"prompt": ["a", 1]}, 400, "prompt"),
        ("completions", {"prompt": [625]}, 400, "prompt"),
        ("completions", {"prompt": ["x"] * 129}, 400, "prompt"),
        ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("completions", {"prompt": "x", "best_of": 2}, 400, "best_of"),
        ("completions", {"prompt": "x", "echo": True, "logprobs": 1}, 400, "logprobs"),
    ],
)  # fmt: skip
def test_malformed_requests(api, path, body, status, param):
    if isinstance(body, dict):
        if path == "chat/completions" and body:
            body = {"messages": HI, **body}
        body = json.dumps(body).encode()
    response = api.http.post(f"/v1/{path}", content=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert "\n" not in error["message"]
    assert api.server.engine.stats().num_running == 0


def test_a_prompt_beyond_the_context_names_both_numbers(api):
    response = api.http.post("/v1/completions", json={"prompt": LONG})
    assert "3000 tokens" in response.text
    assert "context is 2000" in response.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
    ],
)
def test_unknown_routes_answer_in_the_api_shape(api, method, path, status):
    response = api.http.request(method, path)
    assert response.status_code == status
    assert path in response.json()["error"]["message"]


def test_unknown_fields_and_nulls_are_ignored(api, plain):
    api.script(plain("a"))
    body = {"messages": HI, "user": "u", "surprise": {"x": 1}, "temperature": None, "stop": None, "n": None}
    assert api.http.post("/v1/chat/completions", json=body).status_code == 200
