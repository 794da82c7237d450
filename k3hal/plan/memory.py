"""What one accelerator of a plan holds, term by term, and whether that fits."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from k3hal.model.config import ModelConfig
from k3hal.plan.cache import CacheCost
from k3hal.plan.fields import Node
from k3hal.plan.layout import Layout

GB = 1e9


@dataclass(frozen=True, slots=True)
class Assumptions:
    """`data/memory.toml`: what no config says."""

    runtime_gb: float
    graph_pool_gb: Mapping[str, float]
    expert_bits: Mapping[str, float]
    storage_gb_s: float
    warm_up_s: float


@cache
def assumptions() -> Assumptions:
    source = files("k3hal.plan") / "data" / "memory.toml"
    root = Node(tomllib.loads(source.read_text("utf-8")), "memory.toml")
    start = root.child("start")
    return Assumptions(
        root.number("runtime_gb"),
        dict(root.child("graph_pool_gb").data),
        dict(root.child("expert_bits").data),
        start.number("storage_gb_s"),
        start.number("warm_up_s"),
    )


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes on the accelerator of a launch group that holds most, for `concurrency` sequences of `context` tokens.

    The engine's `budget` is its share of the accelerator; weights, activations and cache come out of it, graph
    pools and the runtime's own memory out of what the share leaves, or out of the share where that is too little.
    """

    device: float
    budget: float
    weights: float
    activations: float
    graphs: float
    runtime: float
    kv: float
    state: float
    context: int
    concurrency: int
    cost: CacheCost

    @property
    def fixed(self) -> float:
        """Everything but the cache, inside the budget."""
        outside = self.graphs + self.runtime
        spare = self.device - self.budget
        return self.weights + self.activations + max(outside - spare, 0.0)

    @property
    def room(self) -> float:
        """Bytes left for KV and states; negative where not even the weights fit."""
        return self.budget - self.fixed

    @property
    def headroom(self) -> float:
        return self.room - self.kv - self.state

    @property
    def ok(self) -> bool:
        return self.headroom >= 0

    def document(self) -> dict[str, Any]:
        """In GB, rounded to what the assumptions allow."""
        names = ("device", "budget", "weights", "activations", "graphs", "runtime", "kv", "state", "headroom")
        sizes = {f"{name}_gb": round(getattr(self, name) / GB, 2) for name in names}
        most = self.cost.sequences(self.context, self.room)
        return {
            **sizes,
            "ok": self.ok,
            "context": self.context,
            "concurrency": self.concurrency,
            "max_concurrency": most,
            "kv_bytes_per_token": self.cost.kv_token,
            "state_bytes_per_sequence": self.cost.state,
        }


def activation_bytes(config: ModelConfig, layout: Layout, tokens: int, seqs: int) -> float:
    """What a step of `tokens` tokens that samples `seqs` rows needs: an upper estimate, bfloat16.

    Per token: the residual stream with its stored blocks, the widest attention layer's projections, and the experts'
    inputs and outputs of this rank; per sampled row: float32 logits of this rank's part of the vocabulary, twice.
    """
    blocks = 2 if not config.attn_res_block_size else 2 + config.num_layers // config.attn_res_block_size
    kda = 7 * config.kda_heads * config.kda_head_dim
    mla = 2 * config.num_heads * (config.qk_head_dim + config.qk_nope_head_dim + 2 * config.v_head_dim)
    experts = config.top_k * (3 * config.moe_intermediate_size + 2 * config.expert_width)
    widths = (blocks + 4) * config.hidden_size + max(kda, mla, 3 * config.intermediate_size) / layout.tp
    return 2 * tokens * (widths + experts / layout.tp) + 8 * seqs * config.vocab_size / layout.tp
