"""Names the nearest valid name for one that is not."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """A hint: the nearest of `valid`, or all of them where none is near."""
    names = sorted(valid)
    near = get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"valid: {', '.join(names)}"
