"""A finished plan."""

from __future__ import annotations

from dataclasses import dataclass

from k3hal.plan.gate import Bar
from k3hal.plan.hardware import Hardware
from k3hal.plan.launch import Group
from k3hal.plan.memory import GpuMemory
from k3hal.plan.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether what a group must hold fits its nodes; GB. `source` is the recipe's constant, or for a model that is
    not the recipe's the size of its weights."""

    vram_min_gb: float
    available_gb: float
    source: str = "constant"

    @property
    def ok(self) -> bool:
        return self.available_gb >= self.vram_min_gb


@dataclass(frozen=True, slots=True)
class Deployment:
    """`groups` is one copy of the model, or the pools of a prefill/decode cluster; `fits` and `memory` go with them.

    `weights` is None, and `memory` empty, for a recipe whose model's manifest is not known."""

    recipe: str
    variant: str
    model_id: str
    image: str | None
    hardware: Hardware
    strategy: str
    bars: tuple[Bar, ...]
    groups: tuple[Group, ...]
    fits: tuple[Fit, ...]
    memory: tuple[GpuMemory, ...]
    weights: ModelWeights | None
    router: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def nodes(self) -> int:
        return sum(group.layout.nodes for group in self.groups)

    @property
    def misfit(self) -> GpuMemory | None:
        """The tightest group's memory, where by the manifest it does not fit."""
        tight = [memory for memory in self.memory if not memory.ok]
        return min(tight, key=lambda memory: memory.headroom) if tight else None
