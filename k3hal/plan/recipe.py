"""What a recipe says: the same record for this package's own data and for a published recipe file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from k3hal.plan.hardware import Hardware

NVIDIA_FALLBACK = "nvidia"
"""Key that stands for every NVIDIA generation a mapping does not name."""


@dataclass(frozen=True, slots=True)
class Patch:
    """Flags, variables and perhaps an image that some part of a recipe adds. `args` are command-line tokens."""

    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None


On = Mapping[str, Patch]
"""Patches by hardware: an id (`gb200`), a generation (`blackwell`) or `nvidia`."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One published set of weights. `memory_gb` is the recipe's constant for its footprint."""

    name: str
    model_id: str
    precision: str
    memory_gb: float
    hardware: tuple[str, ...]
    patch: Patch = Patch()
    on: On = field(default_factory=dict)
    tp: int | None = None


@dataclass(frozen=True, slots=True)
class Feature:
    """An option of the model. `strategies` None: any; `reason` says why others are left out."""

    name: str
    args: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    on: On = field(default_factory=dict)
    strategies: tuple[str, ...] | None = None
    reason: str = ""
    opt_in: bool = False
    excludes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RoleRules:
    """What a recipe adds to one pool of a prefill/decode cluster. `layout` is tp, tep or dep."""

    layout: str
    tp: int | None = None
    patch: Patch = Patch()
    on: On = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StrategyRules:
    """What a recipe says of one strategy.

    `support` decides by exact GPU, generation, brand, then `default`; without an entry `listed` decides. `patch.env`
    also reaches the roles of a prefill/decode cluster, `extra_env` and `patch.args` do not.
    """

    listed: bool = False
    support: Mapping[str, bool] = field(default_factory=dict)
    min_gpus: int | None = None
    tp: int | None = None
    patch: Patch = Patch()
    extra_env: Mapping[str, str] = field(default_factory=dict)
    on: On = field(default_factory=dict)
    roles: Mapping[str, RoleRules] = field(default_factory=dict)
    router: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model's deployment recipe. `baseline` holds the flags of each hardware generation, `min_gpus` the fewest
    accelerators on a machine, for any strategy or by strategy; `source` is the file it was read from; `nightly` asks
    for the images of that name."""

    id: str
    source: str
    model_id: str
    architecture: str
    context_length: int
    default_strategy: str
    default_hardware: str | None
    verified: frozenset[str]
    base: Patch
    variants: Mapping[str, Variant]
    features: Mapping[str, Feature]
    strategies: Mapping[str, StrategyRules]
    baseline: On
    min_gpus: Mapping[str, int | Mapping[str, int]]
    image: str | None = None
    nightly: bool = False
    unused: tuple[str, ...] = ()

    def rules(self, strategy: str) -> StrategyRules:
        return self.strategies.get(strategy, StrategyRules())

    @property
    def default_features(self) -> tuple[str, ...]:
        return tuple(name for name, feature in self.features.items() if not feature.opt_in)


def by_generation(on: On, hardware: Hardware) -> tuple[str, Patch] | None:
    """The patch of a machine's generation and the key it stands under; `nvidia` covers what NVIDIA keys do not."""
    keys = [hardware.generation]
    if hardware.brand == "NVIDIA":
        keys.append(NVIDIA_FALLBACK)
    return next(((key, on[key]) for key in keys if key in on), None)
