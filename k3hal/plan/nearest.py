"""The nearest plan that works, for a refusal's hint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from k3hal.errors import UsageError
from k3hal.plan.deployment import Deployment
from k3hal.plan.features import choose_features
from k3hal.plan.flags import Layer, settings
from k3hal.plan.hardware import known_hardware
from k3hal.plan.planner import default_strategy, make_deployment
from k3hal.plan.recipe import Recipe
from k3hal.plan.recipe_toml import builtin_recipe
from k3hal.plan.refusal import RefusedPlanError
from k3hal.plan.request import PlanRequest
from k3hal.plan.shell import quoted
from k3hal.plan.strategies import find_strategy, known_strategies
from k3hal.plan.weights import model_config

_ORDER = ("single_node_tp", "multi_node_tp_pp", "multi_node_tp", "multi_node_tep", "multi_node_tp_dp", "multi_node_dep")


def plan_or_refuse(request: PlanRequest) -> Deployment:
    """The plan, or a `RefusedPlanError` whose hint is a command for the nearest plan that works.

    Where no number of nodes is given, it is the fewest that hold the cache asked for.
    """
    try:
        return make_deployment(request)
    except RefusedPlanError as refusal:
        if larger := _with_room(request):
            return larger
        found = nearest_plan(request)
        hint = f"nearest plan that works: {command(*found)}" if found else "no plan of this recipe works"
        if refusal.hint:
            hint = f"{refusal.hint}; {hint}"
        raise RefusedPlanError(refusal.message, hint=hint) from refusal


def nearest_plan(request: PlanRequest) -> tuple[PlanRequest, Deployment] | None:
    """The first candidate that is not refused; one that fits by the manifest is preferred."""
    second = None
    for candidate in candidates(request):
        try:
            plan = make_deployment(candidate)
        except (RefusedPlanError, UsageError):
            continue
        if plan.misfit is None:
            return candidate, plan
        second = second or (candidate, plan)
    return second


def candidates(request: PlanRequest) -> Iterator[PlanRequest]:
    """Every candidate, and for another model than the recipe's each with requests no longer than that model's."""
    for candidate in _candidates(request):
        yield candidate
        if candidate.model:
            limit = model_config(candidate.model).max_position_embeddings
            yield replace(
                candidate,
                user_args=(*candidate.user_args, "--max-model-len", str(limit)),
                context=min(candidate.context, limit) if candidate.context else None,
            )


def _candidates(request: PlanRequest) -> Iterator[PlanRequest]:
    """Ever further from what was asked: whole nodes where these have fewer GPUs than their kind, fewer features, other
    nodes, less cache, another strategy, variant, machine."""
    whole = known_hardware().get(request.hardware.id, request.hardware)
    if whole != request.hardware:
        request = replace(request, hardware=whole)
        yield request
    yield from _without_features(request)
    yield request
    free = replace(request, nodes=None, prefill_nodes=None, decode_nodes=None)
    yield free
    if request.strategy is None:
        free = replace(free, strategy=default_strategy(request.recipe, request.hardware).name)
    yield from _more_nodes(free)
    yield from _less_cache(request)
    without_flags = replace(free, user_args=())
    for variant in (request.variant, *(name for name in request.recipe.variants if name != request.variant)):
        for strategy in _strategies(request.recipe, request):
            yield replace(free, variant=variant, strategy=strategy)
            yield replace(without_flags, variant=variant, strategy=strategy)
    default = known_hardware().get(request.recipe.default_hardware or "")
    if default:
        yield replace(without_flags, hardware=default, strategy=None)
        yield replace(without_flags, hardware=default, strategy=None, variant=None)


def command(request: PlanRequest, plan: Deployment) -> str:
    """A command line that gives the plan."""
    words = ["k3hal plan --hardware", plan.hardware.id, "--strategy", plan.strategy]
    if request.variant is not None:
        words += ["--variant", request.variant]
    flags = ("--prefill-nodes", "--decode-nodes") if plan.router else ("--nodes",)
    for flag, group in zip(flags, plan.groups, strict=True):
        words += [flag, str(group.layout.nodes)]
    if request.features != request.recipe.default_features:
        words += ["--features", ",".join(request.features) or "none"]
    if request.model:
        words += ["--model", quoted(str(request.model))]
    if request.recipe is not builtin_recipe():
        words += ["--recipe", quoted(request.recipe.source)]
    for setting in settings(Layer("--set", request.user_args)):
        words += ["--set", quoted(" ".join(map(quoted, setting.tokens())))]
    if request.kv_args:
        words += ["--kv-offload", request.kv_args[1]]
    if request.context:
        words += ["--context", str(request.context)]
    if request.concurrency:
        words += ["--concurrency", str(request.concurrency)]
    return " ".join(words)


def _without_features(request: PlanRequest) -> Iterator[PlanRequest]:
    """Without the features that cannot run on the machine, if any."""
    if request.strategy is None:
        strategy = default_strategy(request.recipe, request.hardware)
    else:
        strategy = find_strategy(request.strategy)
    kept = tuple(name for name in request.features if _runs(request, name, strategy.name))
    if kept != request.features:
        yield replace(request, features=kept)


def _runs(request: PlanRequest, name: str, strategy: str) -> bool:
    try:
        choose_features(request.recipe, (name,), known_strategies()[strategy], request.hardware)
    except RefusedPlanError:
        return False
    return True


def _with_room(request: PlanRequest) -> Deployment | None:
    """A plan that is only refused because its fewest nodes do not hold the cache asked for, on more of them."""
    if request.nodes or not (request.context or request.concurrency):
        return None
    for candidate in _more_nodes(request):
        try:
            return make_deployment(candidate)
        except RefusedPlanError:
            continue
    return None


def _more_nodes(request: PlanRequest) -> Iterator[PlanRequest]:
    default = default_strategy(request.recipe, request.hardware)
    strategy = find_strategy(request.strategy) if request.strategy else default
    if strategy.span == "multi":
        for nodes in range(1, strategy.max_nodes + 1):
            yield replace(request, nodes=nodes)


def _less_cache(request: PlanRequest) -> Iterator[PlanRequest]:
    """The same plan with as many sequences as fit, then with a shorter context."""
    if not (request.context or request.concurrency):
        return
    try:
        plan = make_deployment(replace(request, context=None, concurrency=None))
    except (RefusedPlanError, UsageError):
        return
    if not plan.memory:
        return
    longest = min(memory.context for memory in plan.memory)
    if request.context and request.context > longest:
        yield replace(request, context=longest)
    context = min(request.context or longest, longest)
    fits = min(memory.cost.sequences(context, memory.room) for memory in plan.memory)
    if fits:
        yield replace(request, concurrency=fits)
    for divisor in (2, 4, 8, 16, 32, 64, 128):
        yield replace(request, context=max(context // divisor, 1))


def _strategies(recipe: Recipe, request: PlanRequest) -> list[str]:
    """Strategies by nearness: where the default's bar is out of reach the recipe turns to multi-node TP."""
    first = default_strategy(recipe, request.hardware).name
    rest = [name for name in (*_ORDER, *known_strategies()) if name != first]
    return [first, *dict.fromkeys(rest)]
