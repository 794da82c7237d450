"""The tolerance classes in force, as a report holds them, and a hash that changes when any cap does."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

from k3hal.dispatch.registry import get_operator, operator_names
from k3hal.dispatch.tolerance import CLASSES


def policy_classes() -> dict[str, dict[str, Any]]:
    """Floor and caps of every class; None stands for no cap."""
    out = {}
    for name, caps in CLASSES.items():
        numbers = {key: getattr(caps, key) for key in ("floor", "tensor", "slice", "peak")}
        out[name] = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
        out[name]["exact"] = caps.exact
    return out


def policy_hash() -> str:
    """Of the classes, and of which class every operator's outputs are judged by."""
    outputs = {name: dict(get_operator(name).outputs) for name in operator_names()}
    return digest({"classes": policy_classes(), "outputs": outputs})


def digest(value: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
