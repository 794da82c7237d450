"""Random weights for a checkpoint that behaves: healthy activations, spread router scores, memory of mixed length.

A tensor's kind is the tail of its name. Attention scores and logits have a standard deviation of one to three, and
KDA's decay per token ranges from almost none to strong. Each layer moves the residual stream by a small part of it:
with larger steps a random network is chaotic, and bf16 rounding, through near-tied experts, would part two right
implementations by as much as a fault does.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from k3hal.model.config import ModelConfig
from k3hal.model.manifest import TensorSpec
from k3hal.model.philox import Stream, to_bfloat16

_GAINS = {
    "lm_head": 2.0,
    "v_proj": 2.0,
    "q_b_proj": 1.5,
    "q_proj": 1.5,
    "kv_b_proj": 1.2,
    "f_b_proj": 0.7,
    "o_proj": 0.15,
    "down_proj": 0.15,
    "w2": 0.06,
    "routed_expert_up_proj": 0.03,
    "self_attention_res_proj": 0.3,
    "mlp_res_proj": 0.3,
    "output_attn_res_proj": 0.3,
}
"""Output standard deviation of a projection for unit inputs, by the name before `.weight`; others 1.0."""

_CODE_RMS = math.sqrt((0 + 0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)
"""Root mean square of the E2M1 values when all sixteen codes are equally likely."""


def random_tensor(config: ModelConfig, spec: TensorSpec, seed: int) -> npt.NDArray[Any]:
    """The stored bytes of `spec`, flat: uint16 bits for BF16, float32 for F32, uint8 for U8."""
    stream = Stream(seed, spec.name)
    count = math.prod(spec.shape)
    if spec.dtype == "U8":
        return _mxfp4(spec, stream, count)
    values = _float_values(config, spec, stream, count)
    return to_bfloat16(values) if spec.dtype == "BF16" else values


def _mxfp4(spec: TensorSpec, stream: Stream, count: int) -> npt.NDArray[np.uint8]:
    """Uniform codes, and E8M0 scales over three powers of two around the projection's standard deviation."""
    if spec.name.endswith(".weight_packed"):
        return stream.octets(count)
    fan_in = spec.shape[1] * 32
    std = _gain(spec.name) / math.sqrt(fan_in)
    exponent = math.frexp(std / _CODE_RMS)[1] - 1
    steps = np.array([-1, 0, 0, 1], np.int64)[stream.octets(count) & 3]
    return (steps + (127 + exponent)).astype(np.uint8)


def _float_values(config: ModelConfig, spec: TensorSpec, stream: Stream, count: int) -> npt.NDArray[np.float32]:
    tail = spec.name.rsplit(".", 1)[-1]
    if tail == "A_log":
        return _a_log(config, stream, count)
    if tail == "dt_bias":
        low, high = (-6.9, -2.2) if config.gate_lower_bound is None else (-6.5, -0.5)
        return stream.uniforms(count, low, high)
    if tail == "e_score_correction_bias":
        return stream.uniforms(count, -0.05, 0.05)
    if spec.name.endswith(("norm.weight", "norm0.weight", "norm1.weight")):
        return stream.normals(count, 0.1, mean=1.0)
    if spec.name.endswith("conv1d.weight"):
        return stream.normals(count, 1 / math.sqrt(config.conv_width))
    if spec.name.endswith("embed_tokens.weight"):
        return stream.normals(count, 1.0)
    fan_in = math.prod(spec.shape[1:])
    return stream.normals(count, _gain(spec.name) / math.sqrt(fan_in))


def _a_log(config: ModelConfig, stream: Stream, count: int) -> npt.NDArray[np.float32]:
    """Per-head values, zeros in the padding. The softplus form wants rates of 1 to 16, the bounded one about 1."""
    values = np.zeros(count, np.float32)
    low, high = (0.0, 2.75) if config.gate_lower_bound is None else (-0.7, 0.7)
    values[: config.kda_heads] = stream.uniforms(config.kda_heads, low, high)
    return values


def _gain(name: str) -> float:
    return _GAINS.get(name.split(".")[-2], 1.0)
