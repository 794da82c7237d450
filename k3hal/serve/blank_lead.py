"""Content that is only space before a call says nothing; streams that cannot take words back wait for more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from k3hal.serve.chat_choice import Delta


class BlankLead:
    """Holds content back while it is blank, and drops it where a call follows."""

    def __init__(self) -> None:
        self._held: Delta | None = None
        self._passing = False

    def feed(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        for delta in deltas:
            if delta.name == "tool_calls":
                self._held = None
            elif delta.name == "content" and not self._passing:
                held = self._held
                whole = (
                    delta
                    if held is None
                    else Delta("content", held.value + delta.value, held.logprobs + delta.logprobs)
                )
                self._passing = bool(whole.value.strip())
                self._held = None if self._passing else whole
                if not self._passing:
                    continue
                yield whole
                continue
            yield delta

    def flush(self) -> Iterator[Delta]:
        """What was held to the end: an answer of nothing but space."""
        if self._held is not None:
            yield self._held
            self._held = None
