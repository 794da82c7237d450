"""An answer as text: what was said on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


class AnswerPrinter:
    """Prints one answer, in pieces as they come or whole. Reasoning comes before content, tool calls at the end."""

    def __init__(self) -> None:
        self._reasoning = False
        self._calls: dict[int, dict[str, str]] = {}
        self.finish_reason = ""

    def add(self, choice: Mapping[str, Any]) -> None:
        """A choice of a chunk or of a whole answer, of a chat or of a plain completion."""
        said: Mapping[str, Any] = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        if said.get("reasoning_content"):
            self._reasoning = True
            _write(sys.stderr, said["reasoning_content"])
        if said.get("content"):
            self._end_reasoning()
            _write(sys.stdout, said["content"])
        for number, call in enumerate(said.get("tool_calls", ())):
            known = self._calls.setdefault(call.get("index", number), {"name": "", "arguments": ""})
            for key, value in call["function"].items():
                known[key] += value
        self.finish_reason = choice["finish_reason"] or self.finish_reason

    def end(self) -> None:
        self._end_reasoning()
        _write(sys.stdout, "\n")
        for call in self._calls.values():
            note(json.dumps(call, ensure_ascii=False))

    def _end_reasoning(self) -> None:
        if self._reasoning:
            note("")
            self._reasoning = False


def note(text: str) -> None:
    """A line that is not part of the answer."""
    _write(sys.stderr, text + "\n")


def _write(stream: Any, text: str) -> None:
    stream.write(text)
    stream.flush()
