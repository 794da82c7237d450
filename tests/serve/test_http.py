"""Everything but chat: plain completions, the small endpoints, metrics, and requests that are refused."""

import json

import openai
import pytest

from k3hal import __version__
from k3hal.model.synthetic_vocab import synthetic_ranks
from k3hal.tokenizer import Tokenizer

TOKENIZER = Tokenizer(synthetic_ranks())
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


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
    figures = [line.split(" ") for line in text.splitlines() if line.startswith("vllm:prompt_tokens")]
    by_source = sum(float(value) for name, value in figures if "_by_source_total" in name)
    assert by_source == next(float(value) for name, value in figures if "prompt_tokens_total" in name) > 0
    assert f"vllm:request_max_num_generation_tokens_count{{{labels}}} " in text
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
        ("chat/completions", {"logit_bias": {"9" * 5000: 1}}, 400, "logit_bias"),
        ("chat/completions", {"logit_bias": {"\u0661": 1}}, 400, "logit_bias"),
        ("chat/completions", {"logit_bias": {"1": 101}}, 400, "logit_bias"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ("chat/completions", {"top_logprobs": 2}, 400, "top_logprobs"),
        ("chat/completions", {"stop": [""]}, 400, "stop"),
        ("chat/completions", {"stop": ["x"] * 33}, 400, "stop"),
        ("chat/completions", {"stop_token_ids": [625]}, 400, "stop_token_ids"),
        ("chat/completions", {"seed": "x"}, 400, "seed"),
        ("chat/completions", {"continue_final_message": True}, 400, "continue_final_message"),
        ("chat/completions", {"tools": [TOOL], "tool_choice": {"type": "function"}}, 400, "tool_choice"),
        ("chat/completions", {"messages": IMAGE}, 400, "messages[0].content[0]"),
        ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}, 400, "messages"),
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


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "prompt is missing"),
        ({"prompt": ["a", 1]}, "prompt must be a text, a list of texts, token ids, or a list of those, got ['a', 1]"),
        ({"prompt": "x", "stop": 3}, "stop must be a text or a list of texts, got 3"),
        ({"prompt": "x", "stop": ["a", 3]}, "stop must be a text or a list of texts, got ['a', 3]"),
    ],
)
def test_a_field_of_several_types_says_them_all(api, body, message):
    assert api.http.post("/v1/completions", json=body).json()["error"]["message"] == message


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
