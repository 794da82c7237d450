"""Fields of a request: unknown ones, unsupported ones, and those of Moonshot's hosted contract; ids of requests."""

import json
import re

import pytest

from k3hal.serve.fields import INERT

HI = [{"role": "user", "content": "Hi"}]
MANY = {f"x{i:02}": 1 for i in range(20)}


def ask(server, body, path="chat/completions", **options):
    with server.client() as http:
        return http.post(f"/v1/{path}", json={"messages": HI, **body}, **options)


def test_unknown_fields_are_ignored_and_named(api, turn):
    api.script(*[turn("a", "b")] * 4)
    answer = ask(api.server, {"surprise": 1, "ünknown\r\nX-Bad: 1": 2, "user": "u", "nothing": None})
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "surprise, %C3%BCnknown%0D%0AX-Bad%3A%201"
    assert ask(api.server, MANY).headers["x-ignored-fields"].endswith("x15, 4 more")
    assert "x-ignored-fields" not in ask(api.server, {"user": "u", "store": True}).headers
    assert ask(api.server, {"stream": True, "odd": 1}).headers["x-ignored-fields"] == "odd"


def test_fields_without_effect_are_known_in_every_mode(running, turn):
    with running([turn("a", "b")], refuse_unknown_fields=True) as server:
        assert ask(server, dict.fromkeys(INERT, "x")).status_code == 200
        for path in ("chat/completions", "completions"):
            refused = ask(server, {"prompt": "x", "tempperature": 1}, path)
            assert refused.status_code == 400
            assert re.search("unknown field (messages|prompt|tempperature)", refused.json()["error"]["message"])


@pytest.mark.parametrize("name", ["functions", "bad_words", "thinking_token_budget", "prompt_logprobs"])
def test_what_would_change_the_answer_is_refused_rather_than_ignored(api, name):
    answer = ask(api.server, {name: [1]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


JSON = {"type": "json_object"}
WRONG = {"type": "json_schema", "name": "s", "schema": {"type": "no"}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "x", "response_format": JSON}, "response_format"),
        ("completions", {"prompt": "x", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("completions", {"prompt": "x", "guided_json": {}}, "guided_json"),
        ("chat/completions", {"guided_choice": ["a"]}, "guided_choice"),
        ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("responses", {"input": "x", "response_format": JSON}, "response_format"),
        ("responses", {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ("responses", {"input": "x", "top_logprobs": 21}, "top_logprobs"),
        ("responses", {"input": "x", "text": {"format": {"type": "no"}}}, "text.format"),
        ("responses", {"input": "x", "text": {"format": WRONG}}, "text.format.schema"),
        ("responses/input_tokens", {"input": "x", "text": {"format": {"type": "no"}}}, "text.format"),
        ("messages", {"max_tokens": 1, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("messages", {"max_tokens": 1, "output_config": {"format": WRONG}}, "output_config.format.schema"),
    ],
)
def test_a_refusal_names_the_field_as_the_request_does(api, path, body, param):
    answer = ask(api.server, body, path)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith(param.removesuffix(".schema"))
    assert path == "messages" or error["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 1.0, "top_p": 0.95, "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0}, None),
        ({"thinking": {"type": "disabled"}, "temperature": 0.6}, None),
        ({}, None),
        ({"temperature": 0.6}, "temperature"),
        ({"thinking": False, "temperature": 1.0}, "temperature"),
        ({"top_p": 1.0}, "top_p"),
        ({"n": 2}, "n"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -0.5}, "frequency_penalty"),
    ],
)
def test_the_hosted_contract_fixes_the_sampling(running, turn, body, param):
    with running([turn("a", "b")], kimi_strict_params=True) as server:
        answer = ask(server, body)
        assert answer.status_code == (400 if param else 200), answer.text
        assert param is None or answer.json()["error"]["param"] == param


def test_the_hosted_contract_forces_no_call_while_thinking(running, turn):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    with running([turn("a", "b")], kimi_strict_params=True) as server:
        refused = ask(server, body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
        assert ask(server, {**body, "thinking": False}).status_code == 200


def test_the_hosted_contract_is_what_reaches_the_engine(running, turn):
    with running([turn("a", "b")], kimi_strict_params=True, generation_defaults={"top_p": 0.5}) as server:
        seen = []
        submit = server.engine.submit
        server.engine.submit = lambda request: (seen.append(request.params), submit(request))[1]
        ask(server, {})
        ask(server, {"thinking": False})
    assert [(p.temperature, p.top_p) for p in seen] == [(1.0, 0.95), (0.6, 0.95)]


def test_every_answer_has_a_request_id(api, turn):
    api.script(turn("a", "b"))
    mine = ask(api.server, {"request_id": "r1"}, headers={"X-Request-Id": "trace-1"})
    assert mine.headers["x-request-id"] == mine.headers["request-id"] == "trace-1"
    assert mine.json()["id"].startswith("chatcmpl-r1-")
    for bad in ("a b", "x" * 129, "é"):
        given = ask(api.server, {"model": "no"}, headers={"X-Request-Id": bad.encode()}).headers["x-request-id"]
        assert re.fullmatch("req-[0-9a-f]{32}", given)
    assert api.http.get("/nope").headers["x-request-id"].startswith("req-")


def test_sampling_fields_reach_the_engine(running, turn):
    fields = {"temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7, "presence_penalty": 0.5,
              "frequency_penalty": 0.25, "repetition_penalty": 1.5, "min_tokens": 1, "ignore_eos": True}  # fmt: skip
    with running([turn("a", "b")]) as server:
        seen = []
        submit = server.engine.submit
        server.engine.submit = lambda request: (seen.append(request), submit(request))[1]
        ask(server, {**fields, "logit_bias": {"5": -3}, "priority": -2, "cache_salt": "s", "stop_token_ids": [4]})
    assert {name: getattr(seen[0].params, name) for name in fields} == fields
    assert (seen[0].params.logit_bias, seen[0].params.stop_token_ids) == ({5: -3.0}, (4,))
    assert (seen[0].priority, seen[0].context.salt) == (-2, "s")


def test_the_last_chunk_of_a_stream_carries_usage_as_kimi_does(api, turn):
    api.script(turn("a", "b"), turn("a", "b"))
    chunks = api.stream(n=2)
    shown = [chunk["choices"][0]["usage"] for chunk in chunks if "usage" in chunk["choices"][0]]
    assert len(shown) == 1
    assert shown[0]["completion_tokens"] == 2 * len(turn("a", "b").ids)


def test_the_prompt_of_a_chat_can_be_seen(api):
    seen = api.http.post("/v1/chat/completions/render", json={"messages": HI, "thinking": False}).json()
    assert seen["text"].endswith('message role="assistant"<|sep|><|open|>response<|sep|>')
    assert seen["count"] == len(seen["token_ids"])
    assert seen["token_ids"] == api.http.post("/tokenize", json={"messages": HI, "thinking": False}).json()["tokens"]


def test_a_prompt_can_be_cut_to_its_end(api, plain):
    api.script(plain("x"), plain("x"))
    body = {"prompt": ["abc", "d"], "truncate_prompt_tokens": 2, "echo": True}
    answer = api.http.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["bcx", "dx"]
    assert answer["usage"]["prompt_tokens"] == 3


def test_a_long_prompt_is_rendered_all_the_same(running, turn):
    with running([turn("a", "b")]) as server:
        answer = ask(server, {"messages": [{"role": "user", "content": "x" * 100_000}]})
        assert answer.json()["usage"]["prompt_tokens"] > 100_000
        wrong = ask(server, {"messages": [{"role": "user", "content": "x" * 100_000}, {"role": "nobody"}]})
        assert wrong.json()["error"]["param"] == "messages[1].role"


def test_load_and_ping(api):
    assert api.http.get("/ping").status_code == 200
    assert api.http.get("/load").json() == {"server_load": 0, "running": 0, "waiting": 0, "kv_cache_usage": 0.0}


def test_a_body_that_never_comes_is_408(running, plain):
    import socket

    with running([plain("a")], body_timeout=0.2) as server:
        with socket.create_connection(server.url.removeprefix("http://").split(":")) as raw:
            declared = b"Content-Type: application/json\r\nContent-Length: 10\r\n"
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + declared + b"\r\n{")
            answer = raw.makefile("rb").read()
        assert b" 408 " in answer.split(b"\r\n")[0]
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["message"] == "the body took longer than 0.2 s"
