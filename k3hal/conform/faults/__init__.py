"""The catalogue of seeded faults: what conformance must find, operator by operator."""

from __future__ import annotations

from functools import cache

from k3hal.conform.faults.fault import Fault, base_of

__all__ = ["Fault", "base_of", "catalogue"]


@cache
def catalogue() -> tuple[Fault, ...]:
    """Every seeded fault, by operator and then as written."""
    from k3hal.conform.faults.activation import ACTIVATION
    from k3hal.conform.faults.convolution import CONVOLUTION
    from k3hal.conform.faults.kda import KDA
    from k3hal.conform.faults.linear import LINEAR
    from k3hal.conform.faults.memory import MEMORY
    from k3hal.conform.faults.mla import MLA
    from k3hal.conform.faults.mla_cache import MLA_CACHE
    from k3hal.conform.faults.moe import EXPERTS, LATENT
    from k3hal.conform.faults.mx import MX
    from k3hal.conform.faults.norm import NORM
    from k3hal.conform.faults.process import PROCESS
    from k3hal.conform.faults.recurrence import RECURRENCE
    from k3hal.conform.faults.router import ROUTER
    from k3hal.conform.faults.sampling import SAMPLING
    from k3hal.conform.faults.step import STEP

    families = (
        NORM, ACTIVATION, LINEAR, CONVOLUTION, RECURRENCE, KDA, MLA, MLA_CACHE,
        ROUTER, EXPERTS, LATENT, MX, SAMPLING, STEP, MEMORY, PROCESS,
    )  # fmt: skip
    return tuple(sorted((one for family in families for one in family), key=lambda one: one.op))
