"""Finds operators by file and providers by backend manifest; imports each only when asked for."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from k3hal.dispatch.errors import BackendError, UsageError
from k3hal.dispatch.operator import Operator, with_defaults
from k3hal.dispatch.provider import ATTRIBUTE, DEFAULT, ENTRY_POINT_GROUP, RESERVED, Backend, Functions, Provider
from k3hal.dispatch.words import nearest

BUILTIN = "k3hal.backends"


def operator_names() -> tuple[str, ...]:
    """All operators, by file name; imports none of them."""
    package = importlib.import_module("k3hal.dispatch.ops")
    return tuple(sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")))


def get_operator(name: str) -> Operator:
    """The operator in `dispatch/ops/<name>.py`."""
    if name not in operator_names():
        raise UsageError(f"unknown operator {name!r}", hint=nearest(name, operator_names()))
    operator: Operator = importlib.import_module(f"k3hal.dispatch.ops.{name}").OPERATOR
    if operator.name != name:
        raise BackendError(f"dispatch/ops/{name}.py defines operator {operator.name!r}; file and function must agree")
    return operator


@dataclass(slots=True)
class Registry:
    """Backends by name and their providers. `default_registry()` is the one everything uses."""

    backends: dict[str, Backend] = field(default_factory=dict)
    providers: list[Provider] = field(default_factory=list)

    def add_module(self, module: ModuleType) -> Backend:
        """Register a backend module or package and every provider declared in it."""
        backend = getattr(module, "BACKEND", None)
        if not isinstance(backend, Backend):
            raise BackendError(f"backend module {module.__name__} has no BACKEND manifest")
        if not backend.name.replace("_", "").isalnum() or backend.name in RESERVED:
            raise BackendError(
                f"backend module {module.__name__} calls itself {backend.name!r}",
                hint="a name is letters, digits and underscores, and none of " + ", ".join(RESERVED),
            )
        if backend.name in self.backends:
            raise BackendError(f"two backends are called {backend.name!r}; {module.__name__} is the second")
        parts = list(_modules(module))
        found = [p for part in parts for p in _declared(part, {other.__name__ for other in parts})]
        checked = [_checked(p, backend) for p in found]
        for provider in checked:
            if sum((p.op, p.name) == (provider.op, provider.name) for p in checked) > 1:
                raise BackendError(f"two providers of {provider.op} are called {provider.id}")
        self.backends[backend.name] = backend
        self.providers += checked
        return backend

    def of(self, op: str) -> list[Provider]:
        """Providers of an operator, most preferred first; ties by id, so that order never depends on import order."""
        mine = [p for p in self.providers if p.op == op]
        return sorted(mine, key=lambda p: (-self.priority(p), p.id))

    def priority(self, provider: Provider) -> int:
        return self.backends[provider.backend].priority if provider.priority is None else provider.priority

    def provider_words(self) -> set[str]:
        """Everything an override may name."""
        words = {"reference", "composed", *self.backends}
        for p in self.providers:
            words |= {p.id, p.name}
        return words


def _modules(module: ModuleType) -> Iterator[ModuleType]:
    """A backend and its provider files: modules of the package itself whose names begin with no underscore. What lies
    in sub-packages (kernels, say) may import what is not installed."""
    yield module
    for info in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{module.__name__}."):
        if info.ispkg or info.name.rpartition(".")[2].startswith("_"):
            continue
        try:
            yield importlib.import_module(info.name)
        except Exception as error:
            raise BackendError(f"provider file {info.name} cannot be imported: {error!r}") from error


def _declared(module: ModuleType, files: Collection[str]) -> Iterator[Provider]:
    """The providers whose functions are defined in a module; `files` are all provider files of its backend."""
    seen = set()
    for value in vars(module).values():
        home = getattr(value, "__module__", None)
        if not callable(value) or id(value) in seen:
            continue
        seen.add(id(value))
        if home != module.__name__:
            for provider in getattr(value, ATTRIBUTE, ()) if home not in files else ():
                raise BackendError(
                    f"{module.__name__}: provider {provider.name!r} of {provider.op} is a function of {home}",
                    hint="a provider is a function defined in a provider file, which may call that one",
                )
            continue
        for provider in getattr(value, ATTRIBUTE, ()):
            if provider.fn is not value:
                raise BackendError(
                    f"{module.__name__}: @provides of {provider.op} ({provider.name}) must be the outermost decorator",
                    hint="what it decorates is what is called, so a decorator above it would be lost",
                )
            yield provider


def _checked(provider: Provider, backend: Backend) -> Provider:
    """The provider as its backend's, with the backend's vendors where it names none."""
    provider = replace(
        provider,
        backend=backend.name,
        needs=replace(provider.needs, vendors=provider.needs.vendors or backend.vendors),
    )
    needs = provider.needs
    if backend.vendors and not set(needs.vendors) <= set(backend.vendors):
        raise BackendError(
            f"provider {provider.id} of {provider.op} is for {'/'.join(needs.vendors)}, "
            f"its backend's manifest for {'/'.join(backend.vendors)}"
        )
    if (needs.min_arch, needs.max_arch) != (None, None) and len(needs.vendors) != 1:
        raise BackendError(f"provider {provider.id} of {provider.op} bounds the arch of no single vendor")
    fixed = {} if provider.tactics is None or callable(provider.tactics) else provider.tactics
    check_signatures(provider, {DEFAULT: provider.fn, **fixed})
    return provider


def check_signatures(provider: Provider, tactics: Functions) -> None:
    """Raises `BackendError` for a tactic's function whose parameters are not the operator's."""
    wanted = get_operator(provider.op).parameters_with_defaults
    for name, fn in tactics.items():
        what = f"provider {provider.id} of {provider.op}" + ("" if name == DEFAULT else f", tactic {name},")
        try:
            got = with_defaults(fn)
        except (TypeError, ValueError) as error:
            raise BackendError(f"{what} has no readable signature: {error}") from error
        if got != wanted:
            raise BackendError(f"{what} takes {_shown(got)}, the operator's contract is {_shown(wanted)}")


def _shown(parameters: dict[str, Any]) -> str:
    parts = (n if v is inspect.Parameter.empty else f"{n}={v!r}" for n, v in parameters.items())
    return f"({', '.join(parts)})"


_default: list[Registry] = []


def default_registry() -> Registry:
    """In-tree backends by package walk, then installed ones by entry point; built once per process."""
    if not _default:
        registry = Registry()
        package = importlib.import_module(BUILTIN)
        for info in pkgutil.iter_modules(package.__path__):
            if info.name.startswith("_"):
                continue  # what backends share
            registry.add_module(_load(info.name, lambda name=info.name: importlib.import_module(f"{BUILTIN}.{name}")))
        for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda p: p.name):
            registry.add_module(_load(f"{point.name} ({point.value})", point.load))
        _default.append(registry)
    return _default[0]


def _load(name: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except Exception as error:
        raise BackendError(f"backend {name} cannot be imported: {error!r}") from error
