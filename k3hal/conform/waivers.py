"""Waivers: known failures of a vendor's providers, each with an issue and a date on which it ends."""

from __future__ import annotations

import dataclasses
import datetime
import tomllib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from k3hal.conform.result import BAD, SAMPLE, CheckResult
from k3hal.dispatch.registry import operator_names
from k3hal.dispatch.words import nearest
from k3hal.errors import InputError

_KEYS = ("op", "provider", "case", "issue", "expires")


@dataclass(frozen=True, slots=True)
class Waiver:
    """A failure that is known. `case` is a glob over case ids, `kind` one over kinds of checks; `expires` is the last
    day on which it counts."""

    op: str
    provider: str
    case: str
    issue: str
    expires: datetime.date
    kind: str = SAMPLE

    @property
    def id(self) -> str:
        return f"{self.provider}:{self.case}" + ("" if self.kind == SAMPLE else f":{self.kind}")

    def covers(self, result: CheckResult) -> bool:
        mine = (self.op, self.provider) == (result.op, result.provider)
        return mine and fnmatchcase(result.case, self.case) and fnmatchcase(result.kind, self.kind)

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, **dataclasses.asdict(self), "expires": self.expires.isoformat()}


def read_waivers(path: Path) -> list[Waiver]:
    """The `[[waiver]]` tables of a file. Raises `InputError`, one line naming the file, the table and the key."""
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"{path}: the waivers cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not TOML: {error}") from error
    tables = data.get("waiver", [])
    if set(data) - {"waiver"} or not isinstance(tables, list):
        raise InputError(f"{path}: holds {', '.join(sorted(data))}", hint="it holds [[waiver]] tables and nothing else")
    out = [_waiver(f"{path}: waiver {number}", table) for number, table in enumerate(tables, 1)]
    for number, one in enumerate(out, 1):
        if any(one.id == other.id for other in out[: number - 1]):
            raise InputError(f"{path}: waiver {number}: a second one for {one.id}")
    return out


def _waiver(where: str, table: Any) -> Waiver:
    if not isinstance(table, dict):
        raise InputError(f"{where}: not a table", hint="write [[waiver]] above its keys")
    for key in _KEYS:
        if key not in table:
            raise InputError(f"{where}: {key!r} is missing", hint=f"a waiver has {', '.join(_KEYS)}")
    for key, value in table.items():
        if key not in (*_KEYS, "kind"):
            raise InputError(f"{where}: unknown key {key!r}", hint=nearest(key, (*_KEYS, "kind")))
        if key == "expires":
            if type(value) is not datetime.date:
                raise InputError(f"{where}: expires is {value!r}", hint="a date without quotes, like 2027-01-31")
        elif not isinstance(value, str) or not value:
            raise InputError(f"{where}: {key} is {value!r}, not a text")
    if table["op"] not in operator_names():
        raise InputError(f"{where}: unknown operator {table['op']!r}", hint=nearest(table["op"], operator_names()))
    if not table["issue"].startswith(("https://", "http://")):
        raise InputError(f"{where}: issue is {table['issue']!r}", hint="the address of the issue that tracks it")
    return Waiver(**table)


def apply_waivers(
    results: Iterable[CheckResult], waivers: Sequence[Waiver], ops: Collection[str], today: datetime.date, whole: bool
) -> tuple[list[CheckResult], list[dict[str, Any]]]:
    """The results with waived failures marked, and the waivers' entries of the report.

    An entry's `problem` is not empty for a waiver that has expired, that covers something which passes, or that
    matches nothing. Waivers of operators outside `ops` are left alone; with `whole` false (a quick run, or one
    backend) matching nothing is no problem, since what it matches may not have run.
    """
    results, entries = list(results), []
    for waiver in waivers:
        if waiver.op not in ops:
            continue
        mine = [i for i, result in enumerate(results) if waiver.covers(result) and result.status != "NotSupported"]
        failing = [i for i in mine if results[i].status in BAD]
        problem = _problem(waiver, [results[i] for i in mine], len(failing), today, whole)
        if waiver.expires >= today:
            for i in failing:
                results[i] = dataclasses.replace(results[i], status="Waived", waiver=waiver.id)
        entries.append({**waiver.to_json(), "used": bool(failing), "problem": problem})
    return results, entries


def _problem(waiver: Waiver, mine: list[CheckResult], failing: int, today: datetime.date, whole: bool) -> str:
    if waiver.expires < today:
        return f"expired on {waiver.expires}"
    if not mine:
        return "matches no check" if whole else ""
    passing = [result.case for result in mine if result.ok]
    if passing:
        more = f" and {len(passing) - 1} more" if len(passing) > 1 else ""
        return f"unexpected pass: {passing[0]}{more}"
    return "" if failing else "matches no failure"
