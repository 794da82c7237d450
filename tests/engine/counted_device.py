"""A device whose memory is a number, and a model on it that takes memory as its steps are large."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.runtime import MemoryFigures
from k3hal.model.batch import CacheViews, StepBatch

from .fold_model import FoldModel


@dataclass
class CountedDevice:
    """`DeviceRuntime` as far as memory goes. Beyond `most` bytes, or all there are, tensors cannot be had."""

    capacity: int
    code: int = 0
    device: DeviceDescription = field(
        default_factory=lambda: DeviceDescription(id="counted:0", vendor="acme", arch="any", present=True)
    )
    supports_graphs: bool = False
    held: int = 0
    peak: int = 0
    most: int = 1 << 60
    refused: int = 0

    def memory(self) -> MemoryFigures:
        return MemoryFigures(self.capacity, self.capacity - self.held - self.code, self.held, self.peak)

    def reset_peak(self) -> None:
        self.peak = self.held

    def limit(self, num_bytes: int) -> None:
        self.most = num_bytes

    def take(self, num_bytes: int) -> None:
        if self.held + num_bytes > min(self.most, self.capacity - self.code):
            self.refused += 1
            raise torch.OutOfMemoryError(f"{num_bytes} bytes beside {self.held} of {self.most}")
        self.held += num_bytes
        self.peak = max(self.peak, self.held)

    def give(self, num_bytes: int) -> None:
        self.held -= num_bytes

    @contextmanager
    def taking(self, num_bytes: int) -> Iterator[None]:
        self.take(num_bytes)
        try:
            yield
        finally:
            self.give(num_bytes)

    def allocate(self, num_bytes: int) -> Tensor:
        self.take(num_bytes)
        memory = np.full(num_bytes, 255, np.uint8)  # NaN wherever nobody has written
        weakref.finalize(memory, self.give, num_bytes)
        return torch.from_numpy(memory)


@dataclass(frozen=True)
class Appetite:
    """Bytes that a step takes: for each token, sequence, token of its longest context, token and prompt times that."""

    token: int = 0
    sequence: int = 0
    length: int = 0
    product: int = 0
    padded: int = 0
    row: int = 0
    kept: int = 0
    code: int = 0
    """`row` is for each row of logits; `kept` stays from the first step on, `code` goes to the driver then."""


class HungryModel(FoldModel):
    """While `trying`, steps are not checked, and leave garbage wherever they may write, as a model's would."""

    def __init__(self, device: CountedDevice, appetite: Appetite) -> None:
        super().__init__()
        self.device, self.appetite = device, appetite
        self.trying = True
        self.steps = 0

    def forward(self, batch: StepBatch, cache: CacheViews, aux_layers: Sequence[int] = ()) -> Tensor:
        eats, tokens = self.appetite, batch.token_ids.shape[0]
        if not self.steps:
            self.device.take(eats.kept)
            self.device.code += eats.code
        self.steps += 1
        parts: list[Any] = [part for part in (batch.decode, batch.prefill) if part is not None]
        longest = max(part.page_table.shape[1] for part in parts) * cache.kv[0].shape[1]
        prompts = batch.prefill.size if batch.prefill else 0
        need = eats.token * tokens + (eats.length + eats.product * tokens + eats.padded * prompts) * longest
        with self.device.taking(need + eats.sequence * sum(part.size for part in parts)):
            if not self.trying:
                return super().forward(batch, cache, aux_layers)
            self._litter(batch, cache, parts)
            return torch.zeros(tokens, 4)

    def logits(self, hidden: Tensor) -> Tensor:
        with self.device.taking(self.appetite.row * hidden.shape[0]):
            return torch.zeros(hidden.shape[0], 29) if self.trying else super().logits(hidden)

    def _litter(self, batch: StepBatch, cache: CacheViews, parts: list[Any]) -> None:
        for kv in cache.kv:
            rows = batch.kv_rows.long()
            kv[rows // kv.shape[1], rows % kv.shape[1]] = torch.nan
        for part in parts:
            assert part.slots.min() > 0, "a sequence in the null slot"
            for state in (*cache.state, *cache.conv):
                state[part.slots.long()] = torch.nan
