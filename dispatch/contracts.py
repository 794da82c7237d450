"""Recorded contracts: what functions of vendor libraries take, from the files `contracts/*.toml` beside a backend."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from k3hal.dispatch.errors import BackendError
from k3hal.dispatch.words import nearest

SCHEMA = "k3hal.contracts/1"
FOLDER = "contracts"
_FILE_KEYS = ("schema", "package", "versions", "read_in", "source", "load", "note", "function")
_FUNCTION_KEYS = ("name", "parameters", "versions", "read_in", "source", "note")
_ENTRY = re.compile(r"(?P<stars>\*{0,2})(?P<name>[^\W\d]\w*)(?:: (?P<type>[^=]+?))?(?:=(?P<default>.+))?")
_Kind = inspect._ParameterKind


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter. `type` is a torch schema's (`Tensor(a!)`, `int[]?`), empty for a Python function; `default` is its
    source text, None where there is none."""

    name: str
    kind: _Kind
    type: str = ""
    default: str | None = None

    def __str__(self) -> str:
        stars = {_Kind.VAR_POSITIONAL: "*", _Kind.VAR_KEYWORD: "**"}.get(self.kind, "")
        kind = f": {self.type}" if self.type else ""
        return f"{stars}{self.name}{kind}" + ("" if self.default is None else f"={self.default}")


@dataclass(frozen=True, slots=True)
class Record:
    """The parameters that `module:name` has in the releases `versions` of a package, read in the release or commit
    `read_in` at `source`, a URL. The name of a method is `Class.method`, and its first parameter the object."""

    module: str
    name: str
    parameters: tuple[Parameter, ...]
    package: str
    versions: str
    read_in: str
    source: str
    note: str = ""

    @property
    def signature(self) -> inspect.Signature:
        """As Python has it; defaults are their source texts."""
        empty = inspect.Parameter.empty
        return inspect.Signature(
            [
                inspect.Parameter(p.name, p.kind, default=empty if p.default is None else p.default)
                for p in self.parameters
            ]
        )

    def covers(self, version: str) -> bool:
        """Whether it is of a release; what is no version at all is in every range that has no bounds, and no other."""
        try:
            return SpecifierSet(self.versions).contains(Version(version), prereleases=True)
        except InvalidVersion:
            return not self.versions

    def refuses(self, passed: Iterable[str]) -> str:
        """Why a call with these names does not bind; empty where it does."""
        try:
            self.signature.bind(**dict.fromkeys(passed))
        except TypeError as error:
            return str(error)
        return ""


@dataclass(frozen=True, slots=True)
class Library:
    """A contract file: records in its order, and `load`, the module to import before its functions are looked up."""

    package: str
    load: str
    records: tuple[Record, ...]
    note: str = ""

    def of(self, name: str) -> tuple[Record, ...]:
        """The records of `module:function`, one for each range of releases that differ. Raises `BackendError`."""
        found = tuple(record for record in self.records if f"{record.module}:{record.name}" == name)
        if not found:
            known = {f"{record.module}:{record.name}" for record in self.records}
            raise BackendError(f"no contract of {self.package} is recorded for {name!r}", hint=nearest(name, known))
        return found


def contract_files(package: str) -> dict[str, Traversable]:
    """The contract files of a backend's package by their names without `.toml`; empty where there are none."""
    folder = files(package) / FOLDER
    entries = folder.iterdir() if folder.is_dir() else ()
    found = {entry.name.removesuffix(".toml"): entry for entry in entries if entry.name.endswith(".toml")}
    return dict(sorted(found.items()))


@cache
def read_library(package: str, library: str) -> Library:
    """The contracts in `contracts/<library>.toml` of a backend's package. Raises `BackendError` naming file and key."""
    found = contract_files(package)
    if library not in found:
        raise BackendError(f"{package} has no contract file {library}.toml", hint=nearest(library, found))
    return parse_library(found[library].read_text("utf-8"), str(found[library]))


def parse_library(text: str, where: str) -> Library:
    """A contract file's text; `where` names it in errors, which are `BackendError`."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BackendError(f"{where}: not TOML: {error}") from error
    _check_keys(content, _FILE_KEYS, ("schema", "package", "function"), where)
    if content["schema"] != SCHEMA:
        raise BackendError(f"{where}: schema is {content['schema']!r}, not {SCHEMA!r}")
    if not isinstance(content["function"], list):
        raise BackendError(f"{where}: functions are not written as [[function]]")
    records = tuple(_record(one, content, where) for one in content["function"])
    seen: set[tuple[str, str, str]] = set()
    for record in records:
        key = (record.module, record.name, record.versions)
        if key in seen:
            raise BackendError(f"{where}: {record.module}:{record.name} is recorded twice for {record.versions!r}")
        seen.add(key)
    return Library(content["package"], content.get("load", ""), records, content.get("note", ""))


def _check_keys(found: Any, known: tuple[str, ...], needed: tuple[str, ...], where: str) -> None:
    if not isinstance(found, dict):
        raise BackendError(f"{where}: {found!r} is not a table")
    for name, value in found.items():
        if name not in known:
            raise BackendError(f"{where}: unknown key {name!r}", hint=nearest(name, known))
        if name not in ("function", "parameters") and not isinstance(value, str):
            raise BackendError(f"{where}: {name} is {value!r}, not a string")
    for name in needed:
        if name not in found:
            raise BackendError(f"{where}: {name!r} is missing")


def _record(found: Any, content: Mapping[str, Any], where: str) -> Record:
    _check_keys(found, _FUNCTION_KEYS, ("name", "parameters"), where)
    module, colon, name = found["name"].partition(":")
    here = f"{where}: {found['name']}"
    if not (module and colon and name):
        raise BackendError(f"{here}: a name is written module:function")
    shared = {key: found.get(key, content.get(key)) for key in ("versions", "read_in", "source")}
    for key, value in shared.items():
        if value is None:
            raise BackendError(f"{here}: {key!r} is missing")
    try:
        SpecifierSet(shared["versions"])
    except InvalidSpecifier as error:
        raise BackendError(f"{here}: {error}") from error
    if not shared["source"].startswith("https://"):
        raise BackendError(f"{here}: source is {shared['source']!r}, not an https URL")
    if not isinstance(found["parameters"], list):
        raise BackendError(f"{here}: parameters are not a list")
    parameters = parse_parameters(found["parameters"], here)
    return Record(module, name, parameters, content["package"], **shared, note=found.get("note", ""))


def parse_parameters(entries: Iterable[Any], where: str) -> tuple[Parameter, ...]:
    """Parameters from their entries, in Python's order: `x`, `x=None`, `x: int[]?=None`, `/`, `*`, `*args`, `**kwargs`.

    A type ends where ` = ` would; none holds an equals sign. Raises `BackendError`.
    """
    out: list[Parameter] = []
    kind = _Kind.POSITIONAL_OR_KEYWORD
    for entry in entries:
        if entry == "/":
            out = [Parameter(p.name, _Kind.POSITIONAL_ONLY, p.type, p.default) for p in out]
            continue
        if entry == "*":
            kind = _Kind.KEYWORD_ONLY
            continue
        found = _ENTRY.fullmatch(entry) if isinstance(entry, str) else None
        if found is None:
            raise BackendError(f"{where}: {entry!r} is not a parameter")
        own = {"": kind, "*": _Kind.VAR_POSITIONAL, "**": _Kind.VAR_KEYWORD}[found["stars"]]
        out.append(Parameter(found["name"], own, found["type"] or "", found["default"]))
        if own is _Kind.VAR_POSITIONAL:
            kind = _Kind.KEYWORD_ONLY
    try:
        inspect.Signature([inspect.Parameter(p.name, p.kind) for p in out])
    except ValueError as error:
        raise BackendError(f"{where}: {error}") from error
    return tuple(out)


def entries_of(parameters: Iterable[Parameter]) -> list[str]:
    """What `parse_parameters` reads back as the same."""
    out: list[str] = []
    before: _Kind | None = None
    for parameter in parameters:
        if before is _Kind.POSITIONAL_ONLY and parameter.kind is not before:
            out.append("/")
        starred = before in (_Kind.KEYWORD_ONLY, _Kind.VAR_POSITIONAL)
        if parameter.kind is _Kind.KEYWORD_ONLY and not starred:
            out.append("*")
        out.append(str(parameter))
        before = parameter.kind
    return [*out, "/"] if before is _Kind.POSITIONAL_ONLY else out
