"""Tokenizer, rendering, parsers and metrics inside a real vLLM; no model is loaded."""
# vLLM is installed in environments of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from k3hal.serve.chat_prompt import render_chat
from k3hal.tokenizer import Tokenizer

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM, which has an environment of its own: make test-vllm", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("default")

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
ANSWER = (
    "I add.<|close|>think<|sep|><|open|>response<|sep|>Let me, 你好 é.<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>2'
    "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
)


@pytest.fixture(scope="module")
def tokenizer(synthetic_dir: Path) -> Any:
    return load(synthetic_dir)


def load(folder: Path) -> Any:
    from vllm.tokenizers.registry import get_tokenizer

    from k3hal.vllm.frontend import register

    register()
    register()
    return get_tokenizer(str(folder), tokenizer_mode="kimi_k3")


def chat(body: dict[str, Any]) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest.model_validate({"model": "k3", **json.loads(json.dumps(body))})


def renderer(tokenizer: Any) -> Any:
    """vLLM's registry makes one from a whole config; only its tokenizer matters here."""
    from vllm.renderers.registry import RENDERER_REGISTRY

    kind = RENDERER_REGISTRY.load_renderer_cls("kimi_k3")
    made = kind.__new__(kind)
    made.tokenizer = tokenizer
    return made


def rendered(tokenizer: Any, body: dict[str, Any]) -> list[int]:
    """As vLLM's server has a request rendered."""
    request = chat(body)
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    params = request.build_chat_params(None, "auto").with_defaults({"tools": tools, "tokenize": False})
    made = renderer(tokenizer)
    _, prompt = made.render_messages(request.messages, params)
    _, later = asyncio.run(made.render_messages_async(request.messages, params))
    assert prompt == later
    return prompt["prompt_token_ids"]


def test_requests_render_as_k3hal_renders_them(shared_data: Callable[[str], Path]) -> None:
    tokenizer = load(shared_data("tiktoken.model").parent)
    compared = 0
    for vector in json.loads(shared_data("request_vectors.json").read_text()):
        body = dict(vector["input"])
        template = {name: body.pop(name) for name in ("thinking", "thinking_effort") if name in body}
        if None in template.values():
            continue  # vLLM takes a null template argument for one that was not given
        assert rendered(tokenizer, {**body, "chat_template_kwargs": template}) == vector["ids"], vector["name"]
        compared += 1
    assert compared >= 5


PART = {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "<|sep|>b"}]}
DYNAMIC = {"role": "system", "tools": [TOOL]}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [PART]},
        {"messages": [DYNAMIC, PART]},
        {"messages": [PART], "tools": [TOOL], "tool_choice": "required"},
        {"messages": [PART], "reasoning_effort": "low"},
        {"messages": [PART], "reasoning_effort": "none"},
        {"messages": [PART], "response_format": {"type": "json_object"}},
    ],
    ids=["parts", "dynamic tools", "required", "low", "none", "format"],
)
def test_what_the_vectors_lack_renders_alike(tokenizer: Any, body: dict[str, Any]) -> None:
    assert rendered(tokenizer, body) == render_chat(body).ids(tokenizer.k3)


def test_a_bad_request_is_vllms_own_error(tokenizer: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}
    with pytest.raises(VLLMValidationError, match="image"):
        rendered(tokenizer, {"messages": [image]})
    with pytest.raises(VLLMValidationError, match="thinking_effort") as refused:
        rendered(tokenizer, {"messages": [PART], "chat_template_kwargs": {"thinking_effort": "medium"}})
    assert refused.value.parameter == "chat_template_kwargs.thinking_effort"


def stream(parser: Any, tokenizer: Any, request: Any, prompt: list[int], ids: list[int], step: int) -> list[Any]:
    """The deltas of a parser behind vLLM's detokenizer, `step` tokens at a time."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    params = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=False)
    asked: Any = SimpleNamespace(sampling_params=params, prompt_token_ids=prompt, prompt_embeds=None, request_id="r")
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, asked)
    deltas = []
    for at in range(0, len(ids), step):
        piece, last = ids[at : at + step], at + step >= len(ids)
        detokenizer.update(piece, stop_terminated=last)
        text = detokenizer.get_next_output_text(finished=last, delta=True)
        deltas.append(parser.parse_delta(text, piece, request, prompt, finished=last))
    return [delta for delta in deltas if delta is not None]


@pytest.mark.parametrize("name", ["kimi_k3", "k3hal"])
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_parsers_read_what_the_tokenizer_gives_them(tokenizer: Any, name: str, step: int) -> None:
    from vllm.parser import ParserManager

    kind = ParserManager.get_parser(name, name, enable_auto_tools=True, tokenizer=tokenizer)
    request = chat({"messages": [PART], "tools": [TOOL]})
    prompt = rendered(tokenizer, {"messages": [PART], "tools": [TOOL]})
    ids = tokenizer.encode(ANSWER)
    made = kind(tokenizer, request.tools)
    made.adjust_request(request)
    reasoning, content, calls = made.parse(tokenizer.decode(ids[:-1]), request, True, ids)
    assert (reasoning, content) == ("I add.", "Let me, 你好 é.")
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"a": 2})]
    assert not request.skip_special_tokens
    deltas = stream(kind(tokenizer, request.tools), tokenizer, request, prompt, ids, step)
    assert "".join(delta.reasoning or "" for delta in deltas) == reasoning
    assert "".join(delta.content or "" for delta in deltas) == content
    pieces = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [piece.function.name for piece in pieces if piece.id] == ["add"]
    assert json.loads("".join(piece.function.arguments or "" for piece in pieces)) == {"a": 2}


def test_k3hals_parsers_obey_the_choice_and_count_thinking(tokenizer: Any) -> None:
    from vllm.parser import ParserManager

    kind = ParserManager.get_parser("k3hal", "k3hal", enable_auto_tools=True, tokenizer=tokenizer)
    none = {"messages": [PART], "tools": [TOOL], "tool_choice": "none"}
    request, prompt, ids = chat(none), rendered(tokenizer, none), tokenizer.encode(ANSWER)
    deltas = stream(kind(tokenizer, request.tools), tokenizer, request, prompt, ids, 2)
    assert not any(delta.tool_calls for delta in deltas)
    assert "".join(delta.content or "" for delta in deltas) == "Let me, 你好 é."
    off = {"messages": [PART], "reasoning_effort": "none"}
    request, prompt = chat(off), rendered(tokenizer, off)
    params = request.build_chat_params(None, "auto").chat_template_kwargs
    plain = kind(tokenizer, None, chat_template_kwargs=params)
    ids = tokenizer.encode("Yes.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>")
    assert plain.parse(tokenizer.decode(ids[:-1]), request, True, ids)[:2] == (None, "Yes.")
    deltas = stream(kind(tokenizer, None, chat_template_kwargs=params), tokenizer, request, prompt, ids, 1)
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    thought = tokenizer.encode("1 2<|close|>think<|sep|><|open|>response<|sep|>4")
    assert kind(tokenizer, None).count_reasoning_tokens(thought) == len(tokenizer.encode("1 2"))


def test_a_vllm_without_the_parsers_gets_k3hals(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    from k3hal.vllm.frontend import register
    from k3hal.vllm.parsers import K3ReasoningParser, K3ToolParser

    register()
    assert not issubclass(ToolParserManager.get_tool_parser("kimi_k3"), K3ToolParser)
    for manager in (ReasoningParserManager, ToolParserManager):
        lazy = {name: at for name, at in manager.lazy_parsers.items() if name != "kimi_k3"}
        monkeypatch.setattr(manager, "lazy_parsers", lazy)
    monkeypatch.setattr(ReasoningParserManager, "reasoning_parsers", {})
    monkeypatch.setattr(ToolParserManager, "tool_parsers", {})
    register()
    assert ToolParserManager.get_tool_parser("kimi_k3") is K3ToolParser
    assert ReasoningParserManager.get_reasoning_parser("kimi_k3") is K3ReasoningParser


def test_without_the_plugin_vllm_misreads_a_bare_vocabulary(synthetic_dir: Path) -> None:
    """Why there is a tokenizer here at all: transformers makes one of the ranks, without the special tokens."""
    from vllm.tokenizers.hf import CachedHfTokenizer

    theirs = CachedHfTokenizer.from_pretrained(synthetic_dir)
    k3 = Tokenizer.from_dir(synthetic_dir)
    assert k3.special("<|sep|>") not in theirs.encode("<|sep|>")


def test_the_stat_logger_is_one_to_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client import REGISTRY, generate_latest
    from vllm.v1.metrics.loggers import StatLoggerBase

    from k3hal.vllm.figures import Board, figures_file
    from k3hal.vllm.stats import K3HALStatLogger

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = SimpleNamespace(instance_id="i1", model_config=SimpleNamespace(served_model_name=["tiny"]))
    for engine in (0, 1):
        made = K3HALStatLogger(config, engine)
        assert isinstance(made, StatLoggerBase)
        made.record(None, None)
        made.log_engine_initialized()
    board = Board(figures_file("i1", 1, 0), ["steps"], {"rank": 0, "operators": []})
    board["steps"] = 7
    assert 'k3hal_engine_steps_total{engine="1",model_name="tiny",rank="0"} 7.0' in generate_latest(REGISTRY).decode()


@pytest.mark.parametrize("off", ["switch", "version"])
def test_no_figures_where_the_plugin_stands_aside(monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    from k3hal.vllm import stats

    monkeypatch.setattr(stats, "_figures", SimpleNamespace(served=[]))
    if off == "switch":
        monkeypatch.setenv("K3HAL_VLLM", "0")
    else:
        monkeypatch.setattr("k3hal.vllm.stats.refusal", lambda: "another vLLM")
    stats.K3HALStatLogger(SimpleNamespace(instance_id="i2", model_config=SimpleNamespace(served_model_name="tiny")))
    assert stats._figures.served == []
