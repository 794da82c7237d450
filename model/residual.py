"""The residual stream: Attention Residuals over depth (spec k3_architecture §4), or the plain pre-norm sum.

A *join* takes the last sublayer's output into the stream and returns the next sublayer's normed input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from k3hal.model.config import ModelConfig
from k3hal.model.context import Build


@dataclass(slots=True)
class Stream:
    """`prefix` [T, D] is the running sum (of the current block under AttnRes), updated in place; `blocks` [B, T, D]
    are the finished blocks' snapshots."""

    prefix: Tensor
    blocks: Tensor | None

    @classmethod
    def start(cls, embedded: Tensor, num_blocks: int) -> Stream:
        blocks = embedded.new_empty(num_blocks, *embedded.shape) if num_blocks else None
        return cls(embedded, blocks)


class Join(Protocol):
    weight: Tensor

    def __call__(self, stream: Stream, delta: Tensor | None) -> Tensor: ...

    def unnormed(self, stream: Stream, delta: Tensor) -> Tensor:
        """The join without its RMSNorm, whose weight is `weight`."""
        ...


class PlainJoin:
    """prefix += delta; RMSNorm(prefix)."""

    def __init__(self, build: Build, norm: str) -> None:
        self.op, self.eps = build.ops.fn("rms_norm"), build.cfg.rms_norm_eps
        self.weight = build.reader.get(norm)

    def __call__(self, stream: Stream, delta: Tensor | None) -> Tensor:
        if delta is None:
            return self.op(stream.prefix, self.weight, self.eps, None)
        return self.op(delta, self.weight, self.eps, stream.prefix)

    def unnormed(self, stream: Stream, delta: Tensor) -> Tensor:
        return stream.prefix.add_(delta)


class AttnResJoin:
    """Take delta in, mix blocks and prefix over depth, store a finished block, RMSNorm the mix.

    `res` names the mix's `_norm` and `_proj` weights; `norm` the RMSNorm after it. `reset` starts a new block with
    delta; `store` appends the prefix, as it was before mixing, to the blocks.
    """

    def __init__(self, build: Build, res: str, norm: str, num_blocks: int, *, reset: bool, store: bool) -> None:
        self.op, self.eps = build.ops.fn("attn_res_mix"), build.cfg.rms_norm_eps
        self.num_blocks, self.reset, self.store = num_blocks, reset, store
        key = build.reader.get(f"{res}_norm.weight", torch.float32)
        self.key_weight = key * build.reader.get(f"{res}_proj.weight", torch.float32).flatten()
        self.weight = build.reader.get(norm)

    def __call__(self, stream: Stream, delta: Tensor | None) -> Tensor:
        return self._mix(stream, delta, self.weight)

    def unnormed(self, stream: Stream, delta: Tensor) -> Tensor:
        return self._mix(stream, delta, None)

    def _mix(self, stream: Stream, delta: Tensor | None, weight: Tensor | None) -> Tensor:
        return self.op(
            stream.prefix, delta, stream.blocks, self.num_blocks, self.reset, self.store,
            self.key_weight, weight, self.eps, self.eps,
        )  # fmt: skip


def attention_join(build: Build, layer: int) -> Join:
    """The join before a layer's attention."""
    norm, size = build.layer_name(layer, "input_layernorm.weight"), build.cfg.attn_res_block_size
    if size is None:
        return PlainJoin(build, norm)
    res = build.layer_name(layer, "self_attention_res")
    return AttnResJoin(build, res, norm, -(-layer // size), reset=False, store=layer % size == 0)


def mlp_join(build: Build, layer: int) -> Join:
    """The join before a layer's MLP."""
    norm, size = build.layer_name(layer, "post_attention_layernorm.weight"), build.cfg.attn_res_block_size
    if size is None:
        return PlainJoin(build, norm)
    res = build.layer_name(layer, "mlp_res")
    return AttnResJoin(build, res, norm, layer // size + 1, reset=layer % size == 0, store=False)


def final_join(build: Build) -> Join:
    """The join after the last layer: without the depth mix here the logits are nonsense."""
    cfg, norm = build.cfg, f"{build.cfg.prefix}norm.weight"
    if cfg.attn_res_block_size is None:
        return PlainJoin(build, norm)
    return AttnResJoin(build, f"{cfg.prefix}output_attn_res", norm, block_count(cfg), reset=False, store=False)


def block_count(cfg: ModelConfig) -> int:
    """How many block snapshots a forward pass stores."""
    size, layers = cfg.attn_res_block_size, cfg.num_layers
    return -(-layers // size) if size else 0
