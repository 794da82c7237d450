"""Machines that are not here, read from `devices/*.toml`, this package's and those of installed backends."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.errors import BackendError, UsageError
from k3hal.dispatch.provider import ENTRY_POINT_GROUP
from k3hal.dispatch.words import nearest


def described_ids() -> tuple[str, ...]:
    """The ids `describe` knows, in alphabetical order."""
    return tuple(sorted(_files()))


def describe(name: str) -> DeviceDescription:
    """The described machine of an id; `-` and `_` are equal, case is not looked at.

    Raises `UsageError` naming the nearest id and all of them.
    """
    key = name.strip().lower().replace("-", "_")
    if key not in _files():
        raise UsageError(f"no machine is described as {name!r}", hint=nearest(key, described_ids(), always_list=True))
    return _read(key)


def described_as(device_name: str) -> DeviceDescription | None:
    """The description of the chip a driver calls `device_name`; None if there is none.

    The longest matching word decides, so that a GB200 is not taken for a B200.
    """
    name = device_name.lower()
    found = [(len(word), key) for key in described_ids() for word in _facts(key)["match"] if word.lower() in name]
    return _read(max(found)[1]) if found else None


def features_of_arch(vendor: str, arch: str) -> frozenset[str]:
    """What every described chip of an architecture has; empty for an architecture none has."""
    same = [d.features for d in map(_read, described_ids()) if (d.vendor, d.arch) == (vendor, arch)]
    return frozenset.intersection(*same) if same else frozenset()


@cache
def _files() -> dict[str, Traversable]:
    """Description files by id. Raises `BackendError` where two describe the same machine."""
    out: dict[str, Traversable] = {}
    for folder in (files("k3hal.dispatch") / "devices", *_backends_folders()):
        for entry in folder.iterdir() if folder.is_dir() else ():
            key = entry.name.removesuffix(".toml")
            if key in out and entry.name.endswith(".toml"):
                raise BackendError(f"{entry} describes {key!r}, and so does {out[key]}")
            if entry.name.endswith(".toml"):
                out[key] = entry
    return out


def _backends_folders() -> list[Path]:
    """`devices/` beside the module of every installed backend, which is not imported for it."""
    specs = (find_spec(entry.module) for entry in entry_points(group=ENTRY_POINT_GROUP))
    return [
        Path(spec.origin).parent / "devices"
        for spec in specs
        if spec and spec.submodule_search_locations and spec.origin
    ]


@cache
def _facts(key: str) -> dict[str, Any]:
    file = _files()[key]
    try:
        facts = {"match": [], "features": [], "notes": [], **tomllib.loads(file.read_text("utf-8"))}
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BackendError(f"{file}: not TOML: {error}") from error
    known = {"match", *(field.name for field in fields(DeviceDescription))} - {"present"}
    for name in ("id", "vendor", "arch", "memory_bytes", "source"):
        if name not in facts:
            raise BackendError(f"{file}: {name!r} is missing")
    for name in facts:
        if name not in known:
            raise BackendError(f"{file}: unknown key {name!r}", hint=nearest(name, known))
    if facts["id"] != key:
        raise BackendError(f"{file}: id is {facts['id']!r}", hint="the file is named after it")
    return facts


@cache
def _read(key: str) -> DeviceDescription:
    facts = {name: value for name, value in _facts(key).items() if name != "match"}
    return DeviceDescription(
        **facts | {"features": frozenset(facts["features"]), "notes": tuple(facts["notes"]), "present": False}
    )
