"""Random checkpoints as msModelSlim writes models for Ascend: int8 projections, int4 experts, one scale a row."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from k3hal.model.config import ModelConfig
from k3hal.model.content import Content
from k3hal.model.init import random_tensor
from k3hal.model.layout import SLIM_DESCRIPTION, SLIM_INDEX
from k3hal.model.manifest import TensorSpec, expected_tensors
from k3hal.model.modelslim import BIAS, FLOAT, INT4, INT8, OFFSET, SCALE, VERSION, ModelSlim, is_expert

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj", "gate_proj", "up_proj", "down_proj")
"""What is int8; all but these and the routed experts stay as they are."""
_LEAST = 1e-8
"""Of a scale times the largest code."""

Array = npt.NDArray[Any]


def modelslim(config: ModelConfig, seed: int) -> Content:
    """The weights that the config's checkpoint has in the published layout, rounded. Experts must be in bf16 there."""
    kinds = {spec.name: _kind(spec.name) for spec in expected_tensors(config)}
    description = {"version": VERSION, "group_size": 0, "model_quant_type": INT4, **kinds}
    plain = {spec.name: spec for spec in expected_tensors(config)}

    @lru_cache(maxsize=1)
    def quantised(name: str) -> tuple[Array, Array]:
        drawn = random_tensor(config, plain[name], seed).reshape(plain[name].shape)
        return symmetric((drawn.astype(np.uint32) << 16).view(np.float32), 7 if kinds[name] == INT4 else 127)

    def tensor(spec: TensorSpec) -> Array:
        if spec.name in plain and kinds[spec.name] == FLOAT:
            return random_tensor(config, spec, seed)
        name, part = _part(spec.name)
        codes, scale = quantised(name)
        if part == SCALE:
            return scale
        if part == OFFSET:
            return np.zeros_like(scale)
        if part == BIAS:
            wide = spec.shape[1]
            # Added up as integers: the same bits in any order.
            bias = codes.sum(1, keepdims=True, dtype=np.int32).astype(np.float32) * scale * np.float32(8 / wide)
            return np.repeat(bias, wide, 1)
        return (codes[::2] & 15) | (codes[1::2] << 4) if kinds[name] == INT4 else codes

    specs = tuple(ModelSlim(kinds).specs(config))
    return Content(specs, tensor, SLIM_INDEX, "quant_model_weights", {SLIM_DESCRIPTION: description})


def symmetric(weight: Array, most: int) -> tuple[Array, Array]:
    """Codes int8 of each row of a weight [R, C], from `-most` to `most`, and its scale fp32 [R, 1]."""
    scale = np.maximum(np.abs(weight).max(1, keepdims=True), np.float32(_LEAST)) / np.float32(most)
    return np.clip(np.round(weight / scale), -most, most).astype(np.int8), scale.astype(np.float32)


def _kind(name: str) -> str:
    if is_expert(name):
        return INT4
    return INT8 if name.removesuffix(".weight").rpartition(".")[2] in PROJECTIONS else FLOAT


def _part(name: str) -> tuple[str, str]:
    """The weight a stored tensor belongs to, and which of its parts it is."""
    if name.endswith(BIAS):
        return name.removesuffix(BIAS) + "weight", BIAS
    part = next((end for end in (SCALE, OFFSET) if name.endswith(end)), "")
    return name.removesuffix(part), part
