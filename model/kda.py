"""Kimi Delta Attention (spec k3_architecture §2)."""

from __future__ import annotations

import torch
from torch import Tensor

from k3hal.model.batch import CacheViews, StepBatch
from k3hal.model.context import ALIGNED_ROWS, Build
from k3hal.model.drafts import Drafts


class KDA:
    """One KDA layer: fused input projection, the coarse operator per phase, output projection.

    `index` is the layer's position among KDA layers, which is where its states live in the cache.
    """

    def __init__(self, build: Build, layer: int, index: int) -> None:
        cfg, reader = build.cfg, build.reader
        self.index = index
        self.heads, self.head_dim = build.parallel.local(cfg.kda_heads), cfg.kda_head_dim
        self.lower_bound, self.eps = cfg.gate_lower_bound, cfg.rms_norm_eps
        self.prefill = build.ops.fn("kda_prefill", layer, "prefill")
        self.decode = build.ops.fn("kda_decode", layer, "decode")

        def name(part: str) -> str:
            return build.layer_name(layer, f"self_attn.{part}")

        width = self.heads * self.head_dim
        gate = ("g_proj", width) if cfg.full_rank_gate else ("g_a_proj", cfg.kda_head_dim)
        parts = [("q_proj", width), ("k_proj", width), ("v_proj", width), gate]
        parts += [("f_a_proj", cfg.kda_head_dim), ("b_proj", self.heads)]
        self.split = [3 * width, gate[1], cfg.kda_head_dim, self.heads]
        names, rows = [name(f"{p}.weight") for p, _ in parts], [n for _, n in parts]
        whole = [name("f_a_proj.weight"), name("g_a_proj.weight")]
        fused = build.fuse_rows(names, rows, cfg.hidden_size, ALIGNED_ROWS, whole)
        self.split.append(fused.shape[0] - sum(rows))
        self.in_proj = build.linear(fused)
        column = build.parallel.column()
        self.f_b = build.linear(reader.get(name("f_b_proj.weight"), shard=column))
        self.g_b = None if cfg.full_rank_gate else build.linear(reader.get(name("g_b_proj.weight"), shard=column))
        conv_weight = torch.empty(3 * width, cfg.conv_width, dtype=torch.float32, device=build.device)
        for part, letter in zip(conv_weight.unsqueeze(1).split(width), "qkv", strict=True):
            reader.fill(part, name(f"{letter}_conv1d.weight"), shard=column)
        small = {
            "conv_weight": conv_weight,
            # Stored longer than the head count (padding) or as [1, 1, H, 1]: only the first H entries mean anything.
            "A_log": reader.get(name("A_log"), torch.float32).flatten()[build.parallel.own(cfg.kda_heads)].contiguous(),
            "dt_bias": reader.get(name("dt_bias"), torch.float32, shard=column).view(self.heads, self.head_dim),
            "norm_weight": reader.get(name("o_norm.weight"), torch.float32),
        }
        # A provider may lay these out anew, so each phase has its own; in the operators' argument order.
        prefill = build.ops.prepare("kda_prefill", layer, "prefill", **small)
        decode = build.ops.prepare("kda_decode", layer, "decode", **small)
        self.prefill_weights, self.decode_weights = (tuple(w[key] for key in small) for w in (prefill, decode))
        self.o_proj = build.summed(build.linear(reader.get(name("o_proj.weight"), shard=build.parallel.row())))
        self.drafts = Drafts(build, layer, self, small) if build.ops.has("kda_verify", layer, "verify") else None

    def __call__(self, x: Tensor, batch: StepBatch, cache: CacheViews) -> Tensor:
        """x [T, D], normed, to [T, D]; advances the states of every sequence but those that verify drafts."""
        qkv, z, f_a, beta, _ = self.in_proj(x).split(self.split, dim=-1)
        shape = (x.shape[0], self.heads, self.head_dim)
        raw_gate = self.f_b(f_a).view(shape)
        out_gate = (z if self.g_b is None else self.g_b(z)).view(shape)
        conv, state = cache.conv[self.index], cache.state[self.index]
        inputs, decodes, outs = (qkv, raw_gate, beta, out_gate), batch.num_decodes, []
        split = decodes + batch.num_verify_rows
        if batch.decode:
            rows = inputs if decodes == x.shape[0] else tuple(t[:decodes] for t in inputs)
            outs.append(
                self.decode(*rows, *self.decode_weights, conv, state, batch.decode.slots, self.lower_bound, self.eps)
            )
        if batch.verify:
            if self.drafts is None:
                raise RuntimeError("the batch has drafts, and the model was built without what verifies them")
            rows = tuple(t[decodes:split] for t in inputs)
            outs.append(self.drafts.verify(rows, batch.verify, conv, state))
        if batch.prefill:
            rows = inputs if split == 0 else tuple(t[split:] for t in inputs)
            spans = (batch.prefill.slots, batch.prefill.cu_seqlens, batch.prefill.has_state)
            outs.append(self.prefill(*rows, *self.prefill_weights, conv, state, *spans, self.lower_bound, self.eps))
        return self.o_proj(outs[0] if len(outs) == 1 else torch.cat(outs))
