"""Providers: one function that runs one operator on one kind of machine, and what it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from k3hal.dispatch.call import Answer, Call, No, Yes
from k3hal.dispatch.faults import Fault
from k3hal.dispatch.mxfp4 import PATHS, Declared

F = TypeVar("F", bound=Callable[..., Any])
Functions: TypeAlias = Mapping[str, Callable[..., Any]]
DEFAULT = "default"
"""The tactic that is the provider's own function."""
ENTRY_POINT_GROUP = "k3hal.backends"
"""In which an installed package names the module of its backend."""
ATTRIBUTE = "__k3hal_providers__"
RESERVED = ("reference", "composed", "dispatch")
"""Names that mean something else in an override or a plan."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend package's manifest, found as `BACKEND` in the package (or module) an entry point names.

    `vendors` are the machines its providers run on (empty: all); a provider may narrow them. Of providers that say Yes
    the one with the highest priority wins; a provider's own priority beats its backend's. `auto=False` backends are
    chosen only by name. `runtime` is `module:Class` of the backend's `DeviceRuntime`.
    """

    name: str
    vendors: tuple[str, ...]
    priority: int = 50
    auto: bool = True
    runtime: str = ""


@dataclass(frozen=True, slots=True)
class Needs:
    """What must be true of a machine before `supports` is even asked. Empty fields ask for nothing.

    `vendors` left empty are the backend's. `arch` are exact names; `min_arch`/`max_arch` bound `arch_number`, which is
    ordered within one vendor only; `packages` maps distribution names to version specifiers (`">=0.6.18,<0.8"`);
    `features` must all be present; `dtypes` are the activation dtypes.
    """

    vendors: tuple[str, ...] = ()
    arch: tuple[str, ...] = ()
    min_arch: int | None = None
    max_arch: int | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()

    def unmet(self, call: Call) -> tuple[str, ...]:
        """Every need this call's machine and dtype do not meet, in words."""
        device, out = call.device, []
        if self.vendors and device.vendor not in self.vendors:
            out.append(f"needs vendor {'/'.join(self.vendors)}, this is {device.vendor}")
        if self.arch and device.arch not in self.arch:
            out.append(f"needs arch {'/'.join(self.arch)}, this is {device.arch}")
        if self.min_arch is not None and device.arch_number < self.min_arch:
            out.append(f"needs arch >= {self.min_arch}, this is {device.arch}")
        if self.max_arch is not None and device.arch_number > self.max_arch:
            out.append(f"needs arch <= {self.max_arch}, this is {device.arch}")
        out += [f"needs feature {name}" for name in self.features if name not in device.features]
        if self.dtypes and call.dtype not in self.dtypes:
            out.append(f"needs dtype {'/'.join(self.dtypes)}, this is {call.dtype}")
        out += _unmet_packages(self.packages, device.packages)
        return tuple(out)


def _unmet_packages(needed: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    out = []
    for name, wanted in needed.items():
        version = present.get(canonicalize_name(name))
        if version is None:
            out.append(f"needs package {name}{wanted}, not installed")
        elif wanted and not _satisfies(version, wanted):
            out.append(f"needs package {name}{wanted}, installed is {version}")
    return out


def _satisfies(version: str, wanted: str) -> bool:
    """Whether a version is in range; a vendor's version that is no version at all is in no range."""
    try:
        return SpecifierSet(wanted).contains(version, prereleases=True)
    except InvalidVersion:
        return False


@dataclass(frozen=True, slots=True)
class Provider:
    """A declared provider. `fn` has the operator's signature and is called directly, with nothing in between.

    `prepare`, if given, is called once at load with the operator's weight arguments by keyword and returns them in
    the layout `fn` wants, under the same names. `tactics` are other functions of the same signature that do the same
    from the same layout (another tile, another chunk), by name, or what gives them for a class of calls; `fn` itself
    is the tactic `default`. Which is taken is measured, never guessed: `k3hal op tune`.

    `mxfp4` says how MXFP4 weights reach the arithmetic (`dispatch/mxfp4.py`), in all calls or by the class of calls;
    it is for operators that take such weights. `faults` are the library's that are known: calls they concern are a No.
    """

    op: str
    name: str
    fn: Callable[..., Any]
    needs: Needs = Needs()
    supports: Callable[[Call], Answer] | None = None
    prepare: Callable[..., Mapping[str, Any]] | None = None
    priority: int | None = None
    graph_safe: bool = False
    deterministic: bool = True
    backend: str = ""
    tactics: Functions | Callable[[Call], Functions] | None = None
    mxfp4: Declared | None = None
    faults: tuple[Fault, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.backend}.{self.name}"

    def tactics_for(self, call: Call) -> Functions:
        """The functions of a class of calls by tactic, `default` first. An exception inside is the provider's bug."""
        return {DEFAULT: self.fn, **(self.tactics(call) if callable(self.tactics) else self.tactics or {})}

    def answer(self, call: Call) -> Answer:
        """Yes, or No with every reason known without running anything. An exception inside is the provider's bug."""
        unmet = self.needs.unmet(call) or self._known_faults(call)
        if unmet:
            return No(*unmet)
        return self.supports(call) if self.supports else Yes()

    def _known_faults(self, call: Call) -> tuple[str, ...]:
        return tuple(fault.reason for fault in self.faults if fault.concerns(call))

    def every_reason(self, call: Call) -> tuple[str, ...]:
        """All that speaks against a call: unmet needs, and on its own vendor's machines known faults and what
        `supports` says too."""
        unmet = self.needs.unmet(call)
        if self.needs.vendors and call.device.vendor not in self.needs.vendors:
            return unmet
        unmet += self._known_faults(call)
        if self.supports is None:
            return unmet
        try:
            said = self.supports(call)
        except Exception as error:
            if not unmet:
                raise
            # It is promised to be asked only where its needs are met.
            return (*unmet, f"its shapes could not be asked about without that ({type(error).__name__}: {error})")
        return (*unmet, *(said.reasons if isinstance(said, No) else ()))


def provides(
    op: str,
    *,
    name: str,
    needs: Needs = Needs(),
    supports: Callable[[Call], Answer] | None = None,
    prepare: Callable[..., Mapping[str, Any]] | None = None,
    priority: int | None = None,
    graph_safe: bool = False,
    deterministic: bool = True,
    tactics: Functions | Callable[[Call], Functions] | None = None,
    mxfp4: Declared | None = None,
    faults: tuple[Fault, ...] = (),
) -> Callable[[F], F]:
    """Declare the decorated function a provider of `op`. The function itself is returned unchanged.

    It must be the outermost decorator, since what it decorates is what is called. Raises ValueError for a name (of the
    provider or of a tactic) that could not be typed in an override or is reserved, a malformed version
    specifier, or an unknown MXFP4 path.
    """
    named = () if tactics is None or callable(tactics) else tactics
    for kind, word in (("provider", name), *(("tactic", tactic) for tactic in named)):
        if not word.replace("_", "").isalnum():
            raise ValueError(f"{kind} name {word!r} must be letters, digits and underscores")
        if word in (*RESERVED, DEFAULT):
            raise ValueError(f"{kind} name {word!r} is reserved")
    if isinstance(mxfp4, str) and mxfp4 not in PATHS:
        raise ValueError(f"provider {name!r} of {op}: mxfp4 is {mxfp4!r}, not one of {', '.join(PATHS)}")
    try:
        for wanted in needs.packages.values():
            SpecifierSet(wanted)
    except InvalidSpecifier as error:
        raise ValueError(f"provider {name!r} of {op}: {error}") from None

    def declare(fn: F) -> F:
        provider = Provider(
            op, name, fn, needs, supports, prepare, priority, graph_safe, deterministic, "", tactics, mxfp4, faults
        )
        setattr(fn, ATTRIBUTE, (*getattr(fn, ATTRIBUTE, ()), provider))
        return fn

    return declare
