"""What a conformance run covers: the machine, the operators, which samples, and which providers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from k3hal.conform.suite import Check, checks_of
from k3hal.dispatch.call import Call
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.emulated import EMULATED
from k3hal.dispatch.errors import DispatchError, UsageError
from k3hal.dispatch.provider import Provider
from k3hal.dispatch.registry import Registry, default_registry, get_operator, operator_names
from k3hal.dispatch.runtime import runtime_for
from k3hal.dispatch.select import COMPOSED, Selector
from k3hal.dispatch.words import nearest

EVERYTHING = "*"
ALL_TAGS = ("tiny", "edge", "adversarial", "k3", "device")
Reasons = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Selection:
    """`backend` None is every backend that may be chosen by itself; `ops` is a glob; `large` asks for the samples that
    a CPU cannot hold, `graphs` for the replay of captured graphs."""

    device: str
    backend: str | None = None
    ops: str = EVERYTHING
    quick: bool = False
    large: bool = False
    graphs: bool = False

    @classmethod
    def on(cls, device: DeviceDescription, backend: str | None, ops: str, quick: bool) -> Selection:
        """The selection a present device asks for. Raises `UsageError` for a glob that matches no operator."""
        if not any(fnmatchcase(name, ops) for name in operator_names()):
            raise UsageError(f"--op: no operator matches {ops!r}", hint=nearest(ops, operator_names()))
        graphs = runtime_for(device).supports_graphs
        large = device.vendor != "cpu" and EMULATED not in device.features
        return cls(device.id, backend, ops, quick, large, graphs)

    def operators(self) -> list[str]:
        return [name for name in operator_names() if fnmatchcase(name, self.ops)]

    def checks(self, op: str) -> list[Check]:
        """Every check of an operator, those of one sample together."""
        tags = ALL_TAGS if self.large and not self.quick else None
        return checks_of(get_operator(op), quick=self.quick, tags=tags, graphs=self.graphs)

    def keys(self) -> list[str]:
        """The must-pass list: the keys of every check of every operator, in order."""
        return [check.key for op in self.operators() for check in self.checks(op)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A provider of one operator on the device, and the cases (by id) it says No to, with its reasons.

    `provider` is a provider's id, or `composed`. It is available if it says Yes to any case.
    """

    op: str
    provider: str
    backend: str
    refused: dict[str, Reasons] = field(default_factory=dict)
    available: bool = True


Ask = Callable[[Call], Reasons | None]
"""None is a Yes; a No has reasons. What crashes is neither, and is taken for a Yes: the check will show it."""


def asker(provider: Provider) -> Ask:
    def ask(call: Call) -> Reasons | None:
        try:
            said = provider.answer(call)
        except Exception:  # noqa: BLE001 - shown by the check, which asks again
            return None
        return None if said else getattr(said, "reasons", ("no reason given",))

    return ask


def candidates(op: str, checks: list[Check], device: DeviceDescription, registry: Registry, backend: str | None = None
) -> list[Candidate]:  # fmt: skip
    """Every provider that may run on the device, the most preferred first, `composed` where there is none.

    Without `backend`, providers that selection takes only by name are left out.
    """
    found = [
        _candidate(op, provider.id, provider.backend, asker(provider), checks, device)
        for provider in registry.of(op)
        if (provider.backend == backend if backend else registry.backends[provider.backend].auto)
    ]
    if not any(one.available for one in found) and get_operator(op).lowering and not backend:
        composed = _candidate(op, COMPOSED, "dispatch", composing(device, registry), checks, device)
        found += [composed] if composed.available else []
    return found


def composing(device: DeviceDescription, registry: Registry) -> Ask:
    """Whether selection would compose the operator here, and not run its reference."""

    def ask(call: Call) -> Reasons | None:
        try:
            chosen = Selector(registry, (), "warn").decide(call)
        except DispatchError as error:
            return (str(error),)
        return None if chosen.provider == COMPOSED else (f"selection takes {chosen.provider}",)

    return ask


def _candidate(
    op: str, provider: str, backend: str, ask: Ask, checks: list[Check], device: DeviceDescription
) -> Candidate:
    samples = {check.case_id: check.sample for check in checks}
    refused = {}
    for case_id, sample in samples.items():
        reasons = ask(Call(op, device, sample.dtype, sample.phase, sample.dims))
        if reasons is not None:
            refused[case_id] = reasons
    return Candidate(op, provider, backend, refused, len(refused) < len(samples))


def registry_with(plugins: Iterable[str]) -> Registry:
    """The default registry with the backends of these modules, besides those every process finds."""
    registry = default_registry()
    for name in plugins:
        module = importlib.import_module(name)
        if module.BACKEND.name not in registry.backends:
            registry.add_module(module)
    return registry
