"""Builds the selector in force from the environment and the flags."""

from __future__ import annotations

import os

from k3hal.dispatch.errors import UsageError
from k3hal.dispatch.overrides import parse_overrides
from k3hal.dispatch.registry import Registry, default_registry
from k3hal.dispatch.select import FallbackPolicy, Selector

OPS_VARIABLE, OPS_FLAG = "K3HAL_OPS", "--ops"
FALLBACKS: tuple[FallbackPolicy, ...] = ("strict", "warn")


def build_selector(ops: str | None = None, fallback: str = "strict", registry: Registry | None = None) -> Selector:
    """The selector of all registered providers, with the overrides of K3HAL_OPS and, over them, of `ops`.

    Raises `UsageError` as `parse_overrides` does, and for an unknown policy.
    """
    policy: FallbackPolicy | None = next((known for known in FALLBACKS if known == fallback), None)
    if policy is None:
        raise UsageError(f"unknown fallback policy {fallback!r}", hint=f"it is {' or '.join(FALLBACKS)}")
    registry = registry or default_registry()
    environment = parse_overrides(os.environ.get(OPS_VARIABLE, ""), OPS_VARIABLE, registry)
    return Selector(registry, (*environment, *parse_overrides(ops or "", OPS_FLAG, registry)), policy)
