"""The nearest valid word for a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], *, always_list: bool = False) -> str:
    """The most similar known word as a hint; the whole list when nothing is close, or when `always_list`."""
    options = sorted(known)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    everything = f"known: {', '.join(options)}"
    if not close:
        return everything
    guess = f"did you mean {close[0]!r}?"
    return f"{guess} {everything}" if always_list else guess
