"""Plans a deployment for vLLM: gates, layout, launches, memory and warnings, in this order."""

from __future__ import annotations

from dataclasses import replace

from k3hal.plan import traps
from k3hal.plan.deployment import Deployment, Fit
from k3hal.plan.features import choose_features, foreign_words
from k3hal.plan.fit import group_memory, published_weights
from k3hal.plan.gate import Bar, least_gpus, pool_bar, reach_refusal, strategy_refusal, variant_refusal
from k3hal.plan.hardware import Hardware
from k3hal.plan.launch import Group, aggregated_group, role_group, router_argv
from k3hal.plan.layers import Choice, Role
from k3hal.plan.layout import Layout, layout_of
from k3hal.plan.own_flags import refuse_unusable, settled_layout
from k3hal.plan.recipe import Recipe, RoleRules, Variant
from k3hal.plan.recipe_toml import about_kimi_k3
from k3hal.plan.refusal import RefusedPlanError
from k3hal.plan.request import PlanRequest, find_variant
from k3hal.plan.sizes import NodeCount, aggregated_nodes, indivisible, pool_nodes, refuse_small
from k3hal.plan.strategies import ROLES, Strategy, find_strategy, known_strategies
from k3hal.plan.weights import ModelWeights, model_config

IMAGES = {"NVIDIA": "vllm/vllm-openai", "AMD": "vllm/vllm-openai-rocm"}


def make_deployment(request: PlanRequest) -> Deployment:
    """The plan of a request. Raises `RefusedPlanError` without a hint of what would work: `nearest` finds that."""
    recipe, hardware = request.recipe, request.hardware
    variant = find_variant(recipe, request.variant)
    if why := variant_refusal(variant, hardware):
        raise RefusedPlanError(why)
    strategy = find_strategy(request.strategy) if request.strategy else default_strategy(recipe, hardware)
    if why := strategy_refusal(recipe, strategy, hardware):
        raise RefusedPlanError(why)
    weights, need = model_weights(request, variant)
    own = need is not None
    bars = _bars(recipe, strategy, hardware, own=own)
    if why := next((why for bar in bars if (why := reach_refusal(strategy, hardware, bar))), None):
        raise RefusedPlanError(why)
    variant = replace(variant, memory_gb=need) if need is not None else variant
    counts = _counts(request, strategy, variant, bars)
    features = choose_features(recipe, request.features, strategy, hardware)
    choice = Choice(recipe, variant, strategy, hardware, features, request.user_args, request.kv_args)
    model_id = str(request.model) if request.model else variant.model_id
    groups = _groups(choice, counts, model_id)
    groups = tuple(_with_own_sizes(group, request) for group in groups)
    for group in groups:
        _refuse_flags(group, hardware)
    memory = tuple(
        group_memory(group, weights, hardware, request.context, request.concurrency) for group in groups if weights
    )
    plan = Deployment(
        recipe=recipe.id,
        variant=variant.name,
        model_id=model_id,
        image=image_of(recipe, variant, hardware),
        hardware=hardware,
        strategy=strategy.name,
        bars=bars,
        groups=groups,
        fits=tuple(
            Fit(round(variant.memory_gb, 3), group.layout.nodes * hardware.node_gb, "weights" if own else "constant")
            for group in groups
        ),
        memory=memory,
        weights=weights,
        router=tuple(router_argv(choice, list(groups))) if strategy.roles else (),
        features=tuple(features.enabled),
        dropped=features.dropped,
    )
    if (request.context or request.concurrency) and (tight := plan.misfit):
        raise RefusedPlanError(traps.misfit_text(tight))
    return replace(plan, warnings=tuple(traps.warnings(plan, choice, request, own_model=own)))


def default_strategy(recipe: Recipe, hardware: Hardware) -> Strategy:
    """The recipe's default; where that is not supported or its bar cannot be reached, multi-node TP, else the first
    that can. The default again where nothing can, so that the refusal speaks of it."""
    default = find_strategy(recipe.default_strategy)
    order = (default, *(known_strategies()[name] for name in ("multi_node_tp", "multi_node_tp_dp", "multi_node_tep")))
    for strategy in (*order, *known_strategies().values()):
        reach = reach_refusal(strategy, hardware, least_gpus(recipe, strategy, hardware))
        if not reach and not strategy_refusal(recipe, strategy, hardware):
            return strategy
    return default


def model_weights(request: PlanRequest, variant: Variant) -> tuple[ModelWeights | None, float | None]:
    """The model's weights, and for a model that is not the recipe's own their GB, put for the recipe's constant.

    (None, None): a recipe of a model whose manifest is not known.
    """
    ours = about_kimi_k3(request.recipe)
    if request.model is None:
        return (published_weights(variant.precision) if ours else None), None
    weights = ModelWeights(model_config(request.model))
    if ours and weights.total == ModelWeights(model_config(None)).total:
        return weights, None
    return weights, weights.total / 1e9


def image_of(recipe: Recipe, variant: Variant, hardware: Hardware) -> str | None:
    exact = variant.on.get(hardware.id)
    named = (exact.image if exact else None) or variant.patch.image or recipe.image
    if named or hardware.brand not in IMAGES:
        return named
    return f"{IMAGES[hardware.brand]}:{'nightly' if recipe.nightly else 'latest'}"


def _bars(recipe: Recipe, strategy: Strategy, hardware: Hardware, *, own: bool) -> tuple[Bar, ...]:
    """One bar, or one for each pool. A recipe's bars are about the recipe's model, not about another (`own`)."""
    if own:
        return (Bar(1, "another model than the recipe's"),) * max(len(strategy.roles), 1)
    if not strategy.roles:
        return (least_gpus(recipe, strategy, hardware),)
    roles = recipe.rules(strategy.name).roles
    return tuple(pool_bar(recipe, roles.get(role, RoleRules("tp")).layout, hardware) for role in ROLES)


def _counts(request: PlanRequest, strategy: Strategy, variant: Variant, bars: tuple[Bar, ...]) -> list[NodeCount]:
    if strategy.roles:
        counts = pool_nodes(request, strategy, variant, bars)
    else:
        counts = [aggregated_nodes(request, strategy, variant, bars[0])]
    refuse_small(counts, bars, request, strategy, variant.memory_gb)
    return counts


def _groups(choice: Choice, counts: list[NodeCount], model_id: str) -> tuple[Group, ...]:
    gpus, rules = choice.hardware.gpus, choice.recipe.rules(choice.strategy.name)
    if not choice.strategy.roles:
        layout = layout_of(choice.strategy.layout, counts[0].nodes, gpus, _tensor_parallel(choice))
        return (aggregated_group(choice, layout, model_id),)
    groups = []
    for name, count in zip(ROLES, counts, strict=True):
        role = Role(name, choice.strategy.roles[name], rules.roles.get(name, RoleRules("tp")))
        # A tp or tep pool spans all its accelerators, whatever `tp` a recipe gives it.
        tp = role.rules.tp if role.rules.layout == "dep" else None
        if tp and gpus % tp:
            raise RefusedPlanError(
                f"the {name} pool's tensor-parallel size of {tp} does not divide a node's {gpus} GPUs"
            )
        groups.append(role_group(choice, role, layout_of(role.rules.layout, count.nodes, gpus, tp), model_id))
    return tuple(groups)


def _tensor_parallel(choice: Choice) -> int | None:
    """What fixes the size of a single node: the variant, then the recipe's strategy, else whether one GPU is enough."""
    if choice.strategy.span != "single" or choice.strategy.layout != "tp":
        return None
    fixed = choice.variant.tp or choice.recipe.rules(choice.strategy.name).tp
    return fixed or (1 if choice.variant.memory_gb <= choice.hardware.gpu_gb else None)


def _with_own_sizes(group: Group, request: PlanRequest) -> Group:
    """The group with the layout that its flags make, where they are not the computed ones."""
    refuse_unusable(group.decisions)
    layout = settled_layout(group)
    if layout != group.layout and (why := indivisible(layout, request)):
        raise RefusedPlanError(why)
    return replace(group, layout=layout)


def _refuse_flags(group: Group, hardware: Hardware) -> None:
    """Flags that cannot work together, or on this machine, wherever they come from."""
    layout: Layout = group.layout
    if words := foreign_words(group.launches[0].argv, hardware):
        raise RefusedPlanError(f"the flags name {', '.join(words)}, which exists on NVIDIA only; {hardware.id} is not")
    dcp, tp = group.value("decode-context-parallel-size"), group.value("tensor-parallel-size") or str(layout.tp)
    if dcp and dcp.isdecimal() and tp.isdecimal() and int(dcp) and int(tp) % int(dcp):
        raise RefusedPlanError(f"decode context parallelism of {dcp} does not divide a tensor-parallel size of {tp}")
