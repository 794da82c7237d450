"""What sequences take: latent KV that grows with context, and a recurrent state of fixed size."""

from __future__ import annotations

from dataclasses import dataclass

from k3hal.model.config import ModelConfig
from k3hal.plan.layout import Layout
from k3hal.plan.weights import pipeline_stages

PAGE_TOKENS = 128
_STATE_BYTES, _CONV_BYTES = 4, 2  # a state is float32, a convolution's window bfloat16
KV_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}


def kv_bytes_of(word: str | None) -> int:
    """Bytes of one cached value under a `--kv-cache-dtype`; anything but 8-bit types is bfloat16."""
    return KV_BYTES.get(word or "auto", 2)


@dataclass(frozen=True, slots=True)
class CacheCost:
    """Bytes on the accelerator that holds most: one token's KV, and one sequence's state."""

    kv_token: float
    state: float
    replicas: int
    """Data-parallel ranks that sequences are spread over."""

    def of(self, context: int, concurrency: int) -> tuple[float, float]:
        """Bytes of KV and of state for `concurrency` sequences of `context` tokens on the fullest accelerator."""
        here = -(-concurrency // self.replicas)
        tokens = -(-context // PAGE_TOKENS) * PAGE_TOKENS
        return here * tokens * self.kv_token, here * self.state

    def sequences(self, context: int, room: float) -> int:
        """Sequences of `context` tokens that `room` bytes hold, over all replicas."""
        kv, state = self.of(context, 1)
        return int(max(room, 0) // (kv + state)) * self.replicas


def cache_cost(config: ModelConfig, layout: Layout, kv_bytes: int, dcp: int = 1) -> CacheCost:
    """The latent KV is whole on every tensor-parallel rank, unless decode context parallelism (`dcp`) divides it;
    states are divided by heads, and both by pipeline stages."""
    stages = pipeline_stages(config.num_layers, layout.pp)
    kda, mla = set(config.kda_layers), set(config.mla_layers)
    width = (config.kv_lora_rank + config.qk_rope_head_dim) * kv_bytes
    heads = config.kda_heads / layout.tp
    dim = config.kda_head_dim
    state = heads * dim * dim * _STATE_BYTES + 3 * heads * dim * (config.conv_width - 1) * _CONV_BYTES
    kv_token = max(sum(layer in mla for layer in stage) for stage in stages) * width / dcp
    return CacheCost(kv_token, max(sum(layer in kda for layer in stage) for stage in stages) * state, layout.dp)
