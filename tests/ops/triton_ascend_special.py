"""The Ascend backend's Triton kernels under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

from k3hal.debug.case import sample_case, samples_of
from k3hal.debug.check import check
from k3hal.debug.target import Target
from k3hal.dispatch.registry import default_registry, get_operator


def kda_recurrent() -> list[str]:
    """What is wrong with every sample that the kernel takes."""
    provider = next(p for p in default_registry().of("kda_recurrent") if p.id == "ascend.triton_ascend")
    operator = get_operator("kda_recurrent")
    samples = [s for s in samples_of(operator, tags=("tiny", "edge", "adversarial")) if s.dims["head_dim"] in (32, 128)]
    verdicts = [(sample, check(sample_case(operator, sample), Target.of(provider))) for sample in samples]
    wrong = [f"{sample.name} {sample.dtype}: {v.reasons}" for sample, v in verdicts if not v.ok]
    return wrong if len(samples) > 5 else [f"only {len(samples)} samples"]


SPECIAL: list[Callable[[], list[str]]] = [kda_recurrent]
