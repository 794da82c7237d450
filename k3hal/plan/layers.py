"""The layers of one launch, in the order in which later ones win."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from k3hal.plan.features import ChosenFeatures
from k3hal.plan.flags import Layer
from k3hal.plan.hardware import Hardware
from k3hal.plan.recipe import Patch, Recipe, RoleRules, Variant, by_generation
from k3hal.plan.strategies import RoleFacts, Strategy

NVL_ONLY = (
    "VLLM_USE_NCCL_SYMM_MEM",
    "NCCL_CUMEM_ENABLE",
    "NCCL_MNNVL_ENABLE",
    "NCCL_NVLS_ENABLE",
    "UCX_NET_DEVICES",
)
"""Variables for NVLink across nodes, which a prefill/decode cluster elsewhere must not have."""

INTERFACE = {"GLOO_SOCKET_IFNAME": "$IFACE_NAME", "NCCL_SOCKET_IFNAME": "$IFACE_NAME"}


@dataclass(frozen=True, slots=True)
class Choice:
    """Everything that is decided before flags are: what is planned, on what, and what the user asked for."""

    recipe: Recipe
    variant: Variant
    strategy: Strategy
    hardware: Hardware
    features: ChosenFeatures
    user_args: tuple[str, ...] = ()
    kv_args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Role:
    """A pool of a prefill/decode cluster: `facts` are the strategy's, `rules` the recipe's."""

    name: str
    facts: RoleFacts
    rules: RoleRules


def flag_layers(choice: Choice, parallel: list[str], role: Role | None = None) -> list[Layer]:
    """The layers of a launch whose computed parallel flags are `parallel`."""
    recipe, variant, hardware = choice.recipe, choice.variant, choice.hardware
    rules = recipe.rules(choice.strategy.name)
    exact = variant.on.get(hardware.id, Patch())
    layers = [
        Layer("model", recipe.base.args),
        Layer(f"variant:{variant.name}", variant.patch.args),
        Layer(f"variant:{variant.name}:{hardware.id}", exact.args),
        Layer(f"strategy:{choice.strategy.name}", (role.facts.patch if role else choice.strategy.patch).args),
        Layer("parallel", tuple(parallel)),
        Layer(_recipe_layer(choice, role), (role.rules.patch if role else rules.patch).args),
        *(Layer(name, patch.args) for name, patch in hardware_patches(choice, role)),
        Layer("set", choice.user_args),
        *(Layer(f"feature:{name}", args) for name, args in choice.features.args.items()),
        Layer("kv_offload", choice.kv_args),
    ]
    return [layer for layer in layers if layer.args]


def hardware_patches(choice: Choice, role: Role | None) -> Iterator[tuple[str, Patch]]:
    """The hardware layer: a strategy's own generation entry replaces the recipe's baseline and the variant's."""
    recipe, variant, hardware = choice.recipe, choice.variant, choice.hardware
    rules = recipe.rules(choice.strategy.name)
    if found := by_generation(rules.on, hardware):
        yield f"strategy:{choice.strategy.name}:{found[0]}", found[1]
    else:
        if found := by_generation(recipe.baseline, hardware):
            yield f"hardware:{found[0]}", found[1]
        if found := by_generation(variant.on, hardware):
            yield f"variant:{variant.name}:{found[0]}", found[1]
    if hardware.id in rules.on:
        yield f"strategy:{choice.strategy.name}:{hardware.id}", rules.on[hardware.id]
    if role and hardware.id in role.rules.on:
        yield f"role:{role.name}:{hardware.id}", role.rules.on[hardware.id]


def environment_layers(choice: Choice, role: Role | None = None, nodes: int = 1) -> list[tuple[str, Mapping[str, str]]]:
    """The layers of a launch's environment, named as those of its flags; later ones win."""
    recipe, variant, hardware = choice.recipe, choice.variant, choice.hardware
    rules = recipe.rules(choice.strategy.name)
    facts = role.facts.patch.env if role else choice.strategy.patch.env
    if role and not hardware.nvlink_across_nodes:
        facts = {name: value for name, value in facts.items() if name not in NVL_ONLY}
    layers: list[tuple[str, Mapping[str, str]]] = [
        ("model", recipe.base.env),
        (f"variant:{variant.name}", variant.patch.env),
        (f"variant:{variant.name}:{hardware.id}", variant.on.get(hardware.id, Patch()).env),
        (f"strategy:{choice.strategy.name}", facts),
        ("parallel", _pool_env(hardware, nodes) if role else {}),
        (f"recipe:{choice.strategy.name}", rules.patch.env),
        (f"role:{role.name}", role.rules.patch.env) if role else (f"recipe:{choice.strategy.name}", rules.extra_env),
        *((name, patch.env) for name, patch in hardware_patches(choice, role)),
        *((f"feature:{name}", env) for name, env in choice.features.env.items()),
    ]
    return [layer for layer in layers if layer[1]]


def _pool_env(hardware: Hardware, nodes: int) -> dict[str, str]:
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(hardware.gpus)))}
    return visible | (INTERFACE if nodes > 1 else {})


def _recipe_layer(choice: Choice, role: Role | None) -> str:
    return f"role:{role.name}" if role else f"recipe:{choice.strategy.name}"
