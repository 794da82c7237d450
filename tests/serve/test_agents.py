"""Agent frameworks and clients of other languages, against a real server whose model is a replay."""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def agents():
    """openai-agents, without its habit of sending traces home."""
    module: Any = pytest.importorskip("agents")
    module.set_tracing_disabled(True)
    return module


@pytest.mark.parametrize("api_of", ["responses", "chat"])
@pytest.mark.parametrize("streamed", [False, True])
def test_openai_agents_call_their_tools(running, calling, turn, agents, api_of, streamed):
    lines = [
        calling(
            "Two sums.",
            "",
            ("add", {"a": ("number", "2"), "b": ("number", "3")}),
            ("add", {"a": ("number", "4"), "b": ("number", "5")}),
        ),
        turn("Now I know.", "5 and 9"),
    ]
    called = []

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two integers."""
        called.append((a, b))
        return a + b

    async def work(url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            kind = agents.OpenAIResponsesModel if api_of == "responses" else agents.OpenAIChatCompletionsModel
            agent = agents.Agent(name="Sums", instructions="Add.", tools=[add], model=kind("k3", client))
            if not streamed:
                return (await agents.Runner.run(agent, "2+3 and 4+5?")).final_output
            result = agents.Runner.run_streamed(agent, "2+3 and 4+5?")
            async for _ in result.stream_events():
                pass
            return result.final_output

    with running(lines) as server:
        prompts = []
        submit = server.engine.submit
        server.engine.submit = lambda r: (prompts.append(server.state.tokenizer.decode(r.prompt_token_ids)), submit(r))[
            1
        ]
        assert asyncio.run(work(server.url)) == "5 and 9"
    assert sorted(called) == [(2, 3), (4, 5)]
    assert '<|open|>message role="tool" tool="add" index="1"<|sep|>5<|close|>' in prompts[1]
    assert '<|open|>message role="tool" tool="add" index="2"<|sep|>9<|close|>' in prompts[1]
    if api_of == "responses":
        assert "<|open|>think<|sep|>Two sums.<|close|>think" in prompts[1]


@pytest.mark.tools
def test_the_clients_of_node_understand_the_server(running, calling, turn):
    node, script = shutil.which("node"), Path(__file__).with_name("node_clients.cjs")
    probe = [node or "", "-e", "require('openai'); require('@anthropic-ai/sdk')"]
    if node is None or subprocess.run(probe, capture_output=True, env=os.environ, check=False).returncode:
        pytest.skip("needs node, and npm's openai and @anthropic-ai/sdk in a folder on NODE_PATH")
    call = calling("Sum.", "", ("add", {"a": ("number", "1e2"), "b": ("string", 'x"\n')}), ("add", {}))
    with running([turn("Well.", "Hello"), call, turn("Hm.", "There"), call]) as server:
        done = subprocess.run([node, script, server.url], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    blocks = [["thinking", "Sum."], ["tool_use", {"a": 100, "b": 'x"\n'}], ["tool_use", {}]]
    assert json.loads(done.stdout) == {
        "chat": {"content": "Hello", "reasoning": "Well."},
        "calls": {"reason": "tool_calls", "calls": [["add", '{"a":1e2,"b":"x\\"\\n"}'], ["add", "{}"]]},
        "response": {"status": "completed", "text": "There"},
        "message": {"reason": "tool_use", "blocks": blocks},
        "refusal": [404, "model_not_found", True],
    }


def coding_agent(running, calling, turn, tmp_path, command, tool, environment):
    """Let an agent write a file with its own tool; the prompts of the two turns it takes."""
    call = calling("I must look.", "", (tool[0], {tool[1]: ("string", "echo k3-was-here > out.txt")}))
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    with running([call, turn("Done.", "All done.")]) as server:
        prompts = []
        submit = server.engine.submit
        server.engine.submit = lambda r: (prompts.append(server.state.tokenizer.decode(r.prompt_token_ids)), submit(r))[
            1
        ]
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), **environment(server.url)}
        quiet: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 120, "check": False}
        done = subprocess.run(command(server.url), cwd=tmp_path / "work", env=env, **quiet)
    assert (done.returncode, "All done." in done.stdout) == (0, True), done.stderr
    assert (tmp_path / "work" / "out.txt").read_text() == "k3-was-here\n"
    assert "<|open|>think<|sep|>I must look.<|close|>think" in prompts[1]


@pytest.mark.nightly
def test_claude_code(running, calling, turn, tmp_path):
    claude = shutil.which("claude") or pytest.skip("needs npm's @anthropic-ai/claude-code on PATH")
    names = {"ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "k3", "ANTHROPIC_SMALL_FAST_MODEL": "k3",
             "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"}  # fmt: skip
    coding_agent(
        running, calling, turn, tmp_path, lambda _: [claude, "-p", "go", "--permission-mode", "bypassPermissions"],
        ("Bash", "command"), lambda url: {"ANTHROPIC_BASE_URL": url, **names},
    )  # fmt: skip


@pytest.mark.nightly
def test_codex(running, calling, turn, tmp_path):
    codex = shutil.which("codex") or pytest.skip("needs npm's @openai/codex on PATH")

    def command(url):
        provider = f'{{name="k3hal",base_url="{url}/v1",wire_api="responses"}}'
        settings = ("model=k3", "model_provider=k3hal", f"model_providers.k3hal={provider}")
        flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return [codex, "exec", *flags, *(word for setting in settings for word in ("-c", setting)), "go"]

    coding_agent(running, calling, turn, tmp_path, command, ("exec_command", "cmd"), lambda _: {})
