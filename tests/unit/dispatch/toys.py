"""Toy operators on plain numbers, and backend modules made in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from k3hal.dispatch import Answer, Backend, Call, DeviceDescription, Needs, No, Yes, provides
from k3hal.dispatch.registry import Registry

HEAD = """from k3hal.dispatch.operator import Cost, Operator
"""
OPERATOR_TEMPLATE = """
OPERATOR = Operator({fn}, "toy", {{"out": "exact"}}, lambda: iter(()), lambda **_: Cost(1.0, 1.0), {more})
"""
TOYS = {
    "toy_scale": ('def toy_scale(x, factor=2.0):\n    """x times factor."""\n    return x * factor\n', ""),
    "toy_shift": (
        'def toy_shift(x, weight):\n    """x plus weight."""\n    return x + weight\n',
        'weights=("weight",)',
    ),
    "toy_both": (
        'def toy_both(x, weight, factor=2.0):\n    """Shift, then scale."""\n    return (x + weight) * factor\n\n\n'
        "def _lower(parts):\n"
        '    shift, scale = parts["toy_shift"], parts["toy_scale"]\n\n'
        "    def composed(x, weight, factor=2.0):\n        return scale(shift(x, weight), factor)\n\n"
        "    return composed\n",
        'weights=("weight",), lowers_to=("toy_shift", "toy_scale"), lowering=_lower',
    ),
    "toy_wide": (
        'def toy_wide(x, weight, factor=2.0):\n    """Shift, then scale, with nothing rounded in between."""\n'
        "    return (x + weight) * factor\n\n\n"
        "def _lower(parts):\n"
        '    shift, scale = parts["toy_shift"], parts["toy_scale"]\n\n'
        "    def composed(x, weight, factor=2.0):\n        return scale(shift(x, weight), factor)\n\n"
        "    return composed\n",
        'weights=("weight",), lowers_to=("toy_shift", "toy_scale"), lowering=_lower, '
        'wide_parts=("toy_shift", "toy_scale")',
    ),
    "toy_twice": (
        'def toy_twice(x, weight):\n    """Shift by weight; of two kinds, one of which is left out by dims."""\n'
        "    return x + weight\n\n\n"
        "def _lower(parts):\n    return next(iter(parts.values()))\n\n\n"
        "def _parts(dims):\n"
        '    return {"toy_shift": {"width": dims["size"]}} if dims.get("kind") == "shift" else '
        '{"toy_shift": dims, "toy_other": dims}\n',
        'weights=("weight",), lowers_to=("toy_shift", "toy_other"), lowering=_lower, parts=_parts',
    ),
    "toy_other": (
        'def toy_other(x, weight):\n    """x plus weight."""\n    return x + weight\n',
        'weights=("weight",)',
    ),
}


ANYWHERE = Needs()


@dataclass(frozen=True)
class Toy:
    """A provider to declare: `answer` is what `supports` returns, or an exception it raises."""

    op: str
    name: str
    answer: Any = None
    needs: Needs = ANYWHERE
    priority: int | None = None
    fn: Callable[..., Any] | None = None
    prepare: Callable[..., Mapping[str, Any]] | None = None


def _shift(x: float, weight: float) -> float:
    return x + weight


def _scale(x: float, factor: float = 2.0) -> float:
    return x * factor


def _both(x: float, weight: float, factor: float = 2.0) -> float:
    return (x + weight) * factor


_FUNCTIONS = {"toy_shift": _shift, "toy_other": _shift, "toy_twice": _shift, "toy_scale": _scale, "toy_both": _both}


def backend_module(name: str, *toys: Toy, **manifest: Any) -> ModuleType:
    """A backend module with a manifest and these providers, as one written in a file would be."""
    module = ModuleType(f"toy_backend_{name}")
    vars(module)["BACKEND"] = Backend(name, manifest.pop("vendors", ()), **manifest)
    for index, toy in enumerate(toys):
        vars(module)[f"provider_{index}"] = _declare(toy, module.__name__)
    return module


def _declare(toy: Toy, module: str) -> Callable[..., Any]:
    def supports(call: Call) -> Answer:
        if isinstance(toy.answer, Exception):
            raise toy.answer
        return Yes() if toy.answer is None else toy.answer

    template = toy.fn or _FUNCTIONS[toy.op]
    # A function of its own for every provider, with the template's signature.
    assert isinstance(template, FunctionType)
    fn = FunctionType(template.__code__, template.__globals__, template.__name__, template.__defaults__)
    fn.__module__ = module
    return provides(
        toy.op, name=toy.name, needs=toy.needs, supports=supports, prepare=toy.prepare, priority=toy.priority
    )(fn)


def registry_of(*modules: ModuleType) -> Registry:
    registry = Registry()
    for module in modules:
        registry.add_module(module)
    return registry


CPU = DeviceDescription("cpu", "cpu", "x86_64", present=True)


def call(op: str, device: DeviceDescription = CPU, **dims: Any) -> Call:
    return Call(op, device, "bfloat16", "any", dims)


NEVER = No("never")
