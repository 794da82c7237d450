"""What `k3hal model inspect` shows: layers, totals, dtypes and quantisation of a checkpoint."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

from k3hal.model.checkpoint import Checkpoint
from k3hal.model.config import ModelConfig
from k3hal.model.manifest import TensorSpec, expected_tensors

_CODES_PER_BYTE = 2


_QUANTISATION = {
    "mxfp4": "MXFP4, groups of 32, routed experts only",
    "int4": "int4, one scale a row, routed experts; int8 projections",
    "bf16": "none",
}


def parameter_count(spec: TensorSpec) -> int:
    """Parameters a tensor holds: two MXFP4 codes a byte, none in a scale or in the padding of `A_log`."""
    if spec.name.endswith(".weight_scale"):
        return 0
    return prod(spec.shape) * (_CODES_PER_BYTE if spec.name.endswith(".weight_packed") else 1)


def layer_kinds(config: ModelConfig) -> list[dict[str, Any]]:
    """One entry per layer: its attention, its feed-forward part, and whether an AttnRes snapshot is taken before it."""
    block = config.attn_res_block_size
    return [
        {
            "layer": layer,
            "attention": "kda" if config.is_kda(layer) else "mla",
            "mlp": "moe" if config.is_moe(layer) else "dense",
            "snapshot": block is not None and layer % block == 0,
        }
        for layer in range(config.num_layers)
    ]


def summarise(checkpoint: Checkpoint) -> dict[str, Any]:
    """The content of `inspect --json` without its schema."""
    config = checkpoint.config
    stored = checkpoint.tensors.values()
    padding = _padding(config)
    parameters = sum(parameter_count(spec) for spec in expected_tensors(config)) - padding
    dtypes: Counter[str] = Counter()
    for tensor in stored:
        dtypes[tensor.dtype] += tensor.nbytes
    return {
        "path": str(checkpoint.path),
        "architecture": config.architecture,
        "tensors": len(checkpoint.tensors),
        "shards": len(checkpoint.shards),
        "parameters": parameters,
        "active_parameters": parameters - _idle_parameters(config),
        "total_size": sum(tensor.nbytes for tensor in stored),
        "bytes_by_dtype": dict(sorted(dtypes.items())),
        "expert_format": config.expert_format,
        "quantisation": _QUANTISATION[config.expert_format],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "max_position_embeddings": config.max_position_embeddings,
        "experts": {"count": config.num_experts, "top_k": config.top_k, "shared": config.num_shared_experts},
        "layers": layer_kinds(config),
        "notices": list(checkpoint.notices),
    }


def _padding(config: ModelConfig) -> int:
    """Stored `A_log` elements beyond the heads there are."""
    return len(config.kda_layers) * (prod(config.a_log_shape) - config.kda_heads)


def _idle_parameters(config: ModelConfig) -> int:
    """Parameters of routed experts that a token does not visit."""
    per_expert = 3 * config.expert_width * config.moe_intermediate_size
    return len(config.moe_layers) * (config.num_experts - config.top_k) * per_expert
