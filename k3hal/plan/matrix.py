"""The whole matrix of a recipe: what each strategy needs on each machine, or why it is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from k3hal.plan.gate import Bar, least_gpus, pool_bar, reach_refusal, strategy_refusal, variant_refusal
from k3hal.plan.hardware import Hardware, known_hardware
from k3hal.plan.planner import make_deployment
from k3hal.plan.recipe import Recipe, RoleRules
from k3hal.plan.refusal import RefusedPlanError
from k3hal.plan.request import PlanRequest
from k3hal.plan.strategies import ROLES, Strategy, known_strategies

SCHEMA = "k3hal.plan_matrix/1"


@dataclass(frozen=True, slots=True)
class Cell:
    """`min_gpus` and `min_nodes` are the recipe's bar (of the larger pool), `nodes` what a plan takes; each None where
    there is none. `fits` is the manifest's answer for that plan, `refusal` why there is no plan."""

    variant: str
    hardware: str
    strategy: str
    supported: bool
    reachable: bool
    min_gpus: int | None
    min_nodes: int | None
    nodes: int | None
    fits: bool | None
    refusal: str | None


def matrix(request: PlanRequest) -> list[Cell]:
    """Every cell of the strategies a recipe speaks of, by variant and machine; `request` may name the variant."""
    recipe = request.recipe
    names = [name for name in known_strategies() if recipe.rules(name).listed or recipe.rules(name).support]
    variants = [request.variant] if request.variant else list(recipe.variants)
    return [
        _cell(replace(request, variant=variant, hardware=hardware, strategy=name))
        for variant in variants
        for hardware in known_hardware().values()
        for name in names
    ]


def matrix_document(cells: Sequence[Cell]) -> dict[str, Any]:
    return {"cells": [asdict(cell) for cell in cells]}


def matrix_text(cells: Sequence[Cell]) -> Iterator[str]:
    """One table a variant: the nodes of the plan and the fewest GPUs, or the kind of refusal."""
    for variant in dict.fromkeys(cell.variant for cell in cells):
        mine = [cell for cell in cells if cell.variant == variant]
        names = list(dict.fromkeys(cell.strategy for cell in mine))
        yield f"variant {variant}: nodes of the plan (fewest GPUs of the recipe); ! does not fit by the manifest"
        yield f"{'':<12}" + "".join(f"{name:>18}" for name in names)
        for hardware in dict.fromkeys(cell.hardware for cell in mine):
            yield f"{hardware:<12}" + "".join(f"{_word(c):>18}" for c in mine if c.hardware == hardware)
        yield ""


def _word(cell: Cell) -> str:
    if cell.nodes is not None:
        return f"{cell.nodes} ({cell.min_gpus}){'' if cell.fits is not False else ' !'}"
    if not cell.supported:
        return "-"
    return "too few GPUs" if not cell.reachable else "too little memory"


def _cell(request: PlanRequest) -> Cell:
    strategy, hardware = known_strategies()[request.strategy or ""], request.hardware
    recipe, variant = request.recipe, request.recipe.variants[request.variant or ""]
    unsupported = variant_refusal(variant, hardware) or strategy_refusal(recipe, strategy, hardware)
    bar = _bar(recipe, strategy, hardware)
    reachable = not unsupported and not reach_refusal(strategy, hardware, bar)
    nodes = fits = refusal = None
    try:
        plan = make_deployment(request)
        nodes, fits = plan.nodes, plan.misfit is None if plan.memory else None
    except RefusedPlanError as error:
        refusal = error.message
    return Cell(
        variant.name,
        hardware.id,
        strategy.name,
        not unsupported,
        reachable,
        None if unsupported else bar.required,
        None if unsupported else bar.nodes(hardware),
        nodes,
        fits,
        refusal,
    )


def _bar(recipe: Recipe, strategy: Strategy, hardware: Hardware) -> Bar:
    if not strategy.roles:
        return least_gpus(recipe, strategy, hardware)
    roles = recipe.rules(strategy.name).roles
    bars = [pool_bar(recipe, roles.get(role, RoleRules("tp")).layout, hardware) for role in ROLES]
    return max(bars, key=lambda bar: bar.required)
