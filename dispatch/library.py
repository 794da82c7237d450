"""Functions of vendor libraries: found when first called, by the contract that was recorded from their source."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

from packaging.utils import canonicalize_name

from k3hal.dispatch.call import Call, No, Yes
from k3hal.dispatch.contracts import Record, read_library
from k3hal.dispatch.errors import BackendError

OPS = "torch.ops."


@dataclass(frozen=True, slots=True)
class Function:
    """`module:name` of a library, with what is recorded of it and the names of the arguments that an adapter `passes`,
    in any of its calls.

    `load` is the module to import first. Functions of `torch.ops.NAMESPACE` are torch's operators.
    """

    module: str
    name: str
    records: tuple[Record, ...]
    passes: tuple[str, ...]
    load: str = ""

    def __call__(self, /, **arguments: Any) -> Any:
        """Call it. Raises `BackendError` where the library cannot be loaded or has another signature."""
        fn, problem = loaded(self)
        if fn is None:
            raise BackendError(problem)
        return fn(**arguments)

    @property
    def source(self) -> str:
        """The package and the release or commit that it was last read in."""
        return f"{self.records[-1].package} {self.records[-1].read_in}"


def recorded(home: str, library: str, name: str, passes: tuple[str, ...]) -> Function:
    """The function `module:name` of the contract file `contracts/<library>.toml` in a backend's package.

    `home` is the `__name__` of the provider file that calls it. Raises `BackendError` where nothing is recorded.
    """
    found = read_library(home.rpartition(".")[0], library)
    module, _, function = name.partition(":")
    return Function(module, function, found.of(name), passes, found.load)


@cache
def loaded(function: Function) -> tuple[Callable[..., Any] | None, str]:
    """The function itself, or None and why not."""
    where = f"{function.module}.{function.name}"
    try:
        fn = _found(function)
    except Exception as error:  # noqa: BLE001 - a library that does not load is a reason, whatever it raises
        first = next(iter(str(error).splitlines()), "")
        return None, f"{where} cannot be loaded: {type(error).__name__}: {first}"
    lacking = lacks(function, fn)
    if lacking:
        return None, f"{where} has no {', '.join(lacking)}, which {function.source} has"
    return fn, ""


def _found(function: Function) -> Callable[..., Any]:
    if function.load:
        importlib.import_module(function.load)
    if function.module.startswith(OPS):
        import torch

        return getattr(attrgetter(function.module.removeprefix("torch."))(torch), function.name)
    return attrgetter(function.name)(importlib.import_module(function.module))


def lacks(function: Function, fn: Callable[..., Any]) -> list[str]:
    """Arguments that are passed and a function does not take by name; none are known of what has no signature."""
    names = _names(function, fn)
    return [] if names is None else [name for name in function.passes if name not in names]


def _names(function: Function, fn: Callable[..., Any]) -> set[str] | None:
    """What a function takes by name; None where it takes anything or does not say."""
    if function.module.startswith(OPS):
        import torch

        overloads = (getattr(fn, name)._schema for name in getattr(fn, "overloads", list)())
        schemas: list[torch.FunctionSchema] = list(overloads)
        return {argument.name for schema in schemas for argument in schema.arguments} if schemas else None
    try:
        found = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in found.values()) and not set(function.passes) & set(found):
        return None
    return set(found)


def unbound(function: Function, packages: Mapping[str, str]) -> str:
    """Why the arguments that are passed do not bind in the release among `packages`; empty where they do, or where no
    record is of it."""
    package = function.records[0].package
    version = packages.get(canonicalize_name(package))
    for record in function.records if version else ():
        if record.covers(str(version)) and (why := record.refuses(function.passes)):
            return f"{function.module}.{function.name} of {package} {version} does not bind: {why}"
    return ""


def usable(call: Call, functions: tuple[Function, ...], *reasons: str | None) -> Yes | No:
    """Yes, or No for all `reasons` that are not None, for functions that take other arguments in the release that a
    machine has or is said to have, and for those that do not load on the machine here."""
    found = [reason for reason in reasons if reason]
    found += [why for function in functions if (why := unbound(function, call.device.packages))]
    if not found and call.device.present:
        found = [problem for function in functions if (problem := loaded(function)[1])]
    return No(*found) if found else Yes()


def unless(condition: bool, reason: str) -> str | None:
    """The reason, unless the condition holds."""
    return None if condition else reason
