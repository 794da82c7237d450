"""What a recipe allows: variant by hardware, strategy by hardware, and the fewest accelerators and nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from k3hal.plan.hardware import Hardware
from k3hal.plan.recipe import Recipe, Variant
from k3hal.plan.strategies import Strategy

_BLACKWELL_ONLY = ("nvfp4", "fp4")


@dataclass(frozen=True, slots=True)
class Bar:
    """The fewest accelerators a plan may have, and the entry of the recipe that says so."""

    required: int
    source: str

    def nodes(self, hardware: Hardware) -> int:
        return max(-(-self.required // hardware.gpus), 1)


def variant_refusal(variant: Variant, hardware: Hardware) -> str | None:
    """Why the variant cannot run on the machine; None if it can."""
    if variant.precision in _BLACKWELL_ONLY and not (hardware.brand == "NVIDIA" and hardware.generation == "blackwell"):
        return f"variant {variant.name} is {variant.precision}, which needs NVIDIA Blackwell; {hardware.id} is not"
    if hardware.id not in variant.hardware:
        return f"variant {variant.name} does not support {hardware.id}: it is for {', '.join(variant.hardware)}"
    return None


def strategy_refusal(recipe: Recipe, strategy: Strategy, hardware: Hardware) -> str | None:
    """Why the recipe does not support the strategy on the machine; None if it does."""
    rules = recipe.rules(strategy.name)
    if strategy.moe_only and recipe.architecture != "moe":
        return f"{strategy.name} needs a mixture of experts; {recipe.id} is {recipe.architecture}"
    for key in (hardware.id, hardware.generation, hardware.brand, "default"):
        if key in rules.support:
            return None if rules.support[key] else f"the recipe does not support {strategy.name} on {hardware.id}"
    if rules.listed:
        return None
    allowed = [key for key, good in rules.support.items() if good]
    only = f": only {', '.join(allowed)} opted in" if allowed else ""
    return f"the recipe does not support {strategy.name} on {hardware.id}{only}"


def least_gpus(recipe: Recipe, strategy: Strategy, hardware: Hardware) -> Bar:
    """The larger of the strategy's bar and the machine's own."""
    layout = strategy.layout
    names = (strategy.name, f"multi_node_{layout}", f"single_node_{layout}")
    by_strategy = next(
        (Bar(bar, f"{name} needs {bar}") for name in names if (bar := recipe.rules(name).min_gpus)), Bar(1, "none")
    )
    by_machine = _machine_bar(recipe.min_gpus.get(hardware.id), strategy.name, hardware)
    return by_machine if by_machine.required > by_strategy.required else by_strategy


def pool_bar(recipe: Recipe, layout: str, hardware: Hardware) -> Bar:
    """The bar of one pool of a prefill/decode cluster: that of its layout."""
    return least_gpus(recipe, Strategy(f"multi_node_{layout}", "multi", layout), hardware)


def reach_refusal(strategy: Strategy, hardware: Hardware, bar: Bar) -> str | None:
    """Why the bar cannot be reached with as many nodes as the strategy may have; None if it can."""
    most = strategy.max_nodes * hardware.gpus
    if bar.required <= most:
        return None
    where = "a node has" if strategy.max_nodes == 1 else f"{strategy.max_nodes} nodes have"
    return f"{strategy.name} on {hardware.id} needs {bar.required} GPUs ({bar.source}), and {where} {most}"


def _machine_bar(entry: int | Mapping[str, int] | None, strategy: str, hardware: Hardware) -> Bar:
    if isinstance(entry, int):
        return Bar(entry, f"{hardware.id} needs {entry}")
    bar = entry.get(strategy) if entry else None
    return Bar(bar, f"{strategy} on {hardware.id} needs {bar}") if bar else Bar(1, "none")
