"""A change of a call's arguments, and what that asks of its result."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
Arguments: TypeAlias = Mapping[str, Any]
After: TypeAlias = Callable[[Any], Any]
"""What is done when the call has returned: it takes its result and gives the one that was asked for."""


class Transform(Protocol):
    """One difference between what is asked for and what a function takes."""

    def before(self, arguments: Arguments) -> tuple[Arguments, After]:
        """The arguments as the function wants them, and what is to be done with its result.

        Tensors that the function writes into are put back by the second. Arguments that a call lacks are passed over.
        """
        ...


def transformed(*transforms: Transform) -> Callable[[F], F]:
    """Apply transforms around every call of the decorated function, the first of them outermost.

    The function keeps its signature, and is called with keywords only.
    """

    def around(fn: F) -> F:
        parameters = inspect.signature(fn)

        @functools.wraps(fn)
        def call(*args: Any, **named: Any) -> Any:
            arguments: Arguments = parameters.bind(*args, **named).arguments if args else named
            undo: list[After] = []
            for transform in transforms:
                arguments, after = transform.before(arguments)
                undo.append(after)
            result = fn(**arguments)
            for after in reversed(undo):
                result = after(result)
            return result

        return call  # type: ignore[return-value]

    return around


def part_of(result: Any, index: int | None, change: Callable[[Any], Any]) -> Any:
    """A result with `change` done to its tensor, or to the `index`th of a tuple."""
    if index is None:
        return change(result)
    return tuple(change(one) if i == index else one for i, one in enumerate(result))
