"""K3's output in the two halves that vLLM's parsers come in: thinking, and what follows it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from k3hal.serve.parser import CallArguments, CallEnd, CallStart, Content, Event, OutputParser, Reasoning
from k3hal.tokenizer import CLOSE, END_OF_MSG, OPEN, SEP, Tokenizer


class Thinking:
    """Reads the thinking of one output and finds where it ends. The tokens after that are the answer's to read."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._parser = OutputParser(tokenizer, "reasoning")
        self._marks = (tokenizer.special(OPEN), tokenizer.special(CLOSE))
        self._sep = tokenizer.special(SEP)
        self._think = tokenizer.encode_ordinary("think")
        self._tag: list[int] = []
        self.ended = False
        self.tokens = 0
        """How many tokens thinking took, without markup."""
        self.answer: list[int] = []
        """Of the tokens fed last those that are the answer's."""

    def feed(self, ids: Sequence[int]) -> str:
        """The thinking in these tokens."""
        self.answer = []
        text: list[str] = []
        for at, token in enumerate(ids):
            if self.ended:
                self.answer += ids[at:]
                break
            text += self._one(token)
        return "".join(text)

    def finish(self) -> str:
        """No more tokens come: the text held back."""
        return "" if self.ended else "".join(_reasoning(self._parser.finish()))

    def _one(self, token: int) -> list[str]:
        before = self._tag
        if token in self._marks:
            self._tag = [token]
        elif self._tag:
            self._tag.append(token)
        events = self._parser.feed([token])
        if self._parser.thinking:
            if self._parser.in_text:
                self._tag = []
            self.tokens += any(isinstance(event, Reasoning) for event in events)
        else:
            self.ended = True
            self.answer = self._left_over(token, before)
        return _reasoning(events)

    def _left_over(self, token: int, before: list[int]) -> list[int]:
        """What is not of the closing tag: a token that shows it to have no end, another channel's opening, or the
        message's end. A mark ends the tag `before` it.
        """
        opened, _ = self._marks
        tag, mark = (before, [token]) if token in self._marks else (self._tag, [])
        if not tag or tag[0] == opened:
            return [*tag, *mark] or [token]
        if tag[1 : 1 + len(self._think)] != self._think:
            return [self._tokenizer.special(END_OF_MSG)]
        return [] if token == self._sep else [token]


def _reasoning(events: Iterable[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Reasoning)]


@dataclass(slots=True)
class Piece:
    """What some tokens of an answer add. `calls` are new ones, by number; `arguments` are by number too."""

    reasoning: str = ""
    content: str = ""
    calls: dict[int, str] = field(default_factory=dict)
    arguments: dict[int, str] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls or self.arguments)


class Answer:
    """Reads what follows the thinking: the answer's text and its calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Reads on from between two channels, so that it is right too for a prompt that has opened the response."""
        self._parser = OutputParser(tokenizer, "reasoning")
        self._parser.feed([tokenizer.special(CLOSE), *tokenizer.encode_ordinary("think"), tokenizer.special(SEP)])

    def feed(self, ids: Iterable[int]) -> Piece:
        return _piece(self._parser.feed(ids))

    def finish(self) -> Piece:
        return _piece(self._parser.finish())


def _piece(events: Iterable[Event]) -> Piece:
    piece = Piece()
    for event in events:
        match event:
            case Reasoning(text=text):
                piece.reasoning += text
            case Content(text=text):
                piece.content += text
            case CallStart(call=call, name=name):
                piece.calls[call] = name
            case CallArguments(call=call, fragment=fragment):
                piece.arguments[call] = piece.arguments.get(call, "") + fragment
            case CallEnd(call=call):
                piece.ended.append(call)
    return piece


class Ends:
    """Says of token ids whether the newest channel opened or closed in them is not thinking."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        think, response, tools = (tokenizer.encode_ordinary(name) for name in ("think", "response", "tools"))
        opened, closed, sep = (tokenizer.special(name) for name in (OPEN, CLOSE, SEP))
        self._verdicts = (
            ([opened, *think, sep], False),
            ([closed, *think, sep], True),
            ([opened, *response, sep], True),
            ([opened, *tools, sep], True),
        )
        self.reach = max(len(mark) for mark, _ in self._verdicts)
        """The longest mark."""

    def __call__(self, ids: Sequence[int]) -> bool:
        """False where there is no such mark."""
        for at in range(len(ids) - 1, -1, -1):
            for mark, verdict in self._verdicts:
                if ids[at] == mark[0] and list(ids[at : at + len(mark)]) == mark:
                    return verdict
        return False
