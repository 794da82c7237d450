"""Efforts of thinking as other APIs name them, in the three steps that K3 was trained with."""

from __future__ import annotations

from k3hal.errors import RequestError

_FOLDED = {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "max", "max": "max"}


def folded_effort(value: object, param: str) -> str:
    """The K3 effort for `value`, as Kimi's own clients map it. Raises `RequestError` for an unknown one."""
    if not isinstance(value, str) or value not in _FOLDED:
        raise RequestError(f"{param} must be one of {', '.join(_FOLDED)}, got {value!r:.100}", param=param)
    return _FOLDED[value]
