"""What is wrong or misleading in a recipe file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from k3hal.plan.features import foreign_words
from k3hal.plan.flags import Layer, settings, settle
from k3hal.plan.gate import least_gpus, reach_refusal, strategy_refusal, variant_refusal
from k3hal.plan.hardware import known_hardware
from k3hal.plan.recipe import Patch, Recipe, by_generation
from k3hal.plan.recipe_yaml import load_yaml, read_text, recipe_of
from k3hal.plan.strategies import known_strategies

SCHEMA = "k3hal.plan_lint/1"
_AT_LEAST = re.compile(r"at least (\d+)x (\w+)", re.IGNORECASE)


class Finding(NamedTuple):
    """`code` is stable, `where` the key of the recipe."""

    code: str
    where: str
    message: str


def lint(path: Path) -> list[Finding]:
    """Every finding, in the order of the checks. Raises `InputError` for a file that is no recipe."""
    text = read_text(path, "a recipe")
    recipe = recipe_of(path, text)
    raw = tomllib.loads(text) if path.suffix == ".toml" else load_yaml(text, str(path))
    checks = (_names, _verified, _memory, _unreachable, _replaced, _left_on, _roles, _features, _repeated)
    found = [finding for check in checks for finding in check(recipe)]
    return list(dict.fromkeys([*found, *_guide(raw, recipe), *_empty(raw, ""), *_unused(recipe)]))


def _names(recipe: Recipe) -> Iterator[Finding]:
    """Machines and strategies that nothing defines."""
    for name in recipe.min_gpus:
        if name not in known_hardware():
            yield Finding("unknown-name", f"strategy_min_gpus.{name}", "is neither a machine nor a strategy")
    for name in recipe.strategies:
        if name not in known_strategies():
            yield Finding("unknown-name", f"strategies.{name}", "is no strategy")
    for variant in recipe.variants.values():
        for name in variant.hardware:
            if name not in known_hardware():
                yield Finding("unknown-name", f"variants.{variant.name}", f"supports {name}, which is no machine")
    if recipe.default_strategy not in known_strategies():
        yield Finding("unknown-name", "default_strategy", f"{recipe.default_strategy} is no strategy")


def _verified(recipe: Recipe) -> Iterator[Finding]:
    supported = {name for variant in recipe.variants.values() for name in variant.hardware}
    for name in sorted(supported - recipe.verified):
        yield Finding("not-verified", "meta.hardware", f"{name} is supported by a variant, and not verified")


def _cells(recipe: Recipe) -> Iterator[tuple[Any, Any, Any]]:
    """Supported cells of the matrix: variant, machine, strategy."""
    for variant in recipe.variants.values():
        for hardware in known_hardware().values():
            if variant_refusal(variant, hardware):
                continue
            for name in recipe.strategies:
                strategy = known_strategies().get(name)
                if strategy and not strategy_refusal(recipe, strategy, hardware):
                    yield variant, hardware, strategy


def _memory(recipe: Recipe) -> Iterator[Finding]:
    """Cells whose bar of GPUs is reached by nodes that do not hold the weights."""
    for variant, hardware, strategy in _cells(recipe):
        bar = least_gpus(recipe, strategy, hardware)
        have = bar.nodes(hardware) * hardware.node_gb
        if strategy.roles or reach_refusal(strategy, hardware, bar) or have >= variant.memory_gb:
            continue
        yield Finding(
            "too-small",
            f"strategy_min_gpus.{strategy.name}",
            f"{bar.required} GPUs of {hardware.id} are {have:g} GB in {bar.nodes(hardware)} node(s), variant "
            f"{variant.name} needs {variant.memory_gb:g} GB",
        )


def _unreachable(recipe: Recipe) -> Iterator[Finding]:
    for _, hardware, strategy in _cells(recipe):
        if why := reach_refusal(strategy, hardware, least_gpus(recipe, strategy, hardware)):
            yield Finding("unreachable", f"strategy_min_gpus.{strategy.name}", why)


def _replaced(recipe: Recipe) -> Iterator[Finding]:
    """Generation blocks of a strategy, which drop the whole baseline."""
    for name, rules in recipe.strategies.items():
        for key, patch in rules.on.items():
            baseline = recipe.baseline.get(key)
            if baseline is None:
                continue
            kept = {setting.flag for setting in settings(Layer("", patch.args))}
            lost = [s.flag for s in settings(Layer("", baseline.args)) if s.flag not in kept]
            lost += [variable for variable in baseline.env if variable not in patch.env]
            if lost:
                where = f"strategy_overrides.{name}.hardware_overrides.{key}"
                yield Finding("replaces-baseline", where, f"drops the baseline's {', '.join(lost)}")


def _left_on(recipe: Recipe) -> Iterator[Finding]:
    """Flags of a feature that a baseline sets as well: they stay when the feature is off."""
    for key, patch in recipe.baseline.items():
        mine = {setting.key: setting for setting in settings(Layer("", patch.args))}
        for feature in recipe.features.values():
            if feature.opt_in:
                continue
            for setting in settings(Layer("", feature.args)):
                if setting.key in mine:
                    message = f"{setting.flag} is also in feature {feature.name}, and stays on without it"
                    yield Finding("feature-in-baseline", f"hardware_overrides.{key}", message)


def _roles(recipe: Recipe) -> Iterator[Finding]:
    for name, rules in recipe.strategies.items():
        for role, part in rules.roles.items():
            if part.tp and part.layout != "dep":
                where = f"strategy_overrides.{name}.{role}.tp"
                yield Finding("not-used", where, f"is not used with {part.layout}: the pool spans all its GPUs")


def _features(recipe: Recipe) -> Iterator[Finding]:
    for feature in recipe.features.values():
        for other in feature.excludes:
            if other not in recipe.features:
                yield Finding("unknown-name", f"features.{feature.name}", f"excludes {other}, which is not defined")
        for _, hardware, strategy in _cells(recipe):
            allowed = feature.strategies is None or strategy.name in feature.strategies
            patch = by_generation(feature.on, hardware)
            words = foreign_words((patch[1] if patch else Patch(feature.args)).args, hardware)
            if allowed and words:
                message = f"sets {', '.join(words)} on {hardware.id}, where it does not exist"
                yield Finding("foreign-backend", f"features.{feature.name}", message)


def _repeated(recipe: Recipe) -> Iterator[Finding]:
    """A list that gives one flag twice."""
    lists: Mapping[str, tuple[str, ...]] = {
        "model.base_args": recipe.base.args,
        **{f"variants.{name}": variant.patch.args for name, variant in recipe.variants.items()},
        **{f"features.{name}": feature.args for name, feature in recipe.features.items()},
        **{f"hardware_overrides.{name}": patch.args for name, patch in recipe.baseline.items()},
        **{f"strategy_overrides.{name}": rules.patch.args for name, rules in recipe.strategies.items()},
    }
    for where, args in lists.items():
        for decision in settle([Layer(where, args)]):
            if decision.overrode:
                yield Finding(
                    "given-twice", where, f"{decision.chosen.flag} is given {len(decision.overrode) + 1} times"
                )


def _guide(raw: Mapping[str, Any], recipe: Recipe) -> Iterator[Finding]:
    guide = raw.get("guide")
    for number, name in _AT_LEAST.findall(guide) if isinstance(guide, str) else ():
        hardware = known_hardware().get(name.lower())
        if hardware and recipe.default_hardware and hardware.id != recipe.default_hardware:
            if hardware.brand != known_hardware().get(recipe.default_hardware, hardware).brand:
                continue
            message = f"asks for at least {number}x {name}, the default hardware is {recipe.default_hardware}"
            yield Finding("guide-disagrees", "guide", message)


def _empty(value: Any, where: str) -> Iterator[Finding]:
    """Empty mappings and lists, which do nothing."""
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        here = f"{where}.{key}" if where else str(key)
        if inner in ({}, []):
            yield Finding("no-effect", here, "is empty")
        yield from _empty(inner, here)


def _unused(recipe: Recipe) -> Iterator[Finding]:
    for key in recipe.unused:
        yield Finding("not-planned-with", key, "is a key this planner does not use")
