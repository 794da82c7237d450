"""Builds the selector in force from the environment and the flags."""

from __future__ import annotations

import os

from k3hal.dispatch.errors import UsageError
from k3hal.dispatch.overrides import parse_overrides
from k3hal.dispatch.registry import Registry, default_registry
from k3hal.dispatch.select import FallbackPolicy, Selector
from k3hal.dispatch.tactic_file import load_tactics
from k3hal.dispatch.tactics import TacticCache

OPS_VARIABLE, OPS_FLAG = "K3HAL_OPS", "--ops"
TACTICS_VARIABLE = "K3HAL_TACTICS"
FALLBACKS: tuple[FallbackPolicy, ...] = ("strict", "warn")


def build_selector(ops: str | None = None, fallback: str = "strict", registry: Registry | None = None) -> Selector:
    """The selector of all registered providers, with the overrides of K3HAL_OPS and, over them, of `ops`.

    It takes the tactics that tuning has found, unless K3HAL_TACTICS is `off`. Raises `UsageError` as `parse_overrides`
    does, and for an unknown policy; `InputError` for a malformed tactic cache.
    """
    policy: FallbackPolicy | None = next((known for known in FALLBACKS if known == fallback), None)
    if policy is None:
        raise UsageError(f"unknown fallback policy {fallback!r}", hint=f"it is {' or '.join(FALLBACKS)}")
    registry = registry or default_registry()
    environment = parse_overrides(os.environ.get(OPS_VARIABLE, ""), OPS_VARIABLE, registry)
    overrides = (*environment, *parse_overrides(ops or "", OPS_FLAG, registry))
    return Selector(registry, overrides, policy, tactics_in_force())


def tactics_in_force() -> TacticCache | None:
    """What tuning has found on this machine; None where K3HAL_TACTICS is `off`."""
    return None if os.environ.get(TACTICS_VARIABLE) == "off" else load_tactics()
