"""Carries out a step's movements between device and host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
from torch import Tensor

from k3hal.dispatch.runtime import DeviceRuntime, Event
from k3hal.engine.tier.interface import PageTransfer, TransferDone


class Mover(Protocol):
    """What the runner needs of one."""

    def store(self, transfers: Sequence[PageTransfer]) -> None:
        """Begin movements to the host, before anything of the step writes to the device."""
        ...

    def load(self, transfers: Sequence[PageTransfer]) -> None:
        """Begin movements to the device, after the step's copies have begun."""
        ...

    def finished(self) -> tuple[TransferDone, ...]:
        """Movements that ended since the last call."""
        ...

    def drain(self) -> None:
        """Wait until nothing moves."""
        ...


class PageMover:
    """Moves rows between `device` u8 [P, bytes] and `host` u8 [H, bytes], which is pinned where that matters.

    Stores run in the order of the step's own work, because that may overwrite what they read. Loads write where nobody
    reads yet, so they run beside it, on a stream of their own.
    """

    def __init__(self, device: Tensor, host: Tensor, runtime: DeviceRuntime) -> None:
        self._device, self._host = device, host
        self._runtime = runtime
        self._beside = runtime.new_stream()
        self._moving: list[tuple[int, Event]] = []

    def store(self, transfers: Sequence[PageTransfer]) -> None:
        for transfer in transfers:
            for device, host, count in _spans(transfer):
                self._host[host : host + count].copy_(self._device[device : device + count], non_blocking=True)
            self._moving.append((transfer.epoch, self._runtime.current_stream().record()))

    def load(self, transfers: Sequence[PageTransfer]) -> None:
        if not transfers:
            return
        self._beside.wait(self._runtime.current_stream().record())
        with self._beside.use():
            for transfer in transfers:
                for device, host, count in _spans(transfer):
                    self._device[device : device + count].copy_(self._host[host : host + count], non_blocking=True)
                self._moving.append((transfer.epoch, self._beside.record()))

    def finished(self) -> tuple[TransferDone, ...]:
        ended = [(epoch, event.query()) for epoch, event in self._moving]
        self._moving = [moving for moving, (_, over) in zip(self._moving, ended, strict=True) if not over]
        return tuple(TransferDone(epoch) for epoch, over in ended if over)

    def drain(self) -> None:
        for _, event in self._moving:
            event.synchronize()


def _spans(transfer: PageTransfer) -> Iterator[tuple[int, int, int]]:
    """Runs of pages that follow each other on both sides: (first device page, first host page, pages)."""
    device, host = transfer.device, transfer.host
    if not device.size:
        return
    cuts = np.flatnonzero((np.diff(device) != 1) | (np.diff(host) != 1)) + 1
    bounds = np.concatenate(([0], cuts, [device.size])).tolist()
    for begin, end in pairwise(bounds):
        yield int(device[begin]), int(host[begin]), end - begin
