"""The small models of the end-to-end check: together they call what K3's checkpoints and options ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from k3hal.model.config_parts import ExpertActivations
from k3hal.model.content import Layout


@dataclass(frozen=True, slots=True)
class Caps:
    """What the logits may differ by: `top1` the least share of positions with the same best token, `kl_mean` and
    `kl_max` of KL(reference || device) in nats, `rms` the worst position's RMS difference over its RMS."""

    top1: float
    kl_mean: float
    kl_max: float
    rms: float


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A preset, written in a layout, and how it is run."""

    preset: str
    layout: Layout = "published"
    expert_activations: ExpertActivations = "auto"

    @property
    def options(self) -> dict[str, Any]:
        """Of `build_engine`."""
        return {"expert_activations": self.expert_activations}


MODELS = {
    "nano": SmallModel("nano"),
    "kl-tiny": SmallModel("kl-tiny"),
    "wide": SmallModel("wide"),
    "nano-int4": SmallModel("nano", layout="modelslim"),
    "nano-mxfp8": SmallModel("nano", expert_activations="mxfp8"),
}
QUICK = ("nano",)

CAPS = {"float32": Caps(1.0, 1e-6, 1e-5, 1e-3), "bfloat16": Caps(0.9, 2e-3, 0.05, 0.1)}
"""Measured on the CPU with seed 0, nano and kl-tiny: top1 1.0 and 0.956, mean KL 2e-12 and 3e-4, largest 7e-12 and
2.2e-3, rms 8e-7 and 0.035."""


def caps_of(model: str, dtype: str) -> Caps:
    """Where activations are rounded to MXFP8 the least difference before may put one of them a whole step apart, in
    fp32 too: the caps are bfloat16's then."""
    return CAPS["bfloat16" if MODELS[model].expert_activations == "mxfp8" else dtype]
