"""How a model is split over ranks (spec k3_architecture §7.10)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from k3hal.dispatch.errors import UnsupportedError
from k3hal.model.config import ModelConfig

Collective = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Shard:
    """The `rank`-th of `world` equal parts of a tensor along `dim`."""

    dim: int
    rank: int
    world: int


def _alone(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """Tensor-parallel rank and size, and how ranks meet.

    `sum_up` gives every rank the sum of the ranks' tensors, `put_together` their tensors side by side along the last
    dimension in the order of ranks. Raises `UnsupportedError` for several ranks that have no way to meet.
    """

    rank: int = 0
    world: int = 1
    sum_up: Collective = _alone
    put_together: Collective = _alone

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise UnsupportedError(f"there is no rank {self.rank} of {self.world}")
        if self.world > 1 and _alone in (self.sum_up, self.put_together):
            raise UnsupportedError(
                f"rank {self.rank} of {self.world}: k3hal's own engine runs a model on one rank only"
            )

    def check(self, cfg: ModelConfig) -> None:
        """Raise `UnsupportedError` for a model that does not divide into so many equal parts."""
        sizes = {"attention heads": cfg.num_heads, "KDA heads": cfg.kda_heads, "dense channels": cfg.intermediate_size}
        sizes |= {"channels of an expert": cfg.moe_intermediate_size}
        for name, size in sizes.items():
            if size % self.world:
                raise UnsupportedError(f"{size} {name} do not divide over {self.world} ranks")
        if self.world > 1 and cfg.expert_format == "int4":
            raise UnsupportedError("a checkpoint of msModelSlim's runs on one rank only")

    def column(self) -> Shard:
        """Output rows of a weight."""
        return Shard(0, self.rank, self.world)

    def row(self) -> Shard:
        """Input columns of a weight, whose partial outputs are then summed over ranks."""
        return Shard(1, self.rank, self.world)

    def vocabulary(self, size: int) -> Shard | None:
        """The part of the output head's rows; None, for all of them, where they do not divide."""
        return self.column() if size % self.world == 0 else None

    def local(self, count: int) -> int:
        """How many of `count` heads or channels this rank holds."""
        return count // self.world

    def own(self, heads: int) -> slice:
        """Which of `heads` this rank holds."""
        local = self.local(heads)
        return slice(self.rank * local, (self.rank + 1) * local)
