"""K3HAL's output parsers as vLLM's reasoning and tool parsers, for `--reasoning-parser` and `--tool-call-parser k3hal`.

They read token ids, so that streamed text which merely spells markup stays text. A whole answer vLLM gives as text,
where the two cannot be told apart.
"""
# vLLM is installed in environments of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.reasoning import ReasoningParser
from vllm.tool_parsers import ToolParser

from k3hal.tokenizer import Tokenizer
from k3hal.vllm.parsing import Answer, Ends, Piece, Thinking
from k3hal.vllm.tokenizer import K3Tokenizer


class K3ReasoningParser(ReasoningParser):
    """The thinking channel. Give `K3ToolParser` too: without it what follows the thinking comes with its markup."""

    engine_based_streaming = True

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._k3 = k3_of(tokenizer)
        self._ends = Ends(self._k3)
        self._thinking = Thinking(self._k3)
        template = kwargs.get("chat_template_kwargs") or {}
        asked = template.get("thinking")
        asked = template.get("enable_thinking") if asked is None else asked
        self._off = asked is False or (asked is None and template.get("reasoning_effort") == "none")

    @property
    def reasoning_start_str(self) -> str | None:
        return "<|open|>think<|sep|>"

    @property
    def reasoning_end_str(self) -> str | None:
        return "<|close|>think<|sep|>"

    def has_engine_confirmed_reasoning_end(self) -> bool:
        return self._thinking.ended

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return self._off or self._ends(input_ids)

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        new = len(list(delta_ids))
        return self._off or self._ends(input_ids[max(0, len(input_ids) - new - self._ends.reach + 1) :])

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """In a stream of the delta just read, otherwise of a whole output."""
        if self._thinking.ended:
            return self._thinking.answer
        whole = Thinking(self._k3)
        whole.feed(input_ids)
        return whole.answer

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        whole = Thinking(self._k3)
        whole.feed(token_ids)
        return 0 if self._off else whole.tokens

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        if self._off:
            return None, model_output
        whole = Thinking(self._k3)
        text = whole.feed(self.model_tokenizer.encode(model_output, add_special_tokens=False)) + whole.finish()
        return text or None, self._k3.decode(whole.answer) or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> Any:
        text = self._thinking.feed(delta_token_ids)
        return DeltaMessage(reasoning=text) if text else None

    def finish_streaming(self) -> Any:
        """vLLM's call at the end of a stream: what was held back."""
        text = self._thinking.finish()
        return DeltaMessage(reasoning=text) if text else None

    def adjust_request(self, request: Any) -> Any:
        return _with_markup(request)


class K3ToolParser(ToolParser):
    """The answer and its calls; arguments stream as they come."""

    engine_based_streaming = True
    supports_required_and_named = False
    structural_tag_model = "kimi_k3"

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        super().__init__(tokenizer, tools)
        self._k3 = k3_of(tokenizer)
        self._answer = Answer(self._k3)

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        whole = Answer(self._k3)
        piece = whole.feed(self.model_tokenizer.encode(model_output, add_special_tokens=False))
        content = piece.content + whole.finish().content
        calls = [
            ToolCall(id=_call_id(), function=FunctionCall(name=piece.calls[call], arguments=piece.arguments[call]))
            for call in piece.ended
        ]
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=content or None)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> Any:
        return _delta(self._answer.feed(delta_token_ids))

    def finish_streaming(self) -> Any:
        """vLLM's call at the end of a stream: what was held back."""
        return _delta(self._answer.finish())

    def adjust_request(self, request: Any) -> Any:
        return super().adjust_request(_with_markup(request))


@functools.lru_cache(maxsize=4)
def _from_folder(folder: str) -> Tokenizer:
    return Tokenizer.from_dir(folder)


def k3_of(tokenizer: Any) -> Tokenizer:
    """K3HAL's tokenizer behind vLLM's, or of the same vocabulary file. Raises `CheckpointError` where there is none."""
    return tokenizer.k3 if isinstance(tokenizer, K3Tokenizer) else _from_folder(str(tokenizer.name_or_path))


def _with_markup(request: Any) -> Any:
    request.skip_special_tokens = False
    if hasattr(request, "spaces_between_special_tokens"):
        request.spaces_between_special_tokens = False
    return request


def _delta(piece: Piece) -> Any:
    if not piece:
        return None
    calls = []
    for number in sorted(piece.calls.keys() | piece.arguments.keys()):
        name = piece.calls.get(number)
        function = DeltaFunctionCall(name=name, arguments=piece.arguments.get(number, ""))
        new: dict[str, Any] = {} if name is None else {"id": _call_id(), "type": "function"}
        calls.append(DeltaToolCall(index=number, function=function, **new))
    return DeltaMessage(content=piece.content or None, reasoning=piece.reasoning or None, tool_calls=calls)


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex}"
