"""Finds operators by file and providers by backend manifest; imports each only when asked for."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from types import ModuleType

from k3hal.dispatch.errors import K3HALError, UsageError
from k3hal.dispatch.operator import Operator
from k3hal.dispatch.provider import ATTRIBUTE, Backend, Provider

BUILTIN = "k3hal.backends"
ENTRY_POINT_GROUP = "k3hal.backends"


class BackendError(K3HALError):
    """A backend package is broken: it fails to import or breaks an operator's contract."""

    code = "bad_backend"


def nearest(word: str, known: Iterable[str]) -> str:
    """The most similar known word, as a hint, or the whole list when nothing is close."""
    options = sorted(known)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(options)}"


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
        if backend.name in self.backends:
            raise BackendError(f"two backends are called {backend.name!r}; {module.__name__} is the second")
        found = [p for part in _modules(module) for p in _declared(part)]
        checked = [_checked(replace(p, backend=backend.name)) for p in found]
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
    yield module
    for info in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{module.__name__}."):
        try:
            yield importlib.import_module(info.name)
        except Exception as error:
            raise BackendError(f"provider file {info.name} cannot be imported: {error!r}") from error


def _declared(module: ModuleType) -> Iterator[Provider]:
    for value in vars(module).values():
        if callable(value) and getattr(value, "__module__", None) == module.__name__:
            yield from getattr(value, ATTRIBUTE, ())


def _checked(provider: Provider) -> Provider:
    operator = get_operator(provider.op)
    got = tuple(inspect.signature(provider.fn).parameters)
    if got != operator.parameters:
        raise BackendError(
            f"provider {provider.id} of {provider.op} takes ({', '.join(got)}), "
            f"the operator's contract is ({', '.join(operator.parameters)})"
        )
    return provider


_default: list[Registry] = []


def default_registry() -> Registry:
    """In-tree backends by package walk, then installed ones by entry point; built once per process."""
    if not _default:
        registry = Registry()
        package = importlib.import_module(BUILTIN)
        for info in pkgutil.iter_modules(package.__path__):
            registry.add_module(importlib.import_module(f"{BUILTIN}.{info.name}"))
        for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda p: p.name):
            try:
                module = point.load()
            except Exception as error:
                raise BackendError(f"backend {point.name!r} ({point.value}) cannot be imported: {error!r}") from error
            registry.add_module(module)
        _default.append(registry)
    return _default[0]
