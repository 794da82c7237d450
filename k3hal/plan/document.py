"""A plan as the JSON document of `k3hal plan --json`."""

from __future__ import annotations

from typing import Any

from k3hal.plan.deployment import Deployment
from k3hal.plan.environment import EnvDecision
from k3hal.plan.flags import Decision, Setting
from k3hal.plan.launch import Group, Launch
from k3hal.plan.shell import launch_line
from k3hal.plan.strategies import ROLES

SCHEMA = "k3hal.plan/1"


def document(plan: Deployment) -> dict[str, Any]:
    """Without its schema. Sizes whose names end in `_gb` are GB."""
    hardware = plan.hardware
    return {
        "recipe": plan.recipe,
        "variant": plan.variant,
        "model_id": plan.model_id,
        "image": plan.image,
        "hardware": {
            "id": hardware.id,
            "generation": hardware.generation,
            "brand": hardware.brand,
            "gpus": hardware.gpus,
            "vram_gb": hardware.node_gb,
        },
        "strategy": plan.strategy,
        "nodes": plan.nodes,
        "fit": _fit(plan),
        "min_gpus": _min_gpus(plan),
        "launches": [_launch(launch) for group in plan.groups for launch in group.launches],
        "router": {"argv": list(plan.router), "shell": launch_line((), plan.router)} if plan.router else None,
        "features": {
            "enabled": list(plan.features),
            "dropped": [{"name": name, "reason": reason} for name, reason in plan.dropped],
        },
        "decisions": [_decision(decision, group) for group in plan.groups for decision in group.decisions],
        "env_decisions": [_env(decision, group) for group in plan.groups for decision in group.environment],
        "warnings": list(plan.warnings),
        "errors": [],
    }


def _fit(plan: Deployment) -> dict[str, Any]:
    """The recipe's constant against the smallest group, and each group by the checkpoint's own bytes."""
    tight = min(plan.fits, key=lambda fit: fit.available_gb)
    return {
        "vram_min_gb": tight.vram_min_gb,
        "available_gb": tight.available_gb,
        "ok": tight.ok,
        "headroom_gb": round(tight.available_gb - tight.vram_min_gb, 3),
        "manifest": _manifest(plan),
    }


def _manifest(plan: Deployment) -> dict[str, Any] | None:
    if plan.weights is None:
        return None
    kinds = {f"{kind}_gb": round(size / 1e9, 3) for kind, size in plan.weights.by_kind.items()}
    groups = zip(plan.groups, plan.memory, strict=True)
    return {
        "ok": plan.misfit is None,
        "weights_gb": round(plan.weights.total / 1e9, 3),
        **kinds,
        "per_gpu": [{"role": group.role, **memory.document()} for group, memory in groups],
    }


def _min_gpus(plan: Deployment) -> dict[str, Any]:
    largest = max(plan.bars, key=lambda bar: bar.required)
    pools = {role: bar.required for role, bar in zip(ROLES, plan.bars, strict=False)} if plan.router else None
    return {
        "required": largest.required,
        "nodes": largest.nodes(plan.hardware),
        "source": largest.source,
        **({"pools": pools} if pools else {}),
    }


def _launch(launch: Launch) -> dict[str, Any]:
    return {
        "role": launch.role,
        "node": launch.node,
        "rank": launch.rank,
        "argv": list(launch.argv),
        "env": dict(launch.env),
        "shell": launch_line(launch.env.items(), launch.argv),
    }


def _decision(decision: Decision, group: Group) -> dict[str, Any]:
    return {
        "role": group.role,
        "flag": decision.chosen.flag,
        "value": decision.chosen.shown,
        "layer": decision.chosen.layer,
        "overrode": [_overridden(old, decision) for old in decision.overrode],
    }


def _overridden(old: Setting, decision: Decision) -> dict[str, Any]:
    other = {"written": old.written} if old in decision.unified() else {}
    return {"layer": old.layer, "value": old.shown, **other}


def _env(decision: EnvDecision, group: Group) -> dict[str, Any]:
    overrode = [{"layer": layer, "value": value} for layer, value in decision.overrode]
    return {
        "role": group.role,
        "name": decision.name,
        "value": decision.value,
        "layer": decision.layer,
        "overrode": overrode,
    }
