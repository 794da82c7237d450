"""A list of machines of several kinds: what each kind can run, and how many copies of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k3hal.dispatch.words import nearest
from k3hal.errors import InputError
from k3hal.plan.deployment import Deployment
from k3hal.plan.document import document
from k3hal.plan.fields import Node
from k3hal.plan.gate import variant_refusal
from k3hal.plan.hardware import Hardware, known_hardware
from k3hal.plan.nearest import command
from k3hal.plan.planner import make_deployment
from k3hal.plan.recipe_yaml import load_yaml, read_text
from k3hal.plan.refusal import RefusedPlanError
from k3hal.plan.request import PlanRequest
from k3hal.plan.strategies import known_strategies

SCHEMA = "k3hal.plan_inventory/1"
_MAX_NODES = 10_000
_AGGREGATED = [name for name, strategy in known_strategies().items() if strategy.span != "pd"]


@dataclass(frozen=True, slots=True)
class Stock:
    """`nodes` equal nodes of one kind."""

    hardware: Hardware
    nodes: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one kind of machine runs: a plan and how many copies of it, or why none. `command` gives the plan; nodes
    with fewer accelerators than their kind have none."""

    stock: Stock
    plan: Deployment | None
    replicas: int
    refusal: str = ""
    command: str = ""


def read_inventory(path: Path) -> list[Stock]:
    """A YAML list of `{hardware: ID, nodes: N, gpus: N}`, `gpus` where a node has fewer than its kind.

    Raises `InputError`, one line naming the file and the entry.
    """
    data = load_yaml(read_text(path, "an inventory"), str(path))
    if not isinstance(data, list) or not data:
        raise InputError(f"{path}: expected a list of machines", hint="like `- {hardware: b300, nodes: 2}`")
    stocks: dict[Hardware, int] = {}
    for index, entry in enumerate(data):
        stock = _stock(Node(entry, f"{path}: entry {index}"))
        stocks[stock.hardware] = stocks.get(stock.hardware, 0) + stock.nodes
        if stocks[stock.hardware] > _MAX_NODES:
            raise InputError(f"{path}: more than {_MAX_NODES} nodes of {stock.hardware.id}")
    return [Stock(hardware, nodes) for hardware, nodes in stocks.items()]


def share_out(stocks: list[Stock], request: PlanRequest) -> list[Share]:
    """For each kind, the plan that gives most copies of the model, then the one nearest to what was asked. Devices of
    two kinds never share a copy: their kernels, KV layouts and speeds differ."""
    return [_share(stock, replace(request, hardware=stock.hardware)) for stock in stocks]


def inventory_document(shares: list[Share]) -> dict[str, Any]:
    return {
        "replicas": sum(share.replicas for share in shares),
        "groups": [
            {
                "hardware": share.stock.hardware.id,
                "nodes": share.stock.nodes,
                "gpus_per_node": share.stock.hardware.gpus,
                "replicas": share.replicas,
                "idle_nodes": share.stock.nodes - share.replicas * (share.plan.nodes if share.plan else 0),
                "refusal": share.refusal or None,
                "command": share.command or None,
                "plan": document(share.plan) if share.plan else None,
            }
            for share in shares
        ],
    }


def inventory_text(shares: list[Share]) -> Iterator[str]:
    for share in shares:
        machine = f"{share.stock.nodes} x {share.stock.hardware.id} ({share.stock.hardware.gpus} GPUs each)"
        if share.plan is None:
            yield f"{machine}: nothing: {share.refusal}"
            continue
        idle = share.stock.nodes - share.replicas * share.plan.nodes
        rest = f", {idle} idle" if idle else ""
        yield f"{machine}: {share.replicas} x {share.plan.strategy} on {share.plan.nodes} node(s) each{rest}"
        if share.command:
            yield f"    {share.command}"
        for warning in share.plan.warnings:
            yield f"    warning: {warning}"
    yield f"{sum(share.replicas for share in shares)} copies of the model in all"


def _stock(node: Node) -> Stock:
    node.refuse_unknown(("hardware", "nodes", "gpus"))
    name = node.text("hardware").strip().lower().replace("-", "_")
    known = known_hardware()
    if name not in known:
        raise InputError(f"{node.where}: no machine is called {name!r}", hint=nearest(name, known, always_list=True))
    nodes, gpus = node.whole("nodes", 1), node.whole("gpus", known[name].gpus)
    if nodes > _MAX_NODES or gpus > known[name].gpus:
        raise InputError(
            f"{node.where}: {nodes} nodes of {gpus} GPUs",
            hint=f"at most {_MAX_NODES} nodes, and a node of {name} has {known[name].gpus} GPUs",
        )
    return Stock(replace(known[name], gpus=gpus, node_gb=known[name].gpu_gb * gpus), nodes)


def _share(stock: Stock, request: PlanRequest) -> Share:
    best: tuple[tuple[bool, int], Deployment, PlanRequest] | None = None
    refusal = ""
    for candidate in _candidates(request):
        try:
            plan = make_deployment(candidate)
        except RefusedPlanError as error:
            refusal = refusal or error.message
            continue
        if plan.nodes > stock.nodes:
            refusal = refusal or f"{plan.strategy} needs {plan.nodes} nodes, there are {stock.nodes}"
            continue
        rank = (plan.misfit is None, stock.nodes // plan.nodes)
        if best is None or rank > best[0]:
            best = (rank, plan, candidate)
    if best is None:
        return Share(stock, None, 0, refusal)
    whole = stock.hardware == known_hardware()[stock.hardware.id]
    return Share(stock, best[1], best[0][1], command=command(best[2], best[1]) if whole else "")


def _candidates(request: PlanRequest) -> Iterator[PlanRequest]:
    """The request itself, then every aggregated strategy with the variants that the machine can run."""
    if request.strategy:
        yield request
        return
    allowed = [
        name for name, variant in request.recipe.variants.items() if not variant_refusal(variant, request.hardware)
    ]
    for variant in (request.variant,) if request.variant else allowed:
        for strategy in _AGGREGATED:
            yield replace(request, strategy=strategy, variant=variant)
