"""Which versions of which packages are installed, asked without importing any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, distributions, version

from packaging.utils import canonicalize_name


class InstalledPackages(Mapping[str, str]):
    """Distribution name -> version of this environment, looked up when asked for."""

    def __getitem__(self, name: str) -> str:
        found = _version(canonicalize_name(name))
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_names())

    def __len__(self) -> int:
        return len(_names())


@cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@cache
def _names() -> tuple[str, ...]:
    return tuple(sorted({canonicalize_name(name) for d in distributions() if (name := d.metadata["Name"])}))


INSTALLED = InstalledPackages()
"""The one instance: devices that hold it compare without listing every package."""
