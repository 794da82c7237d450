"""Random weights for a checkpoint that behaves: healthy activations, spread router scores, memory of mixed length.

A tensor's kind is the tail of its name. Attention scores and logits have a standard deviation of one to three, and
KDA's decay per token ranges from almost none to strong. Each layer moves the residual stream by a small part of it:
with larger steps a random network is chaotic, and bf16 rounding, through near-tied experts, would part two right
implementations by as much as a fault does.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

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


class Draw(NamedTuple):
    """How the values of one tensor are distributed; `a`, `b` are the parameters that `kind` asks for.

    `normal`: mean, standard deviation. `uniform`: lower and upper bound. `codes`: uniform bytes. `scales`: E8M0 bytes
    over three powers of two around 2^`a`, the middle one as likely as both others. `drawn` values come from the stream,
    the rest of the tensor is zero.
    """

    kind: Literal["normal", "uniform", "codes", "scales"]
    a: float
    b: float
    drawn: int


def draw_of(config: ModelConfig, spec: TensorSpec) -> Draw:
    """The distribution of `spec`, whatever stream of random numbers it is drawn from."""
    count = math.prod(spec.shape)
    if spec.name.endswith(".weight_packed"):
        return Draw("codes", 0, 0, count)
    if spec.dtype == "U8":
        std = _gain(spec.name) / math.sqrt(spec.shape[1] * 32)
        return Draw("scales", math.frexp(std / _CODE_RMS)[1] - 1, 0, count)
    tail = spec.name.rsplit(".", 1)[-1]
    if tail == "A_log":  # the softplus form wants rates of 1 to 16, the bounded one about 1
        return Draw("uniform", *((0.0, 2.75) if config.gate_lower_bound is None else (-0.7, 0.7)), config.kda_heads)
    if tail == "dt_bias":
        return Draw("uniform", *((-6.9, -2.2) if config.gate_lower_bound is None else (-6.5, -0.5)), count)
    if tail == "e_score_correction_bias":
        return Draw("uniform", -0.05, 0.05, count)
    if spec.name.endswith(("norm.weight", "norm0.weight", "norm1.weight")):
        return Draw("normal", 1.0, 0.1, count)
    if spec.name.endswith("conv1d.weight"):
        return Draw("normal", 0.0, 1 / math.sqrt(config.conv_width), count)
    if spec.name.endswith("embed_tokens.weight"):
        return Draw("normal", 0.0, 1.0, count)
    return Draw("normal", 0.0, _gain(spec.name) / math.sqrt(math.prod(spec.shape[1:])), count)


def random_tensor(config: ModelConfig, spec: TensorSpec, seed: int) -> npt.NDArray[Any]:
    """The stored bytes of `spec`, flat: uint16 bits for BF16, float32 for F32, uint8 for U8."""
    stream, draw = Stream(seed, spec.name), draw_of(config, spec)
    if draw.kind == "codes":
        return stream.octets(draw.drawn)
    if draw.kind == "scales":
        steps = np.array([-1, 0, 0, 1], np.int64)[stream.octets(draw.drawn) & 3]
        return (steps + (127 + int(draw.a))).astype(np.uint8)
    values = np.zeros(math.prod(spec.shape), np.float32)
    if draw.kind == "normal":
        values[: draw.drawn] = stream.normals(draw.drawn, draw.b, mean=draw.a)
    else:
        values[: draw.drawn] = stream.uniforms(draw.drawn, draw.a, draw.b)
    return to_bfloat16(values) if spec.dtype == "BF16" else values


def _gain(name: str) -> float:
    return _GAINS.get(name.split(".")[-2], 1.0)
