"""How fast one replica is, from its hardware's peak rates: a bound with stated efficiencies, not a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from k3hal.dispatch.describe import describe
from k3hal.model.config import ModelConfig
from k3hal.plan.deployment import Deployment
from k3hal.plan.launch import Group
from k3hal.plan.refusal import RefusedPlanError

COMPUTE_EFFICIENCY, BANDWIDTH_EFFICIENCY = 0.35, 0.5
"""Shares of the datasheet's dense bfloat16 rate and of its bandwidth that a step reaches: assumptions."""

STEP_OVERHEAD = 0.005
"""Seconds of a decode step that no roofline knows: launches, collectives, sampling."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of one replica. `active` parameters a token, `dense_bytes` read in every step, `expert_bytes` in all."""

    flops: float
    bandwidth: float
    active: float
    attention: float
    dense_bytes: float
    expert_bytes: float
    chosen_share: float
    kv_token: float

    def prefill(self, tokens: int) -> float:
        """A prompt of `tokens`, alone: weights and causal attention."""
        return (2 * self.active * tokens + self.attention * tokens * tokens / 2) / self.flops

    def step(self, sequences: int, context: float) -> float:
        """One decode step of `sequences` with `context` tokens each: the bytes it must read."""
        experts = self.expert_bytes * (1 - (1 - self.chosen_share) ** sequences)
        read = self.dense_bytes + experts + sequences * context * self.kv_token
        return read / self.bandwidth + STEP_OVERHEAD


def speeds(plan: Deployment) -> tuple[Speed, Speed]:
    """Of what prefills and of what decodes: two pools, or one group twice."""
    if plan.weights is None:
        raise RefusedPlanError(f"the manifest of {plan.model_id} is not known", hint="give --model DIR")
    first, last = plan.groups[0], plan.groups[-1]
    return _speed(plan, first), _speed(plan, last)


def _speed(plan: Deployment, group: Group) -> Speed:
    assert plan.weights is not None
    device, config, layout = describe(plan.hardware.id), plan.weights.config, group.layout
    if "bfloat16" not in device.flops or not device.bandwidth:
        raise RefusedPlanError(f"the speed of {plan.hardware.id} is not known", hint="give --hardware, such as b300")
    sizes = plan.weights.by_kind
    memory = plan.memory[plan.groups.index(group)]
    total = layout.tp * layout.pp * layout.dp
    return Speed(
        flops=device.flops["bfloat16"] * total * COMPUTE_EFFICIENCY,
        bandwidth=device.bandwidth * total * BANDWIDTH_EFFICIENCY,
        active=sizes["dense"] / 2 + _expert_parameters(config) * config.top_k,
        attention=2 * len(config.mla_layers) * config.num_heads * (config.qk_head_dim + config.v_head_dim),
        # Data-parallel ranks read their own copy of what is not experts.
        dense_bytes=sizes["dense"] * layout.dp,
        expert_bytes=sizes["experts"],
        chosen_share=config.top_k / config.num_experts,
        # Tensor-parallel ranks read the same latents, each its own copy.
        kv_token=memory.cost.kv_token * layout.tp * layout.pp,
    )


def _expert_parameters(config: ModelConfig) -> float:
    """Parameters of one routed expert in every layer that has them."""
    return len(config.moe_layers) * 3 * config.expert_width * config.moe_intermediate_size
