"""What a user asks a plan for."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from k3hal.dispatch.words import nearest
from k3hal.errors import UsageError
from k3hal.plan.flags import Layer, settings
from k3hal.plan.hardware import Hardware
from k3hal.plan.launch import NODE_FLAGS
from k3hal.plan.own_flags import refuse_misspelt
from k3hal.plan.recipe import Recipe, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """None is the recipe's own choice. `context` tokens and `concurrency` sequences at once must fit where given;
    `model` is a checkpoint directory put for the recipe's model."""

    recipe: Recipe
    hardware: Hardware
    strategy: str | None = None
    variant: str | None = None
    nodes: int | None = None
    prefill_nodes: int | None = None
    decode_nodes: int | None = None
    features: tuple[str, ...] = ()
    user_args: tuple[str, ...] = ()
    kv_args: tuple[str, ...] = ()
    model: Path | None = None
    context: int | None = None
    concurrency: int | None = None


def user_tokens(sets: Sequence[str]) -> tuple[str, ...]:
    """The tokens of the `--set` texts. Raises `UsageError` for what is no flag, or one only the planner can give."""
    tokens: list[str] = []
    for text in sets:
        if not text.strip():
            raise UsageError("--set is empty", hint='write --set "--flag value"')
        try:
            tokens += shlex.split(text)
        except ValueError as error:
            raise UsageError(f"--set {text!r}: {error}") from error
    given = settings(Layer("--set", tuple(tokens)))
    refuse_misspelt(given)
    for setting in given:
        if setting.key in NODE_FLAGS:
            raise UsageError(f"--set cannot give {setting.flag}: it differs from node to node", hint="use --nodes")
    return tuple(tokens)


def find_variant(recipe: Recipe, name: str | None) -> Variant:
    """Raises `UsageError` naming the nearest; None is `default`, or the first where a recipe has no such variant."""
    if not recipe.variants:
        raise UsageError(f"{recipe.source}: the recipe has no variants")
    if name is None:
        return recipe.variants.get("default") or next(iter(recipe.variants.values()))
    if name not in recipe.variants:
        raise UsageError(
            f"--variant: no variant is called {name!r}", hint=nearest(name, recipe.variants, always_list=True)
        )
    return recipe.variants[name]
