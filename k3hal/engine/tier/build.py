"""The external tier that the options ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from k3hal.dispatch.plan import DispatchPlan
from k3hal.dispatch.runtime import DeviceRuntime
from k3hal.engine.cache.arena import CacheArena
from k3hal.engine.cache.layout import CacheLayout
from k3hal.engine.memory import GB
from k3hal.engine.options import DEFAULT_HOST_GB, EngineOptions
from k3hal.engine.tier.disk import DiskStore
from k3hal.engine.tier.fingerprint import fingerprint
from k3hal.engine.tier.host import HostTier
from k3hal.engine.tier.interface import ObjectShape
from k3hal.engine.tier.jobs import ThreadJobs
from k3hal.engine.tier.mooncake import MooncakeStore
from k3hal.engine.tier.mooncake_config import MooncakeConfig
from k3hal.engine.tier.mover import PageMover
from k3hal.engine.tier.object_file import ObjectFormat
from k3hal.errors import CapacityError
from k3hal.model.checkpoint import Checkpoint
from k3hal.model.generated import GeneratedModel

DEFAULT_DISK_GB = 100.0


@dataclass(frozen=True, slots=True)
class Tier:
    """A connector, the host memory behind it, and what its names start from (None: anything)."""

    connector: HostTier
    host: Tensor
    seed: bytes | None

    def mover(self, arena: CacheArena, runtime: DeviceRuntime) -> PageMover:
        """What moves the pages of `arena`."""
        return PageMover(arena.pages, self.host, runtime)


def build_tier(
    options: EngineOptions,
    layout: CacheLayout,
    runtime: DeviceRuntime,
    checkpoint: Checkpoint | GeneratedModel,
    plan: DispatchPlan,
) -> Tier | None:
    """None when no flag asks for one. Raises `UsageError` or `CapacityError` when it cannot be had."""
    if not options.tier_flags:
        return None
    shape = ObjectShape(
        page_tokens=layout.page_tokens,
        page_bytes=layout.page_bytes,
        run=layout.pages_per_slot,
        unit=options.prefix_match_unit,
        has_kv=layout.kv_layers > 0,
    )
    pages = int((options.prefix_host_cache_gb or DEFAULT_HOST_GB) * GB) // layout.page_bytes
    least = shape.run + shape.pages_for(1)
    if pages < least:
        raise CapacityError(
            f"prefix_host_cache_gb {options.prefix_host_cache_gb} does not hold one state and one page",
            hint=f"give at least {least * layout.page_bytes / GB:.3g}",
        )
    try:
        host = runtime.allocate_pinned(pages * layout.page_bytes).view(pages, layout.page_bytes)
    except (CapacityError, RuntimeError) as error:
        raise CapacityError(
            f"{pages * layout.page_bytes / GB:.3g} GB of host memory for prefixes cannot be had: {error}",
            hint="lower --prefix-host-cache-gb",
        ) from error
    memory = host.numpy()
    backing = _backing(options, shape, memory, lambda dates: _name(options, layout, checkpoint, plan, dates))
    try:
        connector = HostTier(memory, shape, ThreadJobs(), backing)
    except BaseException:
        if backing is not None:
            backing.close()  # its folder stays usable in this process
        raise
    return Tier(connector, host, backing.seed if backing else None)


def _backing(
    options: EngineOptions, shape: ObjectShape, memory: np.ndarray, name: Callable[[bool], str]
) -> DiskStore | MooncakeStore | None:
    if options.prefix_disk_cache is not None:
        capacity = int((options.prefix_disk_cache_gb or DEFAULT_DISK_GB) * GB)
        least = (shape.run + shape.pages_for(1)) * shape.page_bytes
        if capacity < least:
            raise CapacityError(
                f"prefix_disk_cache_gb {options.prefix_disk_cache_gb} does not hold one state and one page",
                hint=f"give more than {least / GB:.3g}",
            )
        return DiskStore(Path(options.prefix_disk_cache), ObjectFormat(shape, name(True)), capacity)
    if options.prefix_mooncake is not None:
        config = MooncakeConfig.read(Path(options.prefix_mooncake))
        return MooncakeStore.connect(config, ObjectFormat(shape, name(False)), memory)
    return None


def _name(
    options: EngineOptions,
    layout: CacheLayout,
    checkpoint: Checkpoint | GeneratedModel,
    plan: DispatchPlan,
    dates: bool,
) -> str:
    """What stands for all that a stored state depends on. Hosts that share a store have copies of different dates."""
    return fingerprint(
        checkpoint,
        layout,
        plan,
        unit=options.prefix_match_unit,
        norm_eps=options.mla_latent_norm_eps,
        dates=dates,
    )
