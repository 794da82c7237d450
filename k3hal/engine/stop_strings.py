"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Releases text as far as it cannot be part of a stop string, until one matches.

    The match is the one that ends first (the longest, where several end there), so the outcome does not depend on how
    the text is cut into pieces. With `include` the matched string is released too.
    """

    __slots__ = ("_first", "_held", "_include", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._first = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take more text and return what may be shown. After a match nothing is released any more."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            end, start, self.matched = best
            self._held = ""
            return text[: end if self._include else start]
        keep = self._partial(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """Text held back when no more will come."""
        text, self._held = self._held, ""
        return text

    def _partial(self, text: str) -> int:
        """Where the longest suffix that may begin a stop string starts; `len(text)` if none does."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._first:
                tail = text[at:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return at
        return len(text)
