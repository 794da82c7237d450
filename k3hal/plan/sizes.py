"""How many nodes each launch group gets."""

from __future__ import annotations

import math
from dataclasses import dataclass

from k3hal.errors import UsageError
from k3hal.plan.gate import Bar
from k3hal.plan.hardware import Hardware
from k3hal.plan.layout import Layout, layout_of
from k3hal.plan.recipe import RoleRules, Variant
from k3hal.plan.recipe_toml import about_kimi_k3
from k3hal.plan.refusal import RefusedPlanError
from k3hal.plan.request import PlanRequest
from k3hal.plan.strategies import ROLES, Strategy
from k3hal.plan.weights import model_config


@dataclass(frozen=True, slots=True)
class NodeCount:
    """Nodes of one group."""

    role: str
    nodes: int


def aggregated_nodes(request: PlanRequest, strategy: Strategy, variant: Variant, bar: Bar) -> NodeCount:
    """The nodes asked for, or the fewest that reach the bar, hold the weights and divide the model."""
    if request.prefill_nodes or request.decode_nodes:
        raise UsageError(
            f"--prefill-nodes and --decode-nodes are for pd_cluster, not for {strategy.name}", hint="use --nodes"
        )
    return NodeCount("server", _nodes(request.nodes, strategy, strategy.layout, variant, request, bar))


def pool_nodes(request: PlanRequest, strategy: Strategy, variant: Variant, bars: tuple[Bar, ...]) -> list[NodeCount]:
    """The nodes of the prefill and the decode pool; `--nodes` alone is their sum, the decode pool taking what the
    smallest prefill pool leaves."""
    rules = request.recipe.rules(strategy.name).roles
    asked = [request.prefill_nodes, request.decode_nodes]
    if request.nodes and any(asked):
        raise UsageError("--nodes is the sum of --prefill-nodes and --decode-nodes", hint="give it or them")
    counts = []
    for role, bar, wanted in zip(ROLES, bars, asked, strict=True):
        layout = rules.get(role, RoleRules("tp")).layout
        if role == "decode" and request.nodes:
            wanted = request.nodes - counts[0].nodes
            if wanted < 1:
                raise RefusedPlanError(f"pd_cluster on {request.hardware.id} needs more than {request.nodes} nodes")
        counts.append(NodeCount(role, _nodes(wanted, strategy, layout, variant, request, bar)))
    return counts


def refuse_small(
    counts: list[NodeCount], bars: tuple[Bar, ...], request: PlanRequest, strategy: Strategy, gb: float
) -> None:
    """Raise `RefusedPlanError` where nodes are below a bar, beyond the strategy, or too small for weights of `gb` GB.

    Pools are judged together, one copy of the weights each: what a single pool lacks is a warning, as recipes have
    been verified on pools below their own constant.
    """
    hardware = request.hardware
    for count, bar in zip(counts, bars, strict=True):
        gpus, here = count.nodes * hardware.gpus, _place(strategy, count, hardware)
        if strategy.max_gpus and gpus > strategy.max_gpus:
            raise RefusedPlanError(f"{here}: {strategy.name} runs on at most {strategy.max_gpus} GPUs")
        if gpus < bar.required:
            raise RefusedPlanError(f"{here} has {gpus} GPUs: {bar.source}, that is {bar.nodes(hardware)} nodes")
    have, need = sum(count.nodes for count in counts) * hardware.node_gb, len(counts) * gb
    if have < need:
        copies = f" for {len(counts)} copies" if len(counts) > 1 else ""
        raise RefusedPlanError(
            f"{_place(strategy, counts[0], hardware)} has {have:g} GB, and the weights need {need:g} GB{copies}"
        )


def _place(strategy: Strategy, count: NodeCount, hardware: Hardware) -> str:
    role = "" if count.role == "server" else f" {count.role}"
    return f"{strategy.name}{role} on {count.nodes} node{'s' if count.nodes > 1 else ''} of {hardware.id}"


def _nodes(
    wanted: int | None, strategy: Strategy, layout: str, variant: Variant, request: PlanRequest, bar: Bar
) -> int:
    hardware = request.hardware
    if wanted is not None:
        if wanted > strategy.max_nodes:
            here = f"{strategy.name} on {wanted} nodes of {hardware.id}"
            raise RefusedPlanError(f"{here}: {strategy.name} runs on at most {strategy.max_nodes} node(s)")
        _refuse_division(layout, wanted, request, strategy)
        return wanted
    least = max(bar.nodes(hardware), math.ceil(variant.memory_gb / hardware.node_gb))
    if strategy.max_nodes == 1:
        return 1
    good = (
        n for n in range(least, strategy.max_nodes + 1) if not indivisible(layout_of(layout, n, hardware.gpus), request)
    )
    return next(good, least)


def _refuse_division(layout: str, nodes: int, request: PlanRequest, strategy: Strategy) -> None:
    if why := indivisible(layout_of(layout, nodes, request.hardware.gpus), request):
        raise RefusedPlanError(f"{strategy.name} on {nodes} nodes of {request.hardware.id}: {why}")


def indivisible(layout: Layout, request: PlanRequest) -> str | None:
    """Why the model cannot be divided like this; None if it can, or nothing is known of its heads and experts."""
    if request.model is None and not about_kimi_k3(request.recipe):
        return None
    config = model_config(request.model)
    if layout.tp > 1 and (config.num_heads % layout.tp or config.kda_heads % layout.tp):
        return f"a tensor-parallel size of {layout.tp} does not divide the model's {config.num_heads} heads"
    if layout.expert_parallel and config.num_experts % (layout.tp * layout.dp):
        return f"{layout.tp * layout.dp} expert-parallel ranks do not divide the model's {config.num_experts} experts"
    if layout.pp > config.num_layers:
        return f"{layout.pp} pipeline stages are more than the model's {config.num_layers} layers"
    return None
