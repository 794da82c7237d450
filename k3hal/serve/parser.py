"""The model's output, token by token, as reasoning, content and tool calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum, auto
from typing import NamedTuple

from k3hal.engine.detokenize import IncrementalDetokenizer
from k3hal.serve.call_builder import CallBuilder
from k3hal.serve.chat_prompt import Channel
from k3hal.serve.tags import Tag, read_tags
from k3hal.tokenizer import CLOSE, OPEN, SEP, Tokenizer

_MAX_HEADER = 4096  # bytes; what follows a marker for longer than this is not a tag


class Reasoning(NamedTuple):
    """Text of the thinking channel, from token number `token` of this feed; None where no single token made it.

    A token in the middle of a character gives empty text, so that there is one event for each token of the channel.
    """

    text: str
    token: int | None


class Content(NamedTuple):
    """Text of the answer, likewise."""

    text: str
    token: int | None


class CallStart(NamedTuple):
    """A tool call began; `call` counts from 0 in the order of arrival."""

    call: int
    name: str


class CallArguments(NamedTuple):
    """More of a call's `arguments`, JSON text."""

    call: int
    fragment: str


class CallEnd(NamedTuple):
    """The call is complete. A call without this event was cut off."""

    call: int


Event = Reasoning | Content | CallStart | CallArguments | CallEnd


class _State(Enum):
    IDLE = auto()
    REASONING = auto()
    RESPONSE = auto()
    EPILOGUE = auto()
    TOOLS = auto()
    CALL = auto()
    ARGUMENT = auto()
    JSON = auto()
    DONE = auto()


_IN_CALL = (_State.CALL, _State.ARGUMENT, _State.JSON)
# Tags without attributes: text right after the name means that the separator was forgotten.
_BARE = (b"think", b"response")


class OutputParser:
    """A state machine over token ids, so that text which merely spells markup stays text.

    The events of a token sequence are the same however it is cut into feeds, but for the numbering of tokens.
    `recoveries` counts malformed outputs that were understood anyway, by kind.
    """

    def __init__(self, tokenizer: Tokenizer, channel: Channel) -> None:
        self._tokenizer = tokenizer
        self._open, self._close, self._sep = map(tokenizer.special, (OPEN, CLOSE, SEP))
        self._state = _State.REASONING if channel == "reasoning" else _State.RESPONSE
        self._detok = IncrementalDetokenizer(tokenizer)
        self._header: bytearray | None = None
        self._header_opens = False
        self._idle_space = ""
        self._answered = False
        self._call: CallBuilder | None = None
        self._calls = 0
        self._events: list[Event] = []
        self._token: int | None = None
        self.recoveries: Counter[str] = Counter()

    @property
    def done(self) -> bool:
        """Whether the message has ended; anything after is ignored."""
        return self._state is _State.DONE

    @property
    def thinking(self) -> bool:
        """Whether the output is in the thinking channel now."""
        return self._state is _State.REASONING

    @property
    def in_text(self) -> bool:
        """Whether the token read last was text, or part of a tag that turned out to be none."""
        return self._header is None

    def feed(self, token_ids: Iterable[int]) -> list[Event]:
        """The events that these tokens complete."""
        for number, token_id in enumerate(token_ids):
            self._token = number
            self._push(token_id)
        self._token = None
        return self._take()

    def finish(self) -> list[Event]:
        """No more tokens come: release held text; a partial marker and an incomplete call are dropped."""
        self._header = None
        self._leave_text()
        self._state = _State.DONE
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _push(self, token_id: int) -> None:
        if self._state is _State.DONE:
            return
        if not self._tokenizer.is_special(token_id):
            self._ordinary(token_id)
        elif token_id in (self._open, self._close):
            self._end_header()
            self._header = bytearray()
            self._header_opens = token_id == self._open
        elif token_id == self._sep:
            self._end_header()
        elif token_id in self._tokenizer.eos_ids:
            self._end_header()
            self._enter(_State.DONE)

    def _ordinary(self, token_id: int) -> None:
        if self._header is None:
            self._text(self._detok.add(token_id))
            return
        if bytes(self._header).strip() in _BARE:
            self.recoveries["missing_separator"] += 1
            self._end_header()
            self._text(self._detok.add(token_id))
            return
        self._header += self._tokenizer.token_bytes(token_id)
        if len(self._header) > _MAX_HEADER:
            self.recoveries["overlong_tag"] += 1
            self._header = None

    def _text(self, text: str) -> None:
        state = self._state
        if state is _State.REASONING:
            self._events.append(Reasoning(text, self._token))
        elif state is _State.RESPONSE:
            self._content(text)
        elif state is _State.IDLE:
            self._idle(text)
        elif state is _State.ARGUMENT and self._call:
            self._arguments(self._call.text(text))
        elif state is _State.JSON and self._call:
            self._arguments(self._call.raw_text(text))

    def _content(self, text: str) -> None:
        """Also for a token inside a character, whose text is empty: its log-probability is part of the answer's."""
        self._answered = True
        self._events.append(Content(text, self._token))

    def _idle(self, text: str) -> None:
        """Text outside any channel: an answer the model forgot to open, unless it is only space between elements."""
        if self._answered or (self._idle_space + text).strip():
            if not self._answered:
                self.recoveries["unopened_response"] += 1
            text, self._idle_space = self._idle_space + text, ""
            self._content(text)
        else:
            self._idle_space += text

    def _end_header(self) -> None:
        if self._header is None:
            return
        header, self._header = bytes(self._header), None
        tags = read_tags(header)
        if len(tags) > 1:
            self.recoveries["missing_separator"] += 1
        for tag in tags:
            if self._header_opens:
                self._open_tag(tag)
            else:
                self._close_tag(tag.name)

    def _open_tag(self, tag: Tag) -> None:
        state = self._state
        if state in _IN_CALL:
            self._open_in_call(tag)
        elif tag.name == "tools":
            if state is _State.REASONING:
                self.recoveries["unclosed_think"] += 1
            if state is not _State.TOOLS:
                self._enter(_State.TOOLS)
        elif state is _State.TOOLS:
            if tag.name == "call":
                self._start_call(tag)
        elif tag.name == "response" and state in (_State.IDLE, _State.REASONING):
            if state is _State.REASONING:
                self.recoveries["unclosed_think"] += 1
            self._enter(_State.RESPONSE)
        elif tag.name == "think" and not self._answered and state in (_State.IDLE, _State.RESPONSE):
            self._enter(_State.REASONING)

    def _open_in_call(self, tag: Tag) -> None:
        if tag.name == "call":
            self.recoveries["unclosed_call"] += 1
            self._end_call()
            self._start_call(tag)
        elif tag.name in ("argument", "json"):
            self._end_argument()
            if tag.name == "json":
                self._enter(_State.JSON)
                return
            self._enter(_State.ARGUMENT)
            if self._call:
                kind = tag.attributes.get("type", "string")
                self._arguments(self._call.open_argument(tag.attributes.get("key", ""), kind))

    def _close_tag(self, name: str) -> None:
        state = self._state
        if state in _IN_CALL:
            self._close_in_call(name)
        elif name == "message" or (name == "response" and state is _State.REASONING):
            if state is _State.REASONING:
                self.recoveries["unclosed_think"] += 1
            self._enter(_State.DONE)
        elif name == "think" and state is _State.REASONING:
            self._enter(_State.IDLE)
        elif (name == "response" and state in (_State.RESPONSE, _State.IDLE)) or (
            name == "tools" and state is _State.TOOLS
        ):
            self._enter(_State.EPILOGUE)

    def _close_in_call(self, name: str) -> None:
        if name in ("argument", "json"):
            self._end_argument()
        elif name in ("call", "tools", "message"):
            self._end_call()
            if name != "call":
                self.recoveries["unclosed_call"] += 1
                self._enter(_State.EPILOGUE if name == "tools" else _State.DONE)

    def _start_call(self, tag: Tag) -> None:
        """Begin a call; one without a tool name is read to its end and dropped."""
        self._enter(_State.CALL)
        name = tag.attributes.get("tool", "")
        self._call = CallBuilder(name) if name else None
        if self._call:
            self._events.append(CallStart(self._calls, name))
        else:
            self.recoveries["nameless_call"] += 1

    def _end_argument(self) -> None:
        was_argument = self._state is _State.ARGUMENT
        self._enter(_State.CALL)
        if was_argument and self._call:
            self._arguments(self._call.close_argument())

    def _end_call(self) -> None:
        self._end_argument()
        if self._call:
            self._arguments(self._call.close())
            self._events.append(CallEnd(self._calls))
            self._calls += 1
        self._call = None
        self._state = _State.TOOLS

    def _arguments(self, fragment: str) -> None:
        if fragment:
            self._events.append(CallArguments(self._calls, fragment))

    def _enter(self, state: _State) -> None:
        self._leave_text()
        self._state = state

    def _leave_text(self) -> None:
        """Release a character that was left unfinished; text of the channel being left is not continued elsewhere."""
        token, self._token = self._token, None
        tail = self._detok.flush()
        if tail:
            self._text(tail)
        self._token = token
        self._idle_space = ""
