"""Functions of vendor libraries: found when first called, by the signature that was read in their source."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

from k3hal.dispatch.call import Call, No, Yes
from k3hal.dispatch.errors import BackendError

PRIORITY = 30
"""Below the portable kernels: a library is taken where they say No, or by name."""


@dataclass(frozen=True, slots=True)
class Function:
    """`module.name` of a library, and the `parameters` it has in the release (or commit) that `source` names. The name
    of a method is `Class.method`, and its first parameter the object.

    An adapter passes arguments by these names; a release without them is refused with what it lacks.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    source: str

    def __call__(self, /, **arguments: Any) -> Any:
        """Call it. Raises `BackendError` where the library cannot be loaded or has another signature."""
        fn, problem = loaded(self)
        if fn is None:
            raise BackendError(problem)
        return fn(**arguments)


@cache
def loaded(function: Function) -> tuple[Callable[..., Any] | None, str]:
    """The function itself, or None and why not."""
    where = f"{function.module}.{function.name}"
    try:
        fn = attrgetter(function.name)(importlib.import_module(function.module))
    except Exception as error:  # noqa: BLE001 - a library that does not load is a reason, whatever it raises
        first = next(iter(str(error).splitlines()), "")
        return None, f"{where} cannot be loaded: {type(error).__name__}: {first}"
    lacking = lacks(function, fn)
    if lacking:
        return None, f"{where} has no {', '.join(lacking)}, which {function.source} has"
    return fn, ""


def lacks(function: Function, fn: Callable[..., Any]) -> list[str]:
    """Recorded parameters that a function does not take by name; none are known of what has no signature."""
    try:
        found = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return []
    if any(p.kind is p.VAR_KEYWORD for p in found.values()) and not set(function.parameters) & set(found):
        return []
    return [name for name in function.parameters if name not in found]


def usable(call: Call, functions: tuple[Function, ...], *reasons: str | None) -> Yes | No:
    """Yes, or No for all `reasons` that are not None, and for functions that do not load on the machine here."""
    found = [reason for reason in reasons if reason]
    if not found and call.device.present:
        found = [problem for function in functions if (problem := loaded(function)[1])]
    return No(*found) if found else Yes()


def unless(condition: bool, reason: str) -> str | None:
    """The reason, unless the condition holds."""
    return None if condition else reason
