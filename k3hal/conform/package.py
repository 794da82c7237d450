"""The report package: a folder with `report.json`, `statement.md`, `plan.json` and `cases/`, written whole or not at
all."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from k3hal.conform.result import CheckResult
from k3hal.conform.statement import statement_text
from k3hal.conform.variants import DEFAULT
from k3hal.errors import InputError

NAME, MAJOR = "k3hal.conform", 1
SCHEMA = f"{NAME}/{MAJOR}"
REPORT, STATEMENT, PLAN, CASES = "report.json", "statement.md", "plan.json", "cases"
MAX_BYTES = 1 << 28
_STAGING, _LOCKED = ".staging-", ".locked"
_HINT = "a package is the folder that `k3hal conform run --out` wrote"
_PARTS: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("statement", "device", "versions", "env", "selection", "must_pass", "policy", "counts"), dict),
    **dict.fromkeys(("providers", "checks", "end_to_end", "waivers"), list),
    "seconds": (int, float),
}
_FIELDS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "statement": {"product": str, "version": str, "commit": str, "dirty": bool, "created": str},
    "packages": {"backend": str, "name": str, "version": str, "commit": str, "dirty": bool},
    "device": dict.fromkeys(("device", "title", "vendor", "arch", "driver", "system"), str),
    "selection": {
        "device": str,
        "backend": (str, type(None)),
        "ops": str,
        "quick": bool,
        "large": bool,
        "graphs": bool,
    },
    "must_pass": {"hash": str, "count": int},
    "policy": {"hash": str, "classes": dict},
    "providers": {
        **dict.fromkeys(("op", "provider", "backend", "arch", "source_hash", "level"), str),
        **dict.fromkeys(("levels", "refusals", "not_applicable"), list),
        "reference_only": bool,
    },
    "end_to_end": {"preset": str, "dtype": str, "status": str, "problem": str, "ran": list},
    "waivers": {**dict.fromkeys(("id", "op", "provider", "case", "issue", "expires", "problem"), str), "used": bool},
}
_NUMBERS = {"end_to_end": ("top1", "kl_mean", "kl_max", "rms")}


def plan_name(model: str, dtype: str, variant: str) -> str:
    """The file of an end-to-end result's plan."""
    return f"plan-{model}-{dtype}" + ("" if variant == DEFAULT else "-" + variant.replace(" ", "-")) + ".json"


@contextmanager
def new_package(out: Path) -> Iterator[Path]:
    """A folder to write a package into; it becomes `out` at the end of the block, or nothing if that raises.

    A package that is there is replaced. Raises `InputError` where `out` is anything else that is not empty.
    """
    refuse_what_is_no_package(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _sweep(out)
        folder, lock = _staging(out)
    except OSError as error:
        raise InputError(f"{out}: the package cannot be written: {error.strerror or error}") from error
    try:
        folder.chmod(0o755)
        (folder / CASES).mkdir()
        yield folder
        if out.exists():
            old = folder.with_name(folder.name + ".old")
            os.replace(out, old)
            os.replace(folder, out)
            shutil.rmtree(old)
        else:
            os.replace(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _staging(out: Path) -> tuple[Path, int]:
    """A new folder beside `out`, and the descriptor whose lock says that its owner lives."""
    new = Path(tempfile.mkdtemp(prefix=f".{out.name}{_STAGING}", dir=out.parent))
    lock = os.open(new, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Under its first name nobody sweeps it: there it is not locked for a moment.
    return new.rename(new.with_name(new.name + _LOCKED)), lock


def _sweep(out: Path) -> None:
    """Remove what runs to `out` left that were killed: the system has let go of their locks."""
    for folder in out.parent.glob(f"{glob.escape(f'.{out.name}{_STAGING}')}*{_LOCKED}"):
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue  # its run is at work
        finally:
            os.close(lock)


def refuse_what_is_no_package(out: Path) -> None:
    """Raise `InputError` if writing a package to `out` would destroy something else."""
    if not out.exists() and not out.is_symlink():
        return
    if out.is_symlink() or not out.is_dir():
        raise InputError(f"{out} is there and no folder", hint="--out names a folder that is made")
    if any(out.iterdir()) and not _is_package(out):
        raise InputError(f"{out} holds something that is no package", hint="name a new folder, or an earlier package")


def _is_package(folder: Path) -> bool:
    try:
        data = json.loads((folder / REPORT).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and str(data.get("schema")).startswith(f"{NAME}/")


def write_report(report: Mapping[str, Any], plans: Mapping[str, Any], folder: Path) -> None:
    """Write the report, its statement, and the plans by file name."""
    (folder / REPORT).write_text(_lines(report), "utf-8")
    (folder / STATEMENT).write_text(statement_text(report), "utf-8")
    for name, plan in plans.items():
        (folder / name).write_text(json.dumps(plan, indent=1) + "\n", "utf-8")


def _lines(report: Mapping[str, Any]) -> str:
    """The report as JSON with a line for each row of its lists, so that two can be read side by side."""
    parts = []
    for key, value in report.items():
        rows = (
            [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in value] if isinstance(value, list) else []
        )
        text = "[\n  " + ",\n  ".join(rows) + "\n ]" if rows else json.dumps(value, ensure_ascii=False, allow_nan=False)
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read_report(package: Path) -> dict[str, Any]:
    """The report of a package, with `checks` as `CheckResult`s.

    Raises `InputError`, one line naming the file, the part and what is wrong with it.
    """
    path = package / REPORT
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path}: larger than {MAX_BYTES} bytes")
        report = json.loads(path.read_text("utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}", hint=_HINT) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(report, dict) or not isinstance(report.get("schema"), str):
        raise InputError(f"{path}: no report", hint=_HINT)
    name, _, major = report["schema"].partition("/")
    if name != NAME or major.partition(".")[0] != str(MAJOR):
        raise InputError(f"{path}: schema is {report['schema']!r}", hint=f"this version reads {SCHEMA}")
    _check_fields(f"{path}", report, _PARTS)
    # Not in the first reports of this schema: only what is judged from outside this tree has any.
    _check_fields(f"{path}", {"packages": [], **report}, {"packages": list})
    report.setdefault("packages", [])
    for part, fields in _FIELDS.items():
        rows = report[part] if isinstance(report[part], list) else [report[part]]
        for number, row in enumerate(rows):
            where = f"{path}: {part}" + (f" {number}" if isinstance(report[part], list) else "")
            _check_fields(where, row, fields)
            for key in _NUMBERS.get(part, ()):
                _check_fields(where, row, {key: (int, float, type(None))})
            if part == "end_to_end":
                _check_end(where, row)
    report["checks"] = [_check(f"{path}: checks {number}", row) for number, row in enumerate(report["checks"])]
    return report


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _check_fields(where: str, row: Any, fields: Mapping[str, type | tuple[type, ...]]) -> None:
    if not isinstance(row, dict):
        raise InputError(f"{where}: not an object")
    for key, kind in fields.items():
        if key not in row:
            raise InputError(f"{where}: {key!r} is missing")
        if not isinstance(row[key], kind) or (isinstance(row[key], bool) and kind is not bool):
            raise InputError(f"{where}: {key!r} is {type(row[key]).__name__}")


def _check_end(where: str, row: dict[str, Any]) -> None:
    """What came later, or is in lists, of an end-to-end result."""
    _check_fields(where, {"plan": PLAN, "variant": "", **row}, {"plan": str, "variant": str})
    if len({row[key] is None for key in _NUMBERS["end_to_end"]}) > 1:
        raise InputError(f"{where}: some of {', '.join(_NUMBERS['end_to_end'])} are null, expected all or none")
    for pair in row["ran"]:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(word, str) for word in pair):
            raise InputError(f"{where}: 'ran' holds {json.dumps(pair):.60}, expected an operator and a provider")


def _check(where: str, row: Any) -> CheckResult:
    try:
        return CheckResult.from_json(row)
    except KeyError as error:
        raise InputError(f"{where}: {error.args[0]!r} is missing") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"{where}: {error}") from error
