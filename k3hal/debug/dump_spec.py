"""The grammar of `K3HAL_DUMP`: `ops=GLOB,when=COND,dir=DIR,max_gb=G`."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from k3hal.dispatch.registry import operator_names
from k3hal.dispatch.words import nearest
from k3hal.errors import UsageError

VARIABLE = "K3HAL_DUMP"
CONDITIONS = ("nonfinite", "diverge", "sample:1/N", "step:N")


@dataclass(frozen=True, slots=True)
class DumpSpec:
    """Which calls to record: operators by `ops`, condition `when` with its `number`, at most `max_bytes` in `folder`.

    `when` is `nonfinite` (a returned tensor is not finite), `diverge` (the outputs fail the tolerance policy), `sample`
    (every `number`-th call of each operator in each layer) or `step` (all calls of that engine step, from 0).
    """

    ops: str
    when: str
    number: int
    folder: Path
    max_bytes: int

    def covers(self, op: str) -> bool:
        return fnmatchcase(op, self.ops)


def parse_dump(text: str, source: str = VARIABLE) -> DumpSpec:
    """Parse the variable's value. Raises `UsageError` naming the piece that is wrong."""
    given = {"ops": "*", "when": "", "dir": ".", "max_gb": "1"}
    for piece in filter(None, (part.strip() for part in text.split(","))):
        key, sep, value = (word.strip() for word in piece.partition("="))
        if key not in given or not sep or not value:
            raise UsageError(f"{source}: {piece!r} is not KEY=VALUE", hint=f"keys are {', '.join(given)}")
        given[key] = value
    if not any(fnmatchcase(op, given["ops"]) for op in operator_names()):
        raise UsageError(
            f"{source}: no operator matches {given['ops']!r}", hint=nearest(given["ops"], operator_names())
        )
    when, number = _condition(given["when"], source)
    return DumpSpec(given["ops"], when, number, Path(given["dir"]), _bytes(given["max_gb"], source))


def _condition(text: str, source: str) -> tuple[str, int]:
    word, _, number = text.partition(":")
    if word in ("nonfinite", "diverge") and not number:
        return word, 0
    if word == "step" and number.isdecimal():
        return word, int(number)
    if word == "sample" and number.startswith("1/") and number[2:].isdecimal() and int(number[2:]):
        return word, int(number[2:])
    raise UsageError(f"{source}: when={text}" if text else f"{source}: no 'when'", hint=f"one of {CONDITIONS}")


def _bytes(text: str, source: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise UsageError(f"{source}: max_gb={text}", hint="GB (1e9 bytes) of files, above 0")
    return int(value * 1e9)
