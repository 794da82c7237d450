"""The memory of one launch group, from its model, its layout and its settled flags."""

from __future__ import annotations

from functools import cache

from k3hal.model.config import ModelConfig
from k3hal.plan import values
from k3hal.plan.cache import cache_cost, kv_bytes_of
from k3hal.plan.hardware import Hardware
from k3hal.plan.launch import Group
from k3hal.plan.memory import GB, GpuMemory, activation_bytes, assumptions
from k3hal.plan.refusal import RefusedPlanError
from k3hal.plan.weights import ModelWeights, model_config


def group_memory(
    group: Group, weights: ModelWeights, hardware: Hardware, context: int | None, concurrency: int | None
) -> GpuMemory:
    """For `context` tokens (default: the longest a request may have) and `concurrency` sequences (default 1)."""
    config, layout, known = weights.config, group.layout, assumptions()
    longest = longest_sequence(group, config)
    if context is not None and context > longest:
        raise RefusedPlanError(
            f"--context {context} is beyond the {longest} tokens a request may have",
            hint=f'raise it with --set "--max-model-len {context}"'
            if context <= config.max_position_embeddings
            else f"the model has {config.max_position_embeddings} positions",
        )
    seqs = values.whole(group, "max-num-seqs", values.DEFAULT_SEQS)
    tokens = values.whole(group, "max-num-batched-tokens", values.DEFAULT_BATCHED_TOKENS)
    cost = cache_cost(
        config,
        layout,
        kv_bytes_of(group.value("kv-cache-dtype")),
        values.whole(group, "decode-context-parallel-size", 1),
    )
    wanted = (context or longest, concurrency or 1)
    kv, state = cost.of(*wanted)
    pools = known.graph_pool_gb
    return GpuMemory(
        device=hardware.gpu_gb * GB,
        budget=hardware.gpu_gb * GB * values.utilization(group),
        weights=weights.per_gpu(
            layout,
            vision_split=group.value("mm-encoder-tp-mode") != "data",
            with_vision=not group.is_on("language-model-only"),
        ),
        activations=activation_bytes(config, layout, tokens, min(seqs, tokens)),
        graphs=pools.get(values.graph_mode(group), pools["default"]) * GB,
        runtime=known.runtime_gb * GB,
        kv=kv,
        state=state,
        context=wanted[0],
        concurrency=wanted[1],
        cost=cost,
    )


def longest_sequence(group: Group, config: ModelConfig) -> int:
    """`--max-model-len`, or the model's own. Raises `RefusedPlanError` beyond the model's positions."""
    limit = config.max_position_embeddings
    asked = values.whole(group, "max-model-len", limit)
    if asked > limit:
        raise RefusedPlanError(
            f"--max-model-len {asked} is beyond the model's {limit} positions", hint=f"at most {limit}"
        )
    return asked


@cache
def published_weights(precision: str) -> ModelWeights:
    """The full-size Kimi K3 with routed experts in a variant's precision."""
    return ModelWeights(model_config(None), assumptions().expert_bits.get(precision))
