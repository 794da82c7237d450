"""What the engine needs of a device besides operators; backends supply it, the engine imports no vendor's API."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.emulated import EMULATED
from k3hal.dispatch.errors import BackendError, UnsupportedError
from k3hal.dispatch.registry import Registry, default_registry

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes of device memory: what this process may use at most, and what is free now.

    `held` is what this process's tensors take of it, with what is kept for the next ones, and `peak` the most they took
    since `reset_peak`; None where nobody counts.
    """

    total: int
    free: int
    held: int | None = None
    peak: int | None = None


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the work before the event has finished; never waits."""
        ...

    def synchronize(self) -> None:
        """Wait in the host until the work before the event has finished."""
        ...

    def elapsed_since(self, earlier: Event) -> float:
        """Seconds between two events of this runtime that have both finished."""
        ...


class Stream(Protocol):
    """A queue of device work that runs in order; work of two streams is ordered only by `wait`."""

    def record(self) -> Event:
        """An event after the work queued so far."""
        ...

    def wait(self, event: Event) -> None:
        """Let work queued from now on start after the event; does not block the host."""
        ...

    def synchronize(self) -> None:
        """Wait in the host until all queued work has finished."""
        ...

    def use(self) -> AbstractContextManager[Any]:
        """Queue the work of the `with` block here."""
        ...


class Graph(Protocol):
    """Captured work over fixed tensors."""

    def replay(self) -> None:
        """Queue the captured work on the current stream; it reads and writes the tensors it was captured with."""
        ...


@runtime_checkable
class DeviceRuntime(Protocol):
    """One device of one process."""

    device: DeviceDescription
    supports_graphs: bool
    asynchronous: bool
    """Whether the host goes on while the device works, and has to wait (`Event`) for what it reads."""

    def memory(self) -> MemoryFigures:
        """Present memory figures."""
        ...

    def reset_peak(self) -> None:
        """Give back what no tensor uses, and count `peak` anew. Nothing where nobody counts."""
        ...

    def limit(self, num_bytes: int) -> None:
        """Let this process's tensors hold at most `num_bytes` from now on: beyond it torch raises `OutOfMemoryError`.

        Nothing where nobody counts.
        """
        ...

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A zeroed uint8 arena [num_bytes] on the device, aligned to 64 bytes. `CapacityError` if it does not fit."""
        ...

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        """A zeroed uint8 host buffer [num_bytes] the device can copy from and to without a staging copy."""
        ...

    def new_stream(self) -> Stream:
        """A stream of its own."""
        ...

    def current_stream(self) -> Stream:
        """The stream work is queued on now."""
        ...

    def synchronize(self) -> None:
        """Wait in the host for all streams."""
        ...

    def graph_pool(self) -> Any:
        """Memory for graphs that never run at the same time; it lasts as long as one of them."""
        ...

    def capture(self, work: Callable[[], None], pool: Any = None) -> Graph:
        """Capture `work`, which must have run once before. `UnsupportedError` where `supports_graphs` is False.

        Graphs of one `pool` use the same memory: what a replay leaves in tensors that `work` made holds until another
        of them is replayed. Other threads may use the device meanwhile.
        """
        ...

    def beside(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Let `work` run beside what is queued next, as `k3hal.dispatch.beside.Beside` says; or not, where that gains
        nothing. Then what is returned runs it."""
        ...

    def new_group(self, ranks: Sequence[int]) -> Any:
        """The process group of these global ranks, for the collective operators; None for a single rank.

        Every rank of the job must call it. `UnsupportedError` if torch.distributed is not initialised.
        """
        ...

    def generator(self, seed: int) -> torch.Generator:
        """A random generator on the device; the same seed gives the same numbers."""
        ...


@runtime_checkable
class CapturesParts(Protocol):
    """A device runtime whose graphs may be cut."""

    def capture_parts(self, work: Callable[[Callable[[], None]], None], pool: Any) -> list[Graph]:
        """As `capture`, of work that calls `cut` wherever something else is to run between two graphs of it.

        What the work made and somebody still holds keeps its memory from graph to graph.
        """
        ...


def process_group(ranks: Sequence[int], transport: str) -> Any:
    """`DeviceRuntime.new_group` over torch.distributed; `transport` is its name for what carries the messages."""
    if len(ranks) == 1:
        return None
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise UnsupportedError(
            f"a group of {len(ranks)} ranks needs torch.distributed, which is not initialised",
            hint="start one process per rank with torchrun",
        )
    return torch.distributed.new_group(list(ranks), backend=transport)


def runtime_for(device: DeviceDescription, registry: Registry | None = None) -> DeviceRuntime:
    """The runtime of a present device, from the backend of its vendor with the highest priority that has one.

    Raises `UnsupportedError` for a described machine or a vendor nobody has a runtime for, `BackendError` for a
    manifest that names none.
    """
    if not device.present:
        raise UnsupportedError(f"{device.id} describes a machine that is not here", hint="nothing can run on it")
    backends = (registry or default_registry()).backends.values()
    vendor = "cpu" if EMULATED in device.features else device.vendor
    able = sorted((b for b in backends if b.runtime and vendor in b.vendors), key=lambda b: (-b.priority, b.name))
    if not able:
        raise UnsupportedError(
            f"no backend has a device runtime for {device.id} ({device.vendor})",
            hint="install the vendor's package, or use --device cpu",
        )
    module, _, name = able[0].runtime.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BackendError(f"backend {able[0].name}: runtime {able[0].runtime!r} cannot be loaded: {error}") from error
    runtime = make(device)
    if not isinstance(runtime, DeviceRuntime):
        raise BackendError(f"backend {able[0].name}: {able[0].runtime} is not a DeviceRuntime")
    return runtime
