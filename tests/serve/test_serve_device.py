"""A server over a real engine on a device: what clients see of it, many at once, and with drafts."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch

from k3hal.engine.build import build_engine

pytestmark = pytest.mark.device
SIZES: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "max_model_len": 4096, "max_num_seqs": 32, "memory_budget": 12.0,
}  # fmt: skip
PROMPT = "A long enough beginning that two requests share. " * 12


@pytest.fixture(scope="module")
def server(serving: Callable[..., Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is here")
    built = build_engine("random:tiny", **SIZES, **getattr(request, "param", {}))
    with serving(built.engine, built.tokenizer) as running:
        yield running


def _ask(client: openai.OpenAI, prompt: str, **fields: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    return client.completions.create(model="k3", prompt=prompt, **(options | fields))


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.mark.parametrize("server", [{}, {"draft": "ngram:4"}], indirect=True, ids=["steps ahead", "drafts"])
class TestServing:
    def test_an_answer_is_the_same_alone_streamed_and_among_others(self, client: openai.OpenAI) -> None:
        prompts = [f"{i} {PROMPT[: 20 * i]}" for i in range(16)]
        alone = [_ask(client, prompt).choices[0].text for prompt in prompts]
        streamed = "".join(chunk.choices[0].text for chunk in _ask(client, prompts[3], stream=True))
        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(lambda prompt: _ask(client, prompt).choices[0].text, prompts))
        assert sum(a == b for a, b in zip(alone, together, strict=True)) >= 15
        assert streamed == alone[3] and len(set(alone)) > 12

    def test_a_prompt_that_returns_is_found(self, client: openai.OpenAI) -> None:
        first = _ask(client, f"returning {PROMPT}")
        again = _ask(client, f"returning {PROMPT}and more")
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 128

    def test_seeds_choices_logprobs_and_lengths(self, client: openai.OpenAI) -> None:
        fields = {"temperature": 1.0, "seed": 7, "n": 3, "top_p": 0.9, "logprobs": 2, "max_tokens": 8}
        one, two = (_ask(client, PROMPT[:40], **fields) for _ in range(2))
        assert len({choice.text for choice in one.choices}) > 1
        assert [choice.text for choice in one.choices] == [choice.text for choice in two.choices]
        for choice in one.choices:
            # Special tokens are in neither the text nor the list.
            assert choice.finish_reason == "length" and 0 < len(choice.logprobs.token_logprobs) <= 8
            assert all(value <= 0 for value in choice.logprobs.token_logprobs)

    def test_a_chat_keeps_to_a_schema(self, client: openai.OpenAI) -> None:
        schema = {
            "type": "object",
            "properties": {"yes": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
            "required": ["yes", "kind"],
            "additionalProperties": False,
        }
        reply = client.chat.completions.create(
            model="k3",
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=200,
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}},
            extra_body={"thinking": False},
        )
        said = json.loads(reply.choices[0].message.content or "")
        assert set(said) == {"yes", "kind"} and said["kind"] in ("a", "b")

    def test_what_cannot_be_is_refused_and_the_next_request_answered(self, client: openai.OpenAI, server: Any) -> None:
        with pytest.raises(openai.BadRequestError, match="4096"):
            _ask(client, PROMPT * 100)
        with (
            httpx.Client(base_url=server.url) as http,
            http.stream(
                "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 4000, "stream": True, "ignore_eos": True}
            ) as response,
        ):
            next(response.iter_lines())
        assert _ask(client, "next").choices[0].text
        metrics = httpx.get(f"{server.url}/metrics").text
        assert "vllm:generation_tokens_total" in metrics and 'finished_reason="error"' not in metrics


def test_the_command_serves_and_drains(k3hal: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is here")
    command = k3hal("serve", "random:tiny", "--device", "cuda", "--port", "0", "--memory-budget", "12")
    lines = iter(command.process.stdout.readline, "")
    url = next(word for line in lines for word in line.split() if word.startswith("http://"))
    with httpx.Client(base_url=url, timeout=120) as http:
        while http.get("/ready").status_code != 200:
            assert command.process.poll() is None
        reply = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 4, "ignore_eos": True})
        assert reply.json()["usage"]["completion_tokens"] == 4
    command.process.send_signal(signal.SIGTERM)
    code, _, err = command.finish()
    assert code == 0 and "Traceback" not in err and "memory on cuda:0" in err
