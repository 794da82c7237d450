"""Machines that are not here, read from `devices/*.toml`."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.errors import UsageError
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
def _files() -> dict[str, str]:
    folder = files("k3hal.dispatch") / "devices"
    return {
        entry.name.removesuffix(".toml"): entry.read_text("utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }


@cache
def _facts(key: str) -> dict[str, Any]:
    return tomllib.loads(_files()[key])


@cache
def _read(key: str) -> DeviceDescription:
    facts = {name: value for name, value in _facts(key).items() if name != "match"}
    return DeviceDescription(
        **facts | {"features": frozenset(facts["features"]), "notes": tuple(facts["notes"]), "present": False}
    )
