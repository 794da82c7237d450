"""What a machine is, as data: the same record for a probed machine and for one that is not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DeviceDescription:
    """One accelerator (or the host CPU) as selection sees it.

    `id` is the device value users type (`cpu`, `cuda:0`, `mi355x`); `vendor` is `cpu`, `nvidia`, `amd` or `ascend`;
    `arch` is the vendor's own name (`sm_90`, `gfx950`, `ascend910b`, `x86_64`) and `arch_number` its ordered form
    within the vendor (90, 950, 220, ...; 0 where none is defined). `torch_device` is what tensors are placed with.
    `packages` maps installed (or, for a described machine, assumed) distribution names to versions, in their canonical
    spelling; the toolkits torch is built with or finds stand among them as `cuda`, `rocm` and `cann`. `memory_bytes`,
    `bandwidth` (bytes/s) and `flops` (dense, per second, by `float32`, `bfloat16`, `fp8`, `fp4`) are 0 or absent when
    unknown. `source` says where the facts come from, `notes` what to know before trusting them.
    """

    id: str
    vendor: str
    arch: str
    arch_number: int = 0
    torch_device: str = "cpu"
    present: bool = False
    memory_bytes: int = 0
    bandwidth: float = 0.0
    flops: Mapping[str, float] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    packages: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    title: str = ""
    notes: tuple[str, ...] = ()
