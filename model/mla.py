"""Gated NoPE multi-head latent attention (spec k3_architecture §3)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from k3hal.model.batch import CacheViews, StepBatch
from k3hal.model.context import ALIGNED_ROWS, Build


class MLA:
    """One MLA layer. The 64 unrotated channels are cached and scored; nothing carries a position.

    `index` is the layer's position among MLA layers, which is where its latents live in the cache.
    """

    def __init__(self, build: Build, layer: int, index: int) -> None:
        cfg, reader, column = build.cfg, build.reader, build.parallel.column()
        self.index = index
        self.heads, self.rank, self.rope = build.parallel.local(cfg.num_heads), cfg.kv_lora_rank, cfg.qk_rope_head_dim
        self.nope, self.value, self.latent_eps = cfg.qk_nope_head_dim, cfg.v_head_dim, cfg.latent_norm_eps
        self.scale = (self.nope + self.rope) ** -0.5
        self.norm = build.ops.fn("rms_norm")
        self.insert = build.ops.fn("mla_cache_insert", layer)
        self.prefill = build.ops.fn("mla_prefill", layer, "prefill")
        self.decode = build.ops.fn("mla_decode", layer, "decode")
        self.gate = build.ops.fn("sigmoid_gate", layer) if cfg.mla_output_gate else None

        def name(part: str) -> str:
            return build.layer_name(layer, f"self_attn.{part}.weight")

        queries = self.heads * (self.nope + self.rope)
        first = ("q_a_proj", cfg.q_lora_rank) if cfg.q_lora_rank else ("q_proj", queries)
        parts = [first, ("kv_a_proj_with_mqa", self.rank + self.rope)]
        if self.gate:
            parts.append(("g_proj", self.heads * self.value))
        self.split = [n for _, n in parts[1:]]
        self.split = [first[1], self.rank, self.rope, *self.split[1:]]
        rows = [n for _, n in parts]
        whole = [name("q_a_proj"), name("kv_a_proj_with_mqa")]
        fused = build.fuse_rows([name(p) for p, _ in parts], rows, cfg.hidden_size, ALIGNED_ROWS, whole)
        self.split.append(fused.shape[0] - sum(rows))
        self.in_proj = build.linear(fused)
        self.q_norm = reader.get(name("q_a_layernorm")) if cfg.q_lora_rank else None
        self.q_b = build.linear(reader.get(name("q_b_proj"), shard=column)) if cfg.q_lora_rank else None
        self.kv_norm = reader.get(name("kv_a_layernorm"))
        up = reader.get(name("kv_b_proj"), shard=column).view(self.heads, self.nope + self.value, self.rank)
        self.w_uk, self.w_uv = up[:, : self.nope], up[:, self.nope :]
        # Decoding absorbs both into the query and the output, each in the layout its provider wants.
        self.head_linear = build.ops.fn("head_linear", layer, "decode")
        prepare = partial(build.ops.prepare, "head_linear", layer, "decode")
        self.absorb, self.expand = prepare(weight=self.w_uk.mT)["weight"], prepare(weight=self.w_uv)["weight"]
        self.o_proj = build.summed(build.linear(reader.get(name("o_proj"), shard=build.parallel.row())))

    def __call__(self, x: Tensor, batch: StepBatch, cache: CacheViews) -> Tensor:
        """x [T, D], normed, to [T, D]; inserts the latents of every row before any is attended to."""
        q, latent, k_pe, *gate, _ = self.in_proj(x).split(self.split, dim=-1)
        if self.q_b is not None:
            q = self.q_b(self.norm(q, self.q_norm, self.latent_eps, None))
        q = q.view(x.shape[0], self.heads, self.nope + self.rope)
        kv = cache.kv[self.index]
        self.insert(self.norm(latent, self.kv_norm, self.latent_eps, None), k_pe, kv, batch.kv_rows)
        decodes, outs = batch.num_decodes, []
        split = decodes + batch.num_verify_rows
        if batch.decode:
            outs.append(self._decode(q[:decodes], kv, batch.decode.page_table, batch.decode.seq_lens))
        if batch.verify:
            outs.append(self._decode(q[decodes:split], kv, batch.verify.row_tables, batch.verify.row_lens))
        if batch.prefill:
            p = batch.prefill
            spans = (p.page_table, p.cu_seqlens, p.context_lens)
            outs.append(self.prefill(q[split:], kv, *spans, self.w_uk, self.w_uv, self.scale))
        out = (outs[0] if len(outs) == 1 else torch.cat(outs)).flatten(1)
        if self.gate:
            out = self.gate(out, gate[0])
        return self.o_proj(out)

    def _decode(self, q: Tensor, kv: Tensor, page_table: Tensor, seq_lens: Tensor) -> Tensor:
        """Absorbed attention: queries go to latent space, and the latent result comes back up; [N, H, V].

        A draft is a row that sees one token more than the row before it: all are in the cache by now.
        """
        absorbed = torch.empty(q.shape[0], self.heads, self.rank + self.rope, dtype=q.dtype, device=q.device)
        absorbed[..., : self.rank] = self.head_linear(q[..., : self.nope], self.absorb)
        absorbed[..., self.rank :] = q[..., self.nope :]
        latent = self.decode(absorbed, kv, page_table, seq_lens, self.scale, self.rank)
        return self.head_linear(latent, self.expand)
