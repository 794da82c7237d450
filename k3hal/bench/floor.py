"""The bytes a decode step cannot avoid moving, which bound its time by the memory bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from k3hal.bench.steps import Step
from k3hal.engine.cache.layout import CacheLayout
from k3hal.model.checkpoint import Checkpoint
from k3hal.model.generated import GeneratedModel


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


def step_bytes(checkpoint: Checkpoint | GeneratedModel, layout: CacheLayout, steps: Sequence[Step]) -> StepBytes:
    """`steps` are decode steps whose experts were counted.

    Weights count as the checkpoint stores them, whatever dtype the engine runs in: a bfloat16 weight takes two bytes to
    read, and an engine that widened it at load chose to read four.
    """
    config = checkpoint.config
    embedding = checkpoint.specs[f"{config.prefix}embed_tokens.weight"]
    routed = sum(spec.nbytes for name, spec in checkpoint.specs.items() if ".experts." in name)
    dense = sum(spec.nbytes for spec in checkpoint.specs.values()) - routed - embedding.nbytes
    sequences = fmean(step.num_seqs for step in steps)
    touched = fmean(step.experts for step in steps)
    total = len(config.moe_layers) * config.num_experts
    rows = embedding.nbytes // config.vocab_size
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
