"""`vllm serve` as docs/vllm.md shows it, asked by the `openai` client."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: `make test-vllm` has it"
    ),
    pytest.mark.nightly,
    pytest.mark.timeout(1200),
]

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")
DEADLINE = 900
"""Seconds; a start takes a minute on a quiet machine."""
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}},
    },
}
CALL = (
    "<|open|>response<|sep|>Let me see.<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|>'
    '<|open|>argument key="a" type="number"<|sep|>2<|close|>argument<|sep|>'
    '<|open|>argument key="s" type="string"<|sep|>x "y"<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
)
MARKUP = {"372": 100, "373": 100, "374": 100}
"""In favour of `<|open|>`, `<|close|>` and `<|sep|>` over text that spells them."""


@dataclass
class Served:
    url: str
    log: Path
    client: openai.OpenAI

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()


def block(language: str) -> str:
    """The page's first block of a language."""
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def environment(folder: Path) -> dict[str, str]:
    """`k3hal` and `vllm` are those of this interpreter."""
    tools = folder / "bin"
    tools.mkdir()
    for name, start in (("k3hal", "-m k3hal"), ("vllm", "-m vllm.entrypoints.cli.main")):
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -P {start} "$@"\n')
        (tools / name).chmod(0o755)
    return os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "K3HAL_SHADOW": "rms_norm:0.1",
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The page's commands, without those that make the environment, on a free port."""
    folder = tmp_path_factory.mktemp("serve")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    make, serve = block("bash").replace("\\\n", "").replace("8000", str(port)).strip().splitlines()[2:]
    assert make.startswith("k3hal model init") and serve.startswith("vllm serve")
    env, log = environment(folder), folder / "log"
    subprocess.run(make, shell=True, cwd=folder, env=env, check=True, capture_output=True)
    with log.open("w") as out:
        running = subprocess.Popen(
            f"exec {serve}", shell=True, cwd=folder, env=env, stdout=out, stderr=out, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300) as client:
            found = Served(url, log, client)
            _wait(found, running)
            yield found
    finally:
        running.send_signal(signal.SIGINT)
        try:
            running.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)


def _wait(server: Served, running: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        assert running.poll() is None, server.log.read_text()[-6000:]
        try:
            server.get("/health")
        except OSError:
            time.sleep(1)
        else:
            return
    pytest.fail(f"no server after {DEADLINE} s: {server.log.read_text()[-6000:]}")


def test_the_pages_client_is_answered(served: Served) -> None:
    port = served.url.rpartition(":")[2]
    code = block("python").replace("8000", port)
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "Hi!\n"), ran.stderr


def asked() -> dict[str, Any]:
    """Thinking that ends after six tokens, then an answer with a call, whatever the weights would say."""
    extra = {"structured_outputs": {"choice": [CALL]}, "thinking_token_budget": 6}
    return {
        "model": "./tiny", "messages": [{"role": "user", "content": "Add"}], "tools": [TOOL], "max_tokens": 300,
        "temperature": 0, "logit_bias": MARKUP, "extra_body": extra,
    }  # fmt: skip


def test_a_chat_thinks_answers_and_calls_a_tool(served: Served) -> None:
    reply = served.client.chat.completions.create(**asked())
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls" and message.content == "Let me see."
    assert message.model_dump()["reasoning"]
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    called = call.model_dump()["function"]
    assert called["name"] == "add" and json.loads(called["arguments"]) == {"a": 2, "s": 'x "y"'}
    history = [*asked()["messages"], message.model_dump(exclude_none=True)]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
    again = served.client.chat.completions.create(model="./tiny", messages=history, tools=[TOOL], max_tokens=2)  # pyright: ignore[reportArgumentType]
    assert again.usage is not None and reply.usage is not None
    assert again.usage.prompt_tokens > reply.usage.prompt_tokens


def test_a_stream_says_the_same(served: Served) -> None:
    whole = served.client.chat.completions.create(**asked()).choices[0].message
    reasoning = content = arguments = ""
    finish = None
    for chunk in served.client.chat.completions.create(stream=True, **asked()):
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning", None) or ""
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                arguments += (call.function and call.function.arguments) or ""
            finish = choice.finish_reason or finish
    assert (reasoning, content, finish) == (whole.model_dump()["reasoning"], whole.content, "tool_calls")
    assert json.loads(arguments) == {"a": 2, "s": 'x "y"'}


def test_without_thinking_the_answer_comes_at_once(served: Served) -> None:
    reply = served.client.chat.completions.create(
        model="./tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=40, temperature=0,
        reasoning_effort="none", response_format={"type": "json_object"},
    )  # fmt: skip
    assert not reply.choices[0].message.model_dump().get("reasoning")
    assert (reply.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"reasoning_effort": "medium"}, "reasoning_effort must be one of low, high, max"),
        ({"extra_body": {"chat_template_kwargs": {"thinking": 1}}}, "thinking must be true or false"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "role must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}, "image"),
    ],
)
def test_a_bad_request_is_refused_by_field(served: Served, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        served.client.chat.completions.create(
            **{"model": "./tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **wrong}
        )


def test_the_plan_is_printed_once_and_metrics_count(served: Served) -> None:
    log = served.log.read_text()
    assert log.count("dispatch plan, ") == 1 and "kda_decode" in log
    served.client.completions.create(model="./tiny", prompt="Hello", max_tokens=3, temperature=0)
    figures = dict(line.rsplit(" ", 1) for line in served.get("/metrics").splitlines() if line.startswith("k3hal_"))
    labels = 'engine="0",model_name="./tiny"'
    assert float(figures["k3hal_engine_steps_total{" + labels + ',rank="0"}']) >= 3
    assert float(figures["k3hal_shadow_compared_total{" + labels + ',op="rms_norm",rank="0"}']) > 0
    assert any("kda_decode" in name for name in figures if name.startswith("k3hal_plan_layers"))
