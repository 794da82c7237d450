"""The flags of `k3hal serve` about its prefix cache, one annotated type each. None means "not given"."""

from __future__ import annotations

from typing import Annotated

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
