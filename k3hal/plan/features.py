"""Which of the wanted features a plan has, and why the others are dropped or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from k3hal.dispatch.words import nearest
from k3hal.errors import UsageError
from k3hal.plan.hardware import Hardware
from k3hal.plan.recipe import Recipe, by_generation
from k3hal.plan.refusal import RefusedPlanError
from k3hal.plan.strategies import Strategy

CUDA_ONLY = ("TOKENSPEED_MLA", "TRTLLM_RAGGED", "FLASHMLA", "FLASHINFER", "deep_gemm_mega_moe", "CUTLASS_MLA")
"""Backends that exist on NVIDIA alone, as they are written in values of flags."""


@dataclass(frozen=True, slots=True)
class ChosenFeatures:
    """Flags and variables of the enabled features, in the order asked for, and what was dropped with its reason."""

    args: Mapping[str, tuple[str, ...]]
    env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    dropped: tuple[tuple[str, str], ...] = ()

    @property
    def enabled(self) -> list[str]:
        return list(self.args)


def feature_names(recipe: Recipe, text: str | None) -> tuple[str, ...]:
    """The names of a `--features` list; None is the recipe's default. Raises `UsageError` naming the nearest."""
    if text is None:
        return recipe.default_features
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["none"]:
        return ()
    for name in names:
        _refuse_exclusive(recipe, name, names)
        if name not in recipe.features:
            raise UsageError(f"--features: no feature is called {name!r}", hint=nearest(name, recipe.features))
        if names.count(name) > 1:
            raise UsageError(f"--features: {name} is given twice")
    return tuple(names)


def choose_features(recipe: Recipe, names: Sequence[str], strategy: Strategy, hardware: Hardware) -> ChosenFeatures:
    """Raises `RefusedPlanError` where a feature's flags cannot run on the machine, or two features exclude each
    other; one that is not for this strategy is dropped."""
    chosen: dict[str, tuple[str, ...]] = {}
    env: dict[str, Mapping[str, str]] = {}
    dropped = []
    for name in names:
        feature = recipe.features[name]
        if feature.strategies is not None and strategy.name not in feature.strategies:
            why = feature.reason or f"it is for {', '.join(feature.strategies)}"
            dropped.append((name, f"{why}, so not with {strategy.name}"))
            continue
        patch = by_generation(feature.on, hardware)
        args = patch[1].args if patch else feature.args
        _refuse_foreign(name, args, hardware)
        chosen[name] = args
        env[name] = {**feature.env, **(patch[1].env if patch else {})}
    return ChosenFeatures(chosen, env, tuple(dropped))


def foreign_words(args: Sequence[str], hardware: Hardware) -> list[str]:
    """Backends of another vendor that a launch's flags name."""
    if hardware.brand == "NVIDIA":
        return []
    text = " ".join(args)
    return [word for word in CUDA_ONLY if word in text]


def _refuse_exclusive(recipe: Recipe, name: str, names: Sequence[str]) -> None:
    """`name` may be one that the recipe no longer defines and only warns of."""
    for other in names:
        feature = recipe.features.get(other)
        if feature and name in feature.excludes:
            undefined = "" if name in recipe.features else f", and the recipe no longer defines {name}"
            raise RefusedPlanError(
                f"features {other} and {name} exclude each other{undefined}", hint=f"leave out {name}"
            )


def _refuse_foreign(name: str, args: tuple[str, ...], hardware: Hardware) -> None:
    if words := foreign_words(args, hardware):
        raise RefusedPlanError(
            f"feature {name} sets {', '.join(words)}, which exists on NVIDIA only; {hardware.id} is {hardware.brand}",
            hint=f"leave out {name}: the recipe has no {hardware.generation} form of it",
        )
