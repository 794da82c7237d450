"""How a model is split over ranks. Constructors take it; today the only accepted size is one rank."""

from __future__ import annotations

from dataclasses import dataclass

from k3hal.dispatch.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Shard:
    """The `rank`-th of `world` equal parts of a tensor along `dim`."""

    dim: int
    rank: int
    world: int


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """Tensor-parallel rank and size. Raises `UnsupportedError` for more than one rank."""

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.world != 1 or self.rank != 0:
            raise UnsupportedError(f"rank {self.rank} of {self.world}: this build runs a model on one rank only")

    def column(self) -> Shard:
        """Output rows of a weight (spec k3_architecture §7.10)."""
        return Shard(0, self.rank, self.world)

    def row(self) -> Shard:
        """Input columns of a weight, whose partial outputs are then summed over ranks."""
        return Shard(1, self.rank, self.world)

    def local(self, heads: int) -> int:
        """How many of `heads` this rank holds."""
        return heads // self.world
