"""Texts and whole numbers on a command line, read without loading what typer converts values with.

typer builds a pydantic adapter for every parameter of a command, given or not, and loading pydantic takes longer than
some commands do. Whatever is not plain here still goes to typer's own conversion, errors included.
"""

from __future__ import annotations

from typing import Any


class PlainValues:
    """Stands for a parameter's conversion: texts, whole numbers and what is not given are converted here."""

    def __init__(self, param: Any) -> None:
        self._kind = param.type_descriptor.annotation
        self._info = param.type_descriptor.parameter_info

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """As typer's conversion would."""
        many = param.multiple or param.nargs == -1
        if value is None:
            return () if many else None
        if self._info.parser is None and not many:
            if self._kind is str and isinstance(value, str):
                return value
            if self._kind is int and isinstance(value, str) and self._is_plain_number(value):
                return int(value)
        return self._converted(value, param, ctx)

    def _is_plain_number(self, text: str) -> bool:
        if not (text.isascii() and text.isdecimal() and len(text) < 19):
            return False
        low, high = self._info.min, self._info.max
        return (low is None or int(text) >= low) and (high is None or int(text) <= high)

    def _converted(self, value: Any, param: Any, ctx: Any) -> Any:
        from typer._coercion import build_runtime_param

        return build_runtime_param(param.type_descriptor).coerce(value, param=param, ctx=ctx)


def read_plainly(command: Any) -> None:
    """Let a command's parameters read plain values themselves; its group's commands, too."""
    for inner in getattr(command, "commands", {}).values():
        read_plainly(inner)
    help_option = command.get_help_option(command.context_class(command))
    for param in (*command.params, help_option):
        if hasattr(param, "_runtime_param"):
            param._runtime_param = PlainValues(param)
