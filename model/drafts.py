"""A KDA layer over drafts: what they would do to the state is recorded, and done when it is known which are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from k3hal.model.batch import VerifyBatch
from k3hal.model.context import Build


class Layer(Protocol):
    """What it takes of a KDA layer."""

    lower_bound: float | None
    eps: float


class Drafts:
    """The operators `kda_verify` and `kda_commit` of one layer, and the records between the two (spec §10.1)."""

    def __init__(self, build: Build, layer: int, of: Layer, small: Mapping[str, Tensor]) -> None:
        self.lower_bound, self.eps = of.lower_bound, of.eps
        self._verify = build.ops.fn("kda_verify", layer, "verify")
        self._commit = build.ops.fn("kda_commit", layer, "verify")
        weights = build.ops.prepare("kda_verify", layer, "verify", **small)
        self._weights = tuple(weights[key] for key in small)
        rates = {key: small[key] for key in ("A_log", "dt_bias")}
        prepared = build.ops.prepare("kda_commit", layer, "verify", **rates)
        self._rates = tuple(prepared[key] for key in rates)
        self._records: tuple[Tensor, ...] | None = None

    def verify(self, inputs: tuple[Tensor, ...], batch: VerifyBatch, conv: Tensor, state: Tensor) -> Tensor:
        """The layer's output [R, H V] for the rows of a batch; `inputs` are the layer's projections of them.

        Sequences with fewer drafts than others repeat their last row behind it, which nothing looks at.
        """
        rows = inputs if batch.padded is None else tuple(t.index_select(0, batch.padded) for t in inputs)
        out, *records = self._verify(
            *rows, *self._weights, conv, state, batch.slots, batch.width, self.lower_bound, self.eps
        )
        self._records = tuple(records)
        return out if batch.packed is None else out.index_select(0, batch.packed)

    def commit(self, kept: Tensor, batch: VerifyBatch, conv: Tensor, state: Tensor) -> None:
        """Advance the states by the first `kept` int32 [N] tokens of the batch that was verified last."""
        if self._records is None:
            raise RuntimeError("nothing was verified that could be kept")
        records, self._records = self._records, None
        self._commit(*records, kept, *self._rates, conv, state, batch.slots, self.lower_bound)
