"""Which operators would run on which provider of a planned machine, at which evidence, and what falls back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.plan import DispatchPlan, make_plan
from k3hal.dispatch.probe import resolve_device
from k3hal.model.requests import model_requests
from k3hal.plan.deployment import Deployment
from k3hal.plan.weights import model_config

DTYPE = "bfloat16"
_KV_DTYPES = {"fp8": "float8_e4m3fn"}


def operators(plan: Deployment) -> list[dict[str, Any]]:
    """One entry for each operator, phase, provider and level of each group's model, on the planned machine's
    description, by K3HAL's own dispatch. Heads that a layout splits count as one rank's."""
    rows: dict[tuple[Any, ...], set[int]] = {}
    for tp, kv in sorted({(group.layout.tp, group.value("kv-cache-dtype") or "auto") for group in plan.groups}):
        made = _dispatch(plan, tp, kv)
        for entry in made.entries:
            decision = entry.decision
            key = (
                entry.request.op,
                entry.request.phase,
                decision.provider,
                entry.level,
                decision.reference,
                decision.composed,
            )
            rows.setdefault(key, set()).update(entry.request.layers)
    names = ("op", "phase", "provider", "level", "reference", "composed")
    return [{**dict(zip(names, key, strict=True)), "layers": len(layers)} for key, layers in rows.items()]


def operator_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """As a table, with what falls back last."""
    for row in rows:
        note = "  composed of finer operators" if row["composed"] else ""
        yield f"{row['op']:<20} {row['phase']:<8} {row['provider']:<20} {row['level']}{note}"
    fallen = sorted({row["op"] for row in rows if row["reference"]})
    yield f"falls back to the reference: {', '.join(fallen)}" if fallen else "nothing falls back to the reference"


def _dispatch(plan: Deployment, tp: int, kv: str) -> DispatchPlan:
    local = Path(plan.model_id)
    config = model_config(local if local.exists() else None)
    requests = model_requests(config, DTYPE, _KV_DTYPES.get(kv, DTYPE), tp)
    device = resolve_device(plan.hardware.id)
    return make_plan(requests, build_selector(None, "warn"), model=plan.model_id, device=device, dtype=DTYPE)
