"""The GPUs that kernels are compiled for, and what a program of theirs may take."""

from __future__ import annotations

from dataclasses import dataclass

from k3hal.dispatch.describe import describe
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.stand_in import StandIn

KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class CrossTarget:
    """One architecture as Triton names it, and the described machine that stands for it (none is described of some:
    then a machine of the vendor's with another `arch`).

    `shared_memory` is what a program may have. `spills_checked`: kernels of decoding may spill no register to memory,
    others little. `matrix` is what the name of a matrix instruction begins with in the assembly, `scaled` what is in
    the name of those that multiply MX formats with their scales (empty: it has none).
    """

    arch: str
    backend: str
    triton_arch: int | str
    lanes: int
    machine: str
    processors: int
    shared_memory: int
    matrix: tuple[str, ...]
    spills_checked: bool = False
    scaled: str = ""

    @property
    def vendor(self) -> str:
        return "amd" if self.backend == "hip" else "nvidia"

    @property
    def stand_in(self) -> StandIn:
        return StandIn(self.arch, self.processors, self.shared_memory)

    def device(self, packages: dict[str, str]) -> DeviceDescription:
        """The machine that selection is asked about, with these packages."""
        from dataclasses import replace

        number = int("".join(c for c in self.arch if c.isdigit()))
        return replace(describe(self.machine), arch=self.arch, arch_number=number, packages=packages)


_MMA = ("wgmma.mma_async", "mma.sync", "tcgen05.mma")
TARGETS = {
    target.arch: target
    for target in (
        CrossTarget("gfx942", "hip", "gfx942", 64, "mi300x", 304, 64 * KIB, ("v_mfma",), spills_checked=True),
        CrossTarget("gfx950", "hip", "gfx950", 64, "mi355x", 256, 160 * KIB, ("v_mfma",), True, "v_mfma_scale"),
        CrossTarget("sm_80", "cuda", 80, 32, "h100", 108, 163 * KIB, _MMA),
        CrossTarget("sm_90", "cuda", 90, 32, "h200", 132, 227 * KIB, _MMA, spills_checked=True),
        CrossTarget("sm_100", "cuda", 100, 32, "b200", 148, 227 * KIB, _MMA, scaled="block_scale"),
        CrossTarget("sm_120", "cuda", 120, 32, "b200", 188, 99 * KIB, _MMA, scaled="block_scale"),
    )
}
