"""What a plan's reader should know before running it: every trap this planner has a name for."""

from __future__ import annotations

from collections.abc import Iterator

from k3hal.plan.deployment import Deployment
from k3hal.plan.flags import Decision, Layer, Setting, settings
from k3hal.plan.launch import Group
from k3hal.plan.layers import NVL_ONLY, Choice
from k3hal.plan.memory import GB, GpuMemory
from k3hal.plan.recipe import by_generation
from k3hal.plan.request import PlanRequest


def warnings(plan: Deployment, choice: Choice, request: PlanRequest, *, own_model: bool) -> Iterator[str]:
    """One sentence each, the gravest first."""
    yield from _memory(plan)
    if own_model:
        yield f"{plan.model_id} is not the recipe's model: the recipe's bars and constant do not apply to it"
    if plan.hardware.id not in choice.recipe.verified:
        yield f"{plan.hardware.id} is supported by the recipe, not verified"
    for name, reason in plan.dropped:
        yield f"feature {name} is dropped: {reason}"
    yield from _layout(plan, choice)
    yield from _replaced(plan, choice)
    for group in plan.groups:
        for decision in group.decisions:
            yield from _conflicts(decision, group, len(plan.groups) > 1)
    yield from _features_left_on(plan, choice)
    yield from _pools(plan, choice)
    if choice.recipe.unused:
        yield f"{choice.recipe.source}: not planned with: {', '.join(choice.recipe.unused)}"


def misfit_text(memory: GpuMemory) -> str:
    """One line for a group that does not fit by the manifest."""
    if memory.weights > memory.device:
        return (
            f"by the checkpoint's own bytes the weights alone do not fit: {_gb(memory.weights)} on each GPU of "
            f"{_gb(memory.device)}"
        )
    terms = f"{_gb(memory.weights)} weights, {_gb(memory.activations)} activations"
    cache = f"{_gb(memory.kv + memory.state)} cache of {memory.concurrency} x {memory.context} tokens"
    return (
        f"by the checkpoint's own bytes {_gb(-memory.headroom)} are missing on each GPU: {terms}, {cache} and what "
        f"graphs and the runtime take, of {_gb(memory.budget)}"
    )


def _memory(plan: Deployment) -> Iterator[str]:
    if plan.weights is None:
        yield f"the manifest of {plan.model_id} is not known, only the recipe's constant was checked (give --model DIR)"
    for group, fit in zip(plan.groups, plan.fits, strict=True):
        if not fit.ok:
            yield f"the {group.role} pool has {fit.available_gb:g} GB, below the recipe's {fit.vram_min_gb:g} GB"
    if tight := plan.misfit:
        yield misfit_text(tight)


def _layout(plan: Deployment, choice: Choice) -> Iterator[str]:
    if choice.strategy.span == "multi" and plan.nodes == 1:
        yield f"{plan.strategy} on one node: single_node_tp is the same machine without a network"
    if choice.strategy.span == "pd" or plan.nodes == 1 or plan.hardware.nvlink_across_nodes:
        return
    if plan.groups[0].value("moe-backend") == "deep_gemm_mega_moe":
        yield "deep_gemm_mega_moe needs NVLink between nodes, which this machine has not"


def _replaced(plan: Deployment, choice: Choice) -> Iterator[str]:
    """A strategy's block for a generation replaces the recipe's whole baseline for it."""
    recipe, hardware = choice.recipe, choice.hardware
    own = by_generation(recipe.rules(plan.strategy).on, hardware)
    baseline = by_generation(recipe.baseline, hardware)
    if not own or not baseline:
        return
    kept = {decision.chosen.flag for group in plan.groups for decision in group.decisions}
    lost = [setting.flag for setting in settings(Layer("", baseline[1].args)) if setting.flag not in kept]
    variables = [name for name in baseline[1].env if all(name not in g.launches[0].env for g in plan.groups)]
    if lost or variables:
        yield (
            f"{plan.strategy}'s block for {own[0]} replaces the recipe's baseline: {', '.join([*lost, *variables])} "
            "are not set"
        )


def _conflicts(decision: Decision, group: Group, many: bool) -> Iterator[str]:
    chosen, where = decision.chosen, f" ({group.role})" if many else ""
    for old in decision.unified():
        yield f"{_shown(old)} and {_shown(chosen)} are one flag: the later one stands{where}"
    for old in decision.overrode:
        mine = old.layer == "set" or old.layer.startswith("role:")
        if mine and chosen.layer not in ("set", old.layer) and (old.value, old.flag) != (chosen.value, chosen.flag):
            yield f"{_shown(old)} loses to {_shown(chosen)}, which comes later{where}"
    if chosen.layer == "set" and any(old.layer == "parallel" for old in decision.overrode):
        yield f"{_shown(chosen)} overrides the computed layout"


def _features_left_on(plan: Deployment, choice: Choice) -> Iterator[str]:
    """A feature that is off, whose flag the baseline sets all the same; one that is on, and set twice."""
    for name, feature in choice.recipe.features.items():
        keys = {setting.key for setting in settings(Layer("", feature.args))}
        for decision in plan.groups[0].decisions:
            layers = [decision.chosen.layer, *(old.layer for old in decision.overrode)]
            from_baseline = next((layer for layer in layers if layer.startswith("hardware:")), None)
            if decision.chosen.key not in keys or feature.opt_in or not from_baseline:
                continue
            if name in plan.features:
                yield f"{decision.chosen.flag} is set by {from_baseline} too: without feature {name} it would stay on"
            else:
                yield f"{decision.chosen.flag} stays on from {from_baseline} although feature {name} is off"


def _pools(plan: Deployment, choice: Choice) -> Iterator[str]:
    rules = choice.recipe.rules(plan.strategy)
    for group in plan.groups:
        role = rules.roles.get(group.role)
        if role and role.tp and group.layout.kind != "dep" and role.tp != group.layout.tp:
            yield (
                f"{group.role}.tp of {role.tp} is not used with {group.layout.kind}: the pool spans its "
                f"{group.layout.tp} GPUs"
            )
        elif role and role.tp and group.layout.kind != "dep":
            yield f"{group.role}.tp is not used with {group.layout.kind}: the pool spans all its GPUs"
    if choice.strategy.roles and not choice.hardware.nvlink_across_nodes:
        dropped = [n for facts in choice.strategy.roles.values() for n in facts.patch.env if n in NVL_ONLY]
        if dropped:
            yield f"{', '.join(dropped)} are left out: {choice.hardware.id} has no NVLink between nodes"


def _shown(setting: Setting) -> str:
    value = setting.shown or ""
    spelt = setting.written + (value if setting.written.endswith("=") else f" {value}" if value else "")
    return f"{spelt} ({'--set' if setting.layer == 'set' else setting.layer})"


def _gb(size: float) -> str:
    return f"{size / GB:.1f} GB" if size >= GB / 10 or not size else f"{size / GB:.2g} GB"
