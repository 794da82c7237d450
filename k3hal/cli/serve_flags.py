"""The flags of `k3hal serve` beyond those every verb shares, one annotated type each. None means "not given"."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

PrefixCachePolicy = Annotated[
    str | None,
    typer.Option(
        "--prefix-cache-policy",
        metavar="POLICY",
        help="Which prefixes are kept: cost, second-hit, prompt, interval or none.  [default: cost]",
    ),
]
PrefixMatchUnit = Annotated[
    int | None,
    typer.Option("--prefix-match-unit", metavar="N", help="Tokens in which prefixes are compared.  [default: 128]"),
]
RetentionInterval = Annotated[
    int | None,
    typer.Option(
        "--prefix-cache-retention-interval", metavar="N", help="Tokens between kept states, for the policy interval."
    ),
]


def _flag(kind: Any, name: str, metavar: str | None, text: str) -> Any:
    return Annotated[kind | None, typer.Option(f"--{name}", metavar=metavar, help=text)]


SERVER_FLAGS: dict[str, Any] = {
    "unknown_fields": _flag(
        str, "unknown-fields", "ignore|refuse", "Fields a request has and the API has not.  [default: ignore]"
    ),
    "kimi_strict_params": _flag(
        bool, "kimi-strict-params", None, "Refuse sampling parameters that Moonshot's hosted API refuses."
    ),
    "page": _flag(str, "page", "on|off", "Serve the page at /: chat, live figures, dispatch plan.  [default: on]"),
}
"""Flags of the HTTP server by the name of their setting."""


def with_flags(flags: dict[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make `flags` parameters of a command in place of its `**more`, which then holds their values."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        *own, _ = signature.parameters.values()
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in flags.items()
        ]
        command.__annotations__ = {p.name: p.annotation for p in [*own, *more]}
        vars(command)["__signature__"] = signature.replace(parameters=[*own, *more], return_annotation=None)
        return command

    return add
