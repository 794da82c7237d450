"""Rows of packed batches: which sequence has each, rows of padding, and the zeros that operators promise in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.transforms.heads import Rule
from k3hal.dispatch.transforms.transform import After, Arguments, part_of


def sequence_of_rows(cu_seqlens: Tensor, rows: int) -> Tensor:
    """The sequence each packed row belongs to, int64 [rows]; their number for a padding row."""
    every = torch.arange(rows, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), every, right=True)


def live_rows(cu_seqlens: Tensor, slots: Tensor, rows: int) -> Tensor:
    """Bool [rows]: rows of a sequence with a slot."""
    live = torch.cat((slots != 0, slots.new_zeros(1, dtype=torch.bool)))
    return live[sequence_of_rows(cu_seqlens, rows)]


def zeros_elsewhere(live: Tensor, x: Tensor) -> Tensor:
    """`x` [T, ...] with zeros in rows that are not `live` [T], whatever a vendor left there, NaN too; `live` may have
    more of x's first dimensions."""
    return torch.where(live.view(*live.shape, *[1] * (x.ndim - live.ndim)), x, 0.0)


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Arguments (name: what fills a row of padding) with as many rows, their first dimension, as `rule` says.

    The result's rows are cut back, in a tuple those of its `index`th. `outputs` are tensors that the function writes
    into, wholly.
    """

    rule: Rule
    inputs: Mapping[str, float]
    outputs: tuple[str, ...] = ()
    index: int | None = None

    def before(self, arguments: Arguments) -> tuple[Arguments, After]:
        rows = arguments[next(iter(self.inputs))].shape[0]
        missing = self.rule(rows) - rows
        if not missing:
            return arguments, lambda result: result
        fills = {**self.inputs, **dict.fromkeys(self.outputs, 0)}
        given = {name: arguments[name] for name in fills if arguments.get(name) is not None}
        longer = {n: torch.cat((x, x.new_full((missing, *x.shape[1:]), fills[n]))) for n, x in given.items()}

        def after(result: Any) -> Any:
            for name in self.outputs:
                if name in longer:
                    arguments[name].copy_(longer[name][:rows])
            return part_of(result, self.index, lambda x: x[:rows])

        return {**arguments, **longer}, after
