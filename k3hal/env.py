"""The closed list of environment variables. A `K3HAL_*` name outside it, or a malformed value, is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from k3hal.dispatch.words import nearest
from k3hal.errors import UsageError

PREFIX = "K3HAL_"


class Variable(NamedTuple):
    """One variable: what it does, and its values where they are a closed set."""

    help: str
    choices: tuple[str, ...] = ()


VARIABLES: dict[str, Variable] = {
    "K3HAL_API_KEY": Variable("A key that requests to `k3hal serve` must bear, as with --api-key."),
    "K3HAL_DEBUG": Variable("1 shows the traceback behind an error.", ("0", "1")),
    "K3HAL_DUMP": Variable(
        'Record operator calls: "ops=GLOB,when=nonfinite|diverge|sample:1/N|step:N,dir=DIR,max_gb=G".'
    ),
    "K3HAL_SHADOW": Variable('Run references beside providers: "GLOB[:rate]", such as "kda_*:0.01".'),
    "K3HAL_TACTICS": Variable("off runs every provider's default tactic, whatever tuning found.", ("on", "off")),
    "K3HAL_OPS": Variable('Provider overrides as in --ops, such as "kda_decode=triton,mla_*=flashinfer".'),
    "K3HAL_VLLM": Variable("0 leaves vLLM as it is where k3hal is installed beside it.", ("0", "1")),
}


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise `UsageError` for an unknown `K3HAL_*` name or a value outside a variable's choices."""
    for name in sorted(environ):
        if not name.startswith(PREFIX):
            continue
        if name not in VARIABLES:
            raise UsageError(f"unknown environment variable {name}", hint=nearest(name, VARIABLES))
        choices = VARIABLES[name].choices
        if choices and environ[name] not in choices:
            raise UsageError(f"{name} is {environ[name]!r}", hint=f"it takes {' or '.join(choices)}")


def debug_enabled(environ: Mapping[str, str]) -> bool:
    """Whether tracebacks are wanted."""
    return environ.get("K3HAL_DEBUG") == "1"
