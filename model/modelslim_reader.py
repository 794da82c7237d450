"""Weights of a checkpoint of msModelSlim's, as the model has them: projections in its own dtype, experts as int4."""

from __future__ import annotations

from collections.abc import Callable

import torch

from k3hal.dispatch.errors import CheckpointError, K3HALError
from k3hal.model.checkpoint import Checkpoint
from k3hal.model.modelslim import BIAS, INT4, INT8, OFFSET, SCALE
from k3hal.model.parallel import Shard
from k3hal.model.reader import WeightReader

GROUP = 32
"""Columns that share a scale in `moe_experts_int4`."""


class SlimReader(WeightReader):
    """A `WeightReader` whose int8 weights come out as `codes * scale`. int4 ones are asked for by `fill_int4`."""

    def resident_dtype(self, name: str) -> torch.dtype:
        return self.dtype if self._kind(name) == INT8 else super().resident_dtype(name)

    def fill(self, out: torch.Tensor, name: str, *, shard: Shard | None = None) -> None:
        if self._kind(name) != INT8:
            super().fill(out, name, shard=shard)
            return
        codes = torch.empty(self.shape(name, shard), dtype=torch.int8)
        super().fill(codes, name, shard=shard)
        scale = self._scale(name, shard if shard and shard.dim == 0 else None)
        out.copy_((codes.float() * scale).view(out.shape))

    def fill_int4(self, codes: torch.Tensor, scales: torch.Tensor, name: str) -> None:
        """Weight `name` [R, C] as `moe_experts_int4` takes it: `codes` u8 [R, C / 2], the low nibble first, each 8 more
        than the number, and `scales` [R, C / 32] in their own dtype, to which the stored one is rounded."""
        if self._kind(name) != INT4:
            raise K3HALError(f"tensor {name} is not int4")
        stored = torch.empty(self.shape(name), dtype=torch.int8)
        super().fill(stored, name)
        # A byte holds two rows of a column, the lower four bits the first; signed.
        rows = torch.stack((stored & 15, (stored >> 4) & 15), dim=1).flatten(0, 1).to(torch.uint8) ^ 8
        codes.copy_(rows[:, ::2] | (rows[:, 1::2] << 4))
        scales.copy_(self._scale(name, None).expand(scales.shape))
        # What the NPU's int8 product adds to make up for unsigned codes; it follows from them.
        self._report(self._take(name.removesuffix("weight") + BIAS).nbytes)

    def _kind(self, name: str) -> str:
        slim = self.checkpoint.slim
        return slim.kind(name) if slim else ""

    def _scale(self, name: str, shard: Shard | None) -> torch.Tensor:
        """fp32 [R, 1] on the CPU. Raises `CheckpointError` for weights that are not symmetric."""
        scale, offset = (torch.empty(self.shape(name + part, shard)) for part in (SCALE, OFFSET))
        super().fill(scale, name + SCALE, shard=shard)
        super().fill(offset, name + OFFSET, shard=shard)
        if bool(offset.any()):
            raise CheckpointError(f"tensor {name + OFFSET} has offsets; expected zeros, as symmetric weights have")
        return scale


def reader_of(
    checkpoint: Checkpoint,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Callable[[int], None] | None = None,
) -> WeightReader:
    """The reader of a checkpoint's layout."""
    kind = SlimReader if checkpoint.slim else WeightReader
    return kind(checkpoint, device, dtype, progress)
