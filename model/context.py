"""What every module of the model needs while it is built, and the reader of weights it is built from."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from k3hal.dispatch.plan import BoundOps
from k3hal.model.config import ModelConfig
from k3hal.model.parallel import ParallelPlan, Shard

ALIGNED_ROWS = 16
"""A product's rows begin aligned if its weight has a multiple of so many rows. Where they do not, matrix libraries take
two to four times as long."""


class Reader(Protocol):
    """Source of weights by published name. Each tensor is read once."""

    def get(self, name: str, dtype: torch.dtype | None = None, *, shard: Shard | None = None) -> Tensor:
        """An owned tensor on the model's device; `dtype` None keeps F32 and U8, BF16 becomes the model's dtype."""
        ...

    def fill(self, out: Tensor, name: str, *, shard: Shard | None = None) -> None:
        """Copy the tensor into `out`, a (slice of a) tensor that fuses several."""
        ...


@dataclass(frozen=True, slots=True)
class Build:
    """Build context: config, bound operators, weights, placement."""

    cfg: ModelConfig
    ops: BoundOps
    reader: Reader
    device: torch.device
    dtype: torch.dtype
    parallel: ParallelPlan

    def layer_name(self, layer: int, name: str) -> str:
        return f"{self.cfg.prefix}layers.{layer}.{name}"

    def linear(self, weight: Tensor, op: str = "linear") -> Callable[[Tensor], Tensor]:
        """The product with a weight [R, D], in the layout its provider wants: x [T, D] to [T, R]."""
        fn, prepared = self.ops.fn(op), self.ops.prepare(op, weight=weight)["weight"]
        return lambda x: fn(x, prepared)

    def summed(self, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """`fn`, whose results on the ranks are partial sums, added up."""
        sum_up = self.parallel.sum_up
        return fn if self.parallel.world == 1 else lambda x: sum_up(fn(x))

    def fuse_rows(
        self, names: list[str], rows: list[int], columns: int, multiple: int = 1, whole: Collection[str] = ()
    ) -> Tensor:
        """One weight [R, columns] whose row blocks are the named column-parallel weights, in order.

        R is the sum of `rows`, made a multiple of `multiple` by rows of zeros. Those in `whole` are the same on every
        rank.
        """
        total = sum(rows)
        out = torch.empty(-(-total // multiple) * multiple, columns, dtype=self.dtype, device=self.device)
        out[total:] = 0
        for name, part in zip(names, out[:total].split(rows), strict=True):
            self.reader.fill(part, name, shard=None if name in whole else self.parallel.column())
        return out
