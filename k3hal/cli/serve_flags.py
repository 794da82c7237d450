"""The flags of `k3hal serve` beyond those every verb shares, one annotated type each. None means "not given"."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
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
}
"""Flags of the HTTP server by the name of their setting."""

TIER_FLAGS: dict[str, Any] = {
    "prefix_host_cache_gb": _flag(
        float,
        "prefix-host-cache-gb",
        "GB",
        "Host memory for prefixes that device memory gives up.  [default: none; 2 under a folder or store]",
    ),
    "prefix_disk_cache": _flag(Path, "prefix-disk-cache", "DIR", "Folder that keeps prefixes, also over a restart."),
    "prefix_disk_cache_gb": _flag(float, "prefix-disk-cache-gb", "GB", "Most that folder may take.  [default: 100]"),
    "prefix_mooncake": _flag(
        Path,
        "prefix-mooncake",
        "FILE",
        "Configuration (JSON) of a Mooncake store that keeps prefixes for several engines.",
    ),
}
"""Flags of the prefix cache's external tier by the name of their setting."""


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
