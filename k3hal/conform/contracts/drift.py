"""What a library's functions take now, against what is recorded of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from k3hal.conform.contracts.python import python_parameters
from k3hal.conform.contracts.schemas import schema_parameters
from k3hal.conform.contracts.source import Source
from k3hal.dispatch.contracts import Library, Parameter, Record, entries_of
from k3hal.dispatch.library import OPS

Status = Literal["same", "drifted", "missing", "unread", "not recorded"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One function in one source. `record` is the one that is of the source's version, or the latest where that is not
    known; `now` what the source has, None where it is not to be read there."""

    record: Record
    status: Status
    now: tuple[Parameter, ...] | None = None
    changes: tuple[str, ...] = ()

    @property
    def drifted(self) -> bool:
        return self.status in ("drifted", "missing", "not recorded")

    def to_json(self) -> dict[str, Any]:
        record = self.record
        return {
            "function": f"{record.module}:{record.name}",
            "package": record.package,
            "versions": record.versions,
            "status": self.status,
            "changes": list(self.changes),
            "recorded": entries_of(record.parameters),
            "found": None if self.now is None else entries_of(self.now),
        }


def compare(library: Library, source: Source, version: str) -> Iterator[Comparison]:
    """Every function of a library in a source of `version` (empty: not known).

    `missing` is a function whose module's file is there without it, `unread` one whose module is not Python that the
    source holds: compiled, or another part of the library. `not recorded` is a version that no record covers;
    its changes are those since the latest record.
    """
    names = dict.fromkeys(f"{record.module}:{record.name}" for record in library.records)
    for name in names:
        records = library.of(name)
        record = record_of(records, version)
        found = _compared(record or records[-1], source, library.load)
        if record is None and found.status in ("same", "drifted"):
            changes = found.changes or (f"it is as recorded of {records[-1].versions}",)
            found = replace(found, status="not recorded", changes=(f"no record is of {version}", *changes))
        yield found


def record_of(records: tuple[Record, ...], version: str) -> Record | None:
    """The record of a version; the latest one for a version that is not known, or no version number at all."""
    try:
        Version(version)
    except InvalidVersion:
        return records[-1]
    return next((record for record in records if record.covers(version)), None)


def _compared(record: Record, source: Source, load: str) -> Comparison:
    if record.module.startswith(OPS):
        now, there = schema_parameters(source, record.module, record.name, load), bool(source.package)
    else:
        now = python_parameters(source, record.module, record.name)
        there = source.module(record.module) is not None and not _compiled(source, record)
    if now is None:
        return Comparison(record, "missing" if there else "unread", None, ("it is not there",) if there else ())
    changes = tuple(_changes(record.parameters, now))
    return Comparison(record, "drifted" if changes else "same", now, changes)


def _compiled(source: Source, record: Record) -> bool:
    """Whether a module's file names the function without defining it: it imports it from what is not Python."""
    path = source.module(record.module)
    return path is not None and record.name in source.text(path)


def _changes(old: tuple[Parameter, ...], new: tuple[Parameter, ...]) -> Iterator[str]:
    before, after = {p.name: p for p in old}, {p.name: p for p in new}
    for name in (n for n in before if n not in after):
        yield f"{before[name]} is gone"
    for name in (n for n in after if n not in before):
        yield f"{after[name]} is new"
    for name in (n for n in before if n in after):
        if before[name] != after[name]:
            kind = "" if before[name].kind is after[name].kind else f" and is {after[name].kind.description}"
            yield f"{before[name]} is now {after[name]}{kind}"
    kept = [p.name for p in old if p.name in after]
    if kept != [p.name for p in new if p.name in before]:
        yield "the order has changed"


def refreshed(library: Library, found: list[Comparison], read_in: str, url: str) -> Library:
    """The library with what a source has in place of what was recorded, read in the version or commit `read_in` at
    `url`; what is empty stays. What was not recorded is added behind the latest record, for this version."""
    said = {key: value for key, value in {"read_in": read_in, "source": url}.items() if value}
    read = {id(one.record): one for one in found if one.now is not None}
    records: list[Record] = []
    for record in library.records:
        one = read.get(id(record))
        if one is None or one.now is None:
            records.append(record)
            continue
        now = replace(record, parameters=one.now, **said)
        records += [record, replace(now, versions=f"=={read_in}")] if one.status == "not recorded" else [now]
    return replace(library, records=tuple(records))
