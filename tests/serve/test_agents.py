"""Agent frameworks and clients of other languages, against a real server whose model is a replay."""

import asyncio
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
