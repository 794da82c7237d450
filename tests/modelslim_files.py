"""Small checkpoints in the layout of msModelSlim's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from k3hal.model.config import ModelConfig
from k3hal.model.init import random_tensor
from k3hal.model.layout import SLIM_DESCRIPTION, SLIM_INDEX
from k3hal.model.manifest import expected_tensors
from k3hal.model.presets import preset_config
from k3hal.model.synthetic_vocab import synthetic_vocab_bytes

Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], None]
"""Of the tensors and of the description, before they are written."""
WORTH = "worth.safetensors"
"""Beside the directory: what its quantised weights are worth, fp32."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj", "gate_proj", "up_proj", "down_proj")


def quantised(weight: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric codes of each row, and its scale fp32 [R, 1]."""
    scale = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-8) / most
    return (weight.float() / scale).round().clamp(-most - 1, most).to(torch.int8), scale


def write_slim(folder: Path, change: Change | None = None) -> Path:
    """Preset nano as msModelSlim writes a model, in one shard."""
    content = preset_config("nano")
    content.get("text_config", content).pop("quantization_config", None)
    content.pop("quantization_config", None)
    config = ModelConfig.from_json(content)
    tensors: dict[str, torch.Tensor] = {}
    worth: dict[str, torch.Tensor] = {}
    kinds: dict[str, Any] = {"version": "1.0.0", "group_size": 0, "model_quant_type": "W4A8_DYNAMIC"}
    for spec in expected_tensors(config):
        drawn = torch.from_numpy(random_tensor(config, spec, 0))
        weight = (drawn.view(torch.bfloat16) if spec.dtype == "BF16" else drawn).view(spec.shape)
        part = spec.name.removesuffix(".weight").rpartition(".")[2]
        expert = ".experts." in spec.name
        if not expert and part not in PROJECTIONS:
            tensors[spec.name], kinds[spec.name] = weight, "FLOAT"
            continue
        codes, scale = quantised(weight, 7 if expert else 127)
        worth[spec.name] = codes.float() * scale
        kinds[spec.name] = "W4A8_DYNAMIC" if expert else "W8A8_DYNAMIC"
        tensors[spec.name] = (codes[::2] & 15) | (codes[1::2] << 4) if expert else codes
        tensors[spec.name + "_scale"], tensors[spec.name + "_offset"] = scale, torch.zeros_like(scale)
        if expert:
            wide = 16 if part == "w2" else 1
            bias = 8 * worth[spec.name].sum(1, keepdim=True)
            tensors[spec.name.removesuffix("weight") + "scale_bias"] = (bias / wide).repeat(1, wide)
    if change:
        change(tensors, kinds)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "tiktoken.model").write_bytes(synthetic_vocab_bytes())
    shard = "quant_model_weights-00001-of-00001.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / shard)
    (folder / SLIM_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}))
    (folder / SLIM_DESCRIPTION).write_text(json.dumps(kinds))
    save_file(worth, folder.parent / WORTH)
    return folder
