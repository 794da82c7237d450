"""Which tactic of a provider was measured to be the fastest right one: the tactic cache as selection reads it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from k3hal.dispatch import ops, tolerance
from k3hal.dispatch.call import Call, DimValue, Phase
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.provider import DEFAULT, Provider

_TOOLKITS = ("torch", "triton", "cuda", "rocm", "cann")
_IN_TREE = "k3hal.backends."
# Not imported for its place: that would load torch.
_TRANSFORMS = Path(__file__).parent / "transforms"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a finding about a provider's tactics holds for, besides the calls: it is void when any of this changes.

    `source` is `source_hash`, `versions` are those of torch, the toolkits and what the provider needs.
    """

    device: str
    source: str
    versions: Mapping[str, str]

    def changed(self, now: Fingerprint) -> str:
        """What is different by `now`, in words; empty if nothing is."""
        if self.source != now.source:
            return "the provider's source"
        names = sorted({*self.versions, *now.versions})
        return ", ".join(name for name in names if self.versions.get(name) != now.versions.get(name))


@dataclass(frozen=True, slots=True)
class Tuned:
    """The tactic to take for one class of calls, `default` if none is faster than that.

    `gain` is the share of the default's time that it saves and `noise` what the same measurement shows between equal
    functions; `cases` is how many cases it gave the right values for.
    """

    op: str
    provider: str
    dtype: str
    phase: Phase
    dims: Mapping[str, DimValue]
    made_for: Fingerprint
    tactic: str
    gain: float
    noise: float
    cases: int


@dataclass(frozen=True, slots=True)
class Rejection:
    """A tactic that is never taken: it gave a wrong result, crashed or hung. `case` is the file that shows it."""

    op: str
    provider: str
    tactic: str
    dtype: str
    made_for: Fingerprint
    status: str
    reason: str
    case: str = ""


@dataclass(frozen=True, slots=True)
class TacticChoice:
    """The tactic that selection takes, and where that comes from."""

    tactic: str = DEFAULT
    source: str = ""


@dataclass(frozen=True, slots=True)
class TacticCache:
    """Everything tuning has found on this machine."""

    tuned: tuple[Tuned, ...] = ()
    rejected: tuple[Rejection, ...] = ()

    def choose(self, provider: Provider, call: Call) -> TacticChoice:
        """The tactic for a class of calls: a measured one that still holds, else the default."""
        if provider.tactics is None:
            return TacticChoice()
        if not call.device.present:
            return TacticChoice(source="not tuned: the machine is not here")
        found = [t for t in self.tuned if _covers(t, provider, call)]
        if not found:
            return TacticChoice(source="not tuned for these dims")
        now = fingerprint(provider, call.device)
        entry = found[-1]
        if changed := entry.made_for.changed(now):
            return TacticChoice(source=f"no longer tuned: {changed} changed")
        if refused := self.rejection(provider, entry.tactic, call.dtype, now):
            return TacticChoice(source=f"{entry.tactic} was rejected: {refused.reason}")
        if entry.tactic not in provider.tactics_for(call):
            return TacticChoice(source=f"{entry.tactic}, which was tuned, is not offered for these dims")
        if entry.tactic == DEFAULT:
            return TacticChoice(source=f"tuned: no other is faster, {entry.cases} cases")
        shown = f"{100 * entry.gain:.1f} % faster than default, noise {100 * entry.noise:.1f} %"
        return TacticChoice(entry.tactic, f"tuned: {shown}, {entry.cases} cases")

    def rejection(self, provider: Provider, tactic: str, dtype: str, now: Fingerprint) -> Rejection | None:
        """Why a tactic is never taken; None where nothing is known against it."""
        wanted = (provider.op, provider.id, tactic, dtype, now)
        hits = (r for r in self.rejected if (r.op, r.provider, r.tactic, r.dtype, r.made_for) == wanted)
        return next(hits, None)

    def with_rejection(self, new: Rejection) -> TacticCache:
        """The cache with one more rejection, in place of an older one of the same tactic; what was tuned to it goes."""
        kept = tuple(r for r in self.rejected if _identity(r) != _identity(new))
        return TacticCache(tuple(t for t in self.tuned if _identity(t) != _identity(new)), (*kept, new))

    def with_tuned(self, new: Tuned) -> TacticCache:
        """The cache with one more finding, in place of the older one for the same calls on the same device."""
        return replace(self, tuned=(*(t for t in self.tuned if _calls(t) != _calls(new)), new))


def _covers(entry: Tuned, provider: Provider, call: Call) -> bool:
    mine = (provider.op, provider.id, call.dtype, call.phase, dict(call.dims), device_name(call.device))
    return _calls(entry) == mine


def _calls(entry: Tuned) -> tuple[object, ...]:
    return (entry.op, entry.provider, entry.dtype, entry.phase, dict(entry.dims), entry.made_for.device)


def _identity(entry: Tuned | Rejection) -> tuple[str, ...]:
    return (entry.op, entry.provider, entry.tactic, entry.dtype, entry.made_for.device)


def device_name(device: DeviceDescription) -> str:
    """What a measurement is for: the kind of device, not which one of several equal ones."""
    return " ".join(filter(None, (device.vendor, device.arch, device.title)))


def fingerprint(provider: Provider, device: DeviceDescription) -> Fingerprint:
    """What findings about a provider made now hold for."""
    names = {*_TOOLKITS, *provider.needs.packages}
    versions = {name: device.packages[name] for name in sorted(names) if name in device.packages}
    return Fingerprint(device_name(device), source_hash(provider), versions)


def source_hash(provider: Provider) -> str:
    """SHA-256 of the files a provider's results may depend on: its backend's package, transforms that backends share,
    and what defines operators and says which results are right. Empty for a provider that was not read from a file,
    whose tactics nobody can tune."""
    words = provider.fn.__module__.split(".")
    first = 3 if provider.fn.__module__.startswith(_IN_TREE) else 1
    # A namespace package has no file; what lies deepest in it is the backend's.
    for depth in range(first, len(words) + 1):
        module = sys.modules.get(".".join(words[:depth]))
        if file := getattr(module, "__file__", None):
            root = Path(file).parent if hasattr(module, "__path__") else Path(file)
            return _hash_of((root, _TRANSFORMS, Path(ops.__path__[0]), Path(tolerance.__file__)))
    return ""


@cache
def _hash_of(roots: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for root in roots:
        files = sorted(f for f in root.rglob("*") if f.is_file()) if root.is_dir() else [root]
        for file in files:
            if "__pycache__" not in file.parts:
                content = file.read_bytes()
                digest.update(f"{file.relative_to(root.parent).as_posix()}\0{len(content)}\0".encode())
                digest.update(content)
    return digest.hexdigest()
