"""What the engine needs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from k3hal.model.batch import CacheViews, StepBatch


class StepModel(Protocol):
    """What computes a step."""

    def forward(self, batch: StepBatch, cache: CacheViews, aux_layers: Sequence[int] = ()) -> Tensor:
        """Hidden states [T, D] after the final norm."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [R, V] of hidden states [R, D]."""
        ...


@runtime_checkable
class VerifyingModel(StepModel, Protocol):
    """A model that takes drafts."""

    def commit(self, batch: StepBatch, cache: CacheViews, kept: Tensor) -> None:
        """Leave the state of each sequence of `batch.verify` as after its first `kept` int32 [N] new tokens.

        Called once after each forward pass over such a batch, before the next one.
        """
        ...
