"""The files a checkpoint directory consists of."""

from __future__ import annotations

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tiktoken.model"
TOKENIZER_CONFIG = "tokenizer_config.json"
INDEX = "model.safetensors.index.json"
SINGLE_SHARD = "model.safetensors"
SLIM_INDEX = "quant_model_weights.safetensors.index.json"
SLIM_DESCRIPTION = "quant_model_description.json"
"""Of checkpoints that msModelSlim wrote."""
CHECKSUMS = "checksums.sha256"

_NAMES = frozenset(
    {CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, INDEX, CHECKSUMS, SLIM_INDEX, SLIM_DESCRIPTION}
)


def is_checkpoint_file(name: str) -> bool:
    return name in _NAMES or name.endswith(".safetensors")
