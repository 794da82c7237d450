"""The bytes a decode step cannot avoid moving, which bound its time by the memory bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from k3hal.bench.steps import Step
from k3hal.engine.build import resident_bytes
from k3hal.engine.cache.layout import CacheLayout
from k3hal.model.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes per decode step, means over a run's decode steps.

    `dense` weights are read once a step, however many sequences share it; `experts` are the weights of those really
    routed to, each once a layer and step; `state` is every sequence's recurrent state and convolution window, read and
    written; `kv` every cached latent, read, and the new one, written. Activations and logits are left out: they may
    stay in cache.
    """

    dense: float
    experts: float
    state: float
    kv: float
    experts_touched: float
    experts_total: int

    @property
    def total(self) -> float:
        return self.dense + self.experts + self.state + self.kv


def step_bytes(checkpoint: Checkpoint, layout: CacheLayout, steps: Sequence[Step]) -> StepBytes:
    """`steps` are decode steps whose experts were counted. Weights count in the dtype they have in memory."""
    config = checkpoint.config
    embedding = f"{config.prefix}embed_tokens.weight"
    dense = routed = 0
    for name, spec in checkpoint.specs.items():
        size = resident_bytes(spec, layout.dtype)
        if ".experts." in name:
            routed += size
        elif name != embedding:
            dense += size
    sequences = fmean(step.num_seqs for step in steps)
    touched = fmean(step.experts for step in steps)
    total = len(config.moe_layers) * config.num_experts
    rows = config.hidden_size * layout.dtype.itemsize
    slot = layout.kda_layers * (layout.state_layer_bytes + layout.conv_layer_bytes)
    row = layout.kv_layers * layout.kv_width * layout.kv_dtype.itemsize
    return StepBytes(
        dense=dense + sequences * rows,
        experts=routed * touched / total if total else 0.0,
        state=2 * sequences * slot,
        kv=row * (fmean(step.context for step in steps) + sequences),
        experts_touched=touched,
        experts_total=total,
    )
