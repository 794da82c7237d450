"""Which experts the engine chose: a provider of `moe_route` that notes them, in a backend only an override selects."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor

from k3hal.dispatch import Backend, provides
from k3hal.dispatch.registry import default_registry, get_operator

OPS = "moe_route=recorder"
"""The override that puts the recorder in place of the chosen provider."""


@contextmanager
def recorded_routing() -> Iterator[list[Tensor]]:
    """A list to which every call of `recorder.route`, the operator's reference, adds its expert ids `[rows, k]`."""
    calls: list[Tensor] = []
    reference = get_operator("moe_route").reference

    @functools.wraps(reference)
    def route(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        weights, ids = reference(*args, **kwargs)
        calls.append(ids.clone())
        return weights, ids

    module = ModuleType("recorded_routing_backend")
    route.__module__ = module.__name__
    vars(module).update(
        BACKEND=Backend("recorder", vendors=(), auto=False), route=provides("moe_route", name="route")(route)
    )
    registry = default_registry()
    registry.add_module(module)
    try:
        yield calls
    finally:
        del registry.backends["recorder"]
        registry.providers[:] = [p for p in registry.providers if p.backend != "recorder"]
