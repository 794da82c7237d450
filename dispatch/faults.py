"""Known faults of vendor libraries: public reports of wrong results and crashes, as exclusions with their URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from k3hal.dispatch.call import Call, DimValue


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, where it was reported, and which calls on which machines it concerns: all that is given holds.

    `what` is a clause, "writes no scales, and experts are zero". `packages` are the releases that have the fault, by
    distribution; a machine without the package, or with another release, has not. `arch` are exact names, `dims` the
    values with the fault, by name of the operator's dim, and `when` says what those cannot.
    """

    url: str
    what: str
    packages: Mapping[str, str] = field(default_factory=dict)
    arch: tuple[str, ...] = ()
    dims: Mapping[str, tuple[DimValue, ...]] = field(default_factory=dict)
    when: Callable[[Call], bool] | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith("https://"):
            raise ValueError(f"a fault's url is {self.url!r}, not an https URL")
        if not (self.packages or self.arch or self.dims or self.when):
            raise ValueError(f"the fault {self.url} concerns every call")
        for wanted in self.packages.values():
            try:
                SpecifierSet(wanted)
            except InvalidSpecifier as error:
                raise ValueError(f"the fault {self.url}: {error}") from None

    def concerns(self, call: Call) -> bool:
        """Whether a call has the fault. An exception in `when` is the provider's bug."""
        device = call.device
        if self.arch and device.arch not in self.arch:
            return False
        if any(call.dims.get(name) not in values for name, values in self.dims.items()):
            return False
        versions = {name: device.packages.get(canonicalize_name(name)) for name in self.packages}
        if any(not _in(version, self.packages[name]) for name, version in versions.items()):
            return False
        return self.when is None or self.when(call)

    @property
    def reason(self) -> str:
        return f"known fault: {self.what} ({self.url})"


def _in(version: str | None, wanted: str) -> bool:
    """Whether a release is among those with the fault; what is no version number is, where all releases are."""
    if version is None:
        return False
    try:
        return SpecifierSet(wanted).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return not wanted
