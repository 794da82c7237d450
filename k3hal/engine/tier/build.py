"""The external tier that the options ask for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from k3hal.dispatch.plan import DispatchPlan
from k3hal.dispatch.runtime import DeviceRuntime
from k3hal.engine.cache.arena import CacheArena
from k3hal.engine.memory import GB
from k3hal.engine.options import EngineOptions
from k3hal.engine.tier.disk import DiskStore
from k3hal.engine.tier.fingerprint import fingerprint
from k3hal.engine.tier.host import HostTier
from k3hal.engine.tier.interface import ObjectShape
from k3hal.engine.tier.jobs import ThreadJobs
from k3hal.engine.tier.mover import PageMover
from k3hal.engine.tier.object_file import ObjectFormat
from k3hal.errors import CapacityError
from k3hal.model.checkpoint import Checkpoint

DEFAULT_HOST_GB = 2.0
"""Host memory under a backing when nobody said how much: everything passes through it."""

DEFAULT_DISK_GB = 100.0


@dataclass(frozen=True, slots=True)
class Tier:
    """A connector, the mover that goes with it, and what its names start from (None: anything)."""

    connector: HostTier
    mover: PageMover
    seed: bytes | None


def build_tier(
    options: EngineOptions, arena: CacheArena, runtime: DeviceRuntime, checkpoint: Checkpoint, plan: DispatchPlan
) -> Tier | None:
    """None when no flag asks for one. Raises `UsageError` or `CapacityError` when it cannot be had."""
    if options.prefix_host_cache_gb is None and options.prefix_disk_cache is None:
        return None
    layout = arena.layout
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
    host = runtime.allocate_pinned(pages * layout.page_bytes).view(pages, layout.page_bytes)
    backing, seed = None, None
    if options.prefix_disk_cache is not None:
        name = fingerprint(checkpoint, layout, plan, unit=shape.unit, norm_eps=options.mla_latent_norm_eps, dates=True)
        form = ObjectFormat(shape, name)
        capacity = int((options.prefix_disk_cache_gb or DEFAULT_DISK_GB) * GB)
        backing = DiskStore(Path(options.prefix_disk_cache), form, capacity)
        seed = backing.seed
    connector = HostTier(host.numpy(), shape, ThreadJobs(), backing)
    return Tier(connector, PageMover(arena.pages, host, runtime), seed)
