"""What a prompt costs to compute, so that hit tokens can be weighed by where they are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files

from k3hal.model.config import ModelConfig
from k3hal.model.manifest import expected_tensors
from k3hal.model.summary import parameter_count


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """FLOPs of one token: `per_token` wherever it is, and `per_context` more for every token before it."""

    per_token: float
    per_context: float

    @classmethod
    def of(cls, config: ModelConfig) -> PrefillCost:
        """Two FLOPs for each weight a token meets (routed experts: those it visits; no embedding, no head), MLA's
        scores and sums over the context with 192 + 128 channels a head, and KDA's state, which is read, corrected and
        written once a token (6 FLOPs an element, whatever the chunk)."""
        weights = 0.0
        for spec in expected_tensors(config):
            if spec.is_vision or "embed_tokens" in spec.name or spec.name == config.lm_head_name:
                continue
            share = config.top_k / config.num_experts if ".experts." in spec.name else 1.0
            weights += parameter_count(spec) * share
        state = len(config.kda_layers) * config.kda_heads * config.kda_head_dim**2
        channels = config.qk_head_dim + config.v_head_dim
        context = 2.0 * len(config.mla_layers) * config.num_heads * channels
        return cls(2.0 * weights + 6.0 * state, context)

    def tokens(self, begin: int, end: int) -> float:
        """FLOPs of the tokens `[begin, end)` of a prompt."""
        count = end - begin
        return self.per_token * count + self.per_context * (begin + end - 1) / 2 * count


@cache
def k3_cost() -> PrefillCost:
    """The full-size model's."""
    with as_file(files("k3hal.model") / "configs" / "kimi_k3.json") as path:
        return PrefillCost.of(ModelConfig.from_json(path))
