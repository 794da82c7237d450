"""Flags of `k3hal plan` that do not go together, or say nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3hal.errors import UsageError

FORMS = ("as_json", "shell", "k8s", "compose", "slurm")

_NODES = ("nodes", "prefill_nodes", "decode_nodes")
_SECTIONS = ("explain", "capacity", "workload")
_FOR_VLLM = (*_NODES, "strategy", "variant", "features", "kv_offload", "inventory", "matrix", "recipe")
_OF_RECIPE = ("variant", "features", "set_", "model", "context", "concurrency", "kv_offload", "recipe")
_ALONE = {"lint": (), "matrix": _OF_RECIPE, "inventory": (*_OF_RECIPE, "strategy")}
"""What prints something else than one plan, and the flags that it reads."""

_NEEDS = {"picture": "capacity", "p95": "workload", "storage": "workload"}
_LEAST = {"p95": 1e-6, "storage": 1e-3, "kv_offload": 1e-3}
_MOST = 1e9


def check(asked: Mapping[str, Any]) -> None:
    """Raise `UsageError`, one line, for flags by parameter name that are empty, out of range, or would be ignored."""
    for name, value in asked.items():
        if isinstance(value, str) and not value.strip():
            raise UsageError(f"{_flag(name)} is empty", hint="leave it out for its default")
    if asked["for_"] not in ("vllm", "k3hal"):
        raise UsageError(f"--for is {asked['for_']!r}", hint="it is vllm or k3hal")
    forms = [name for name in FORMS if asked[name]]
    if len(forms) > 1:
        raise UsageError("only one of --json, --shell, --k8s, --compose and --slurm can be printed")
    for whole, known in _ALONE.items():
        if asked[whole]:
            _check_alone(whole, known, asked)
    for name, other in _NEEDS.items():
        if asked[name] is not None and not asked[other]:
            raise UsageError(f"{_flag(name)} is about {_flag(other)}", hint=f"add {_flag(other)}")
    if forms not in ([], ["as_json"]) and any(asked[name] for name in _SECTIONS):
        raise UsageError("--explain, --capacity and --workload are printed as text or with --json")
    for name, least in _LEAST.items():
        if asked[name] is not None and not least <= asked[name] <= _MOST:
            raise UsageError(f"{_flag(name)} is {asked[name]:g}", hint=f"expected a number from {least:g} to {_MOST:g}")
    if asked["for_"] == "k3hal":
        for name in (*_FOR_VLLM, "k8s", "compose", "slurm"):
            if asked[name]:
                raise UsageError(f"{_flag(name)} is about vLLM, not about --for k3hal")


def _check_alone(whole: str, known: tuple[str, ...], asked: Mapping[str, Any]) -> None:
    for name, value in asked.items():
        if name not in (whole, "as_json", *known) and value and value != "vllm":
            raise UsageError(f"{_flag(name)} does not go with {_flag(whole)}", hint="leave one of them out")


def _flag(name: str) -> str:
    return "--" + name.removeprefix("as_").strip("_").replace("_", "-")
