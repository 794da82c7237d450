"""One choice of a chat completion: engine outputs in, message deltas out."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from k3hal.engine.interface import EngineOutput, TokenLogprob
from k3hal.sampling_params import SamplingParams
from k3hal.serve.chat_prompt import ChatPrompt
from k3hal.serve.http_errors import raise_if_failed
from k3hal.serve.parser import CallArguments, CallEnd, CallStart, Content, Event, OutputParser, Reasoning
from k3hal.serve.stoppable_text import StoppableText
from k3hal.tokenizer import Tokenizer


class Delta(NamedTuple):
    """A piece of the message under its API name, and the log-probabilities of the content tokens it shows.

    `value` is text for `reasoning_content` and `content`, and one tool-call delta for `tool_calls`.
    """

    name: str
    value: Any
    logprobs: list[TokenLogprob]

    def fields(self) -> dict[str, Any]:
        return {self.name: [self.value] if self.name == "tool_calls" else self.value}


class ChatChoice:
    """Parses one sequence. Stop strings are matched in the text of a channel, never on markup or across channels.

    `finish_reason` is set once the choice is complete; with `stopped_early` the engine has yet to be told.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: ChatPrompt,
        params: SamplingParams,
        *,
        reasoning: bool,
        constrained_by: str | None = None,
    ) -> None:
        """`constrained_by` is what an error calls the field that constrains the answer, if not as a chat does."""
        self.parser = OutputParser(tokenizer, prompt.channel)
        self._constrained_by = constrained_by or prompt.constrained_by
        self._min_tokens = params.min_tokens
        self._want_reasoning = reasoning
        self._want_calls = bool(prompt.tools.allowed)
        self._reasoning = StoppableText(params.stop, include=params.include_stop_str_in_output)
        self._content = StoppableText(params.stop, include=params.include_stop_str_in_output)
        self._deltas: list[Delta] = []
        self.complete_calls = 0
        self.cached_tokens = 0
        self.reasoning_tokens = 0
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.stopped_early = False

    @property
    def recoveries(self) -> Mapping[str, int]:
        return self.parser.recoveries

    def feed(self, output: EngineOutput) -> list[Delta]:
        """The deltas an output adds, neighbours of a kind joined. Raises `HttpError` when the engine gave up."""
        raise_if_failed(output, self._constrained_by)
        self.cached_tokens = max(self.cached_tokens, output.num_cached_tokens)
        used = self._run(self.parser.feed(output.token_ids), output)
        self.token_ids.extend(output.token_ids[:used])
        if output.finish_reason is not None and self.finish_reason is None:
            self._run(self.parser.finish(), output)
            self._finish(output)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _run(self, events: Iterable[Event], output: EngineOutput) -> int:
        """Handle events and return how many of the output's tokens belong to the answer."""
        for event in events:
            if isinstance(event, (Reasoning, Content)):
                number = len(output.token_ids) if event.token is None else event.token + 1
                matched = self._text(event, number, output)
                if matched is not None:
                    self.finish_reason, self.stop_reason, self.stopped_early = "stop", matched, True
                    return number
            else:
                self._call(event)
        return len(output.token_ids)

    def _text(self, event: Reasoning | Content, number: int, output: EngineOutput) -> str | None:
        """Pass a channel's text through its stop strings; the one that matched, if one did."""
        armed = len(self.token_ids) + number > self._min_tokens
        if isinstance(event, Reasoning):
            self.reasoning_tokens += event.token is not None
            self._show("reasoning_content", self._reasoning.feed(event.text, armed=armed))
            return self._reasoning.matched
        self._show("reasoning_content", self._reasoning.flush())
        logprob = output.logprobs[event.token] if output.logprobs and event.token is not None else None
        text = self._content.feed(event.text, logprob, armed=armed)
        self._show("content", text, self._content.logprobs())
        return self._content.matched

    def _finish(self, output: EngineOutput) -> None:
        if self.finish_reason is not None:
            return
        self._flush()
        self.stop_reason = output.stop_reason
        called = self.complete_calls > 0 and output.finish_reason == "stop"
        self.finish_reason = "tool_calls" if called else output.finish_reason

    def _flush(self) -> None:
        self._show("reasoning_content", self._reasoning.flush())
        text = self._content.flush()
        self._show("content", text, self._content.logprobs())

    def _call(self, event: CallStart | CallArguments | CallEnd) -> None:
        if not self._want_calls:
            return
        if isinstance(event, CallStart):
            self._flush()
            function = {"name": event.name, "arguments": ""}
            call = {
                "index": event.call,
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": function,
            }
            self._deltas.append(Delta("tool_calls", call, []))
        elif isinstance(event, CallEnd):
            self.complete_calls += 1
        elif self._deltas and self._deltas[-1].name == "tool_calls" and self._deltas[-1].value["index"] == event.call:
            self._deltas[-1].value["function"]["arguments"] += event.fragment
        else:
            call = {"index": event.call, "function": {"arguments": event.fragment}}
            self._deltas.append(Delta("tool_calls", call, []))

    def _show(self, name: str, text: str, logprobs: list[TokenLogprob] | None = None) -> None:
        if not (text or logprobs) or (name == "reasoning_content" and not self._want_reasoning):
            return
        if self._deltas and self._deltas[-1].name == name:
            last = self._deltas.pop()
            self._deltas.append(Delta(name, last.value + text, last.logprobs + (logprobs or [])))
        else:
            self._deltas.append(Delta(name, text, logprobs or []))


class ChatMessage:
    """A whole message, put together from its deltas."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self.logprobs: list[TokenLogprob] = []

    def add(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            if delta.name == "reasoning_content":
                self._reasoning.append(delta.value)
            elif delta.name == "content":
                self._content.append(delta.value)
                self.logprobs.extend(delta.logprobs)
            elif "id" in delta.value:
                self._calls.append({key: value for key, value in delta.value.items() if key != "index"})
            else:
                self._calls[delta.value["index"]]["function"]["arguments"] += delta.value["function"]["arguments"]

    def fields(self, complete_calls: int) -> dict[str, Any]:
        """The API's message. A call that was cut off is left out; content that is only space beside calls is null."""
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        calls = self._calls[:complete_calls]
        empty = not content.strip() if calls else not content
        message: dict[str, Any] = {"role": "assistant", "content": None if empty and (calls or reasoning) else content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message
