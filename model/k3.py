"""Kimi K3 and Kimi-Linear: the whole model, written once against operators."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from k3hal.dispatch.plan import BoundOps
from k3hal.model.batch import CacheViews, StepBatch
from k3hal.model.config import ModelConfig
from k3hal.model.context import Build, Reader
from k3hal.model.kda import KDA
from k3hal.model.mla import MLA
from k3hal.model.moe import MoE, dense_mlp
from k3hal.model.parallel import ParallelPlan
from k3hal.model.residual import Stream, attention_join, block_count, final_join, mlp_join


class Layer:
    """Attention then MLP, each fed by a join of the residual stream."""

    def __init__(self, build: Build, layer: int) -> None:
        cfg = build.cfg
        kda_before = sum(cfg.is_kda(i) for i in range(layer))
        self.before_attention = attention_join(build, layer)
        self.attention = KDA(build, layer, kda_before) if cfg.is_kda(layer) else MLA(build, layer, layer - kda_before)
        self.before_mlp = mlp_join(build, layer)
        self.mlp = MoE(build, layer) if cfg.is_moe(layer) else dense_mlp(build, layer)

    def __call__(self, stream: Stream, delta: Tensor | None, batch: StepBatch, cache: CacheViews) -> Tensor:
        delta = self.attention(self.before_attention(stream, delta), batch, cache)
        return self.mlp(self.before_mlp(stream, delta))


class K3Model:
    """The model on one rank. All state is in the cache it is given, but for drafts between `forward` and `commit`."""

    def __init__(self, build: Build) -> None:
        cfg = build.cfg
        self.cfg, self.num_blocks = cfg, block_count(cfg)
        self.embed = build.ops.fn("embed")
        self.embedding = build.reader.get(f"{cfg.prefix}embed_tokens.weight")
        self.layers = [Layer(build, i) for i in range(cfg.num_layers)]
        self.final = final_join(build)
        self.norm = build.ops.fn("rms_norm")
        part = build.parallel.vocabulary(cfg.vocab_size)
        self.head = build.linear(build.reader.get(cfg.lm_head_name, shard=part), op="linear_fp32")
        self.put_together = build.parallel.put_together if part else None

    @classmethod
    def load(
        cls,
        cfg: ModelConfig,
        ops: BoundOps,
        reader: Reader,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        parallel: ParallelPlan | None = None,
    ) -> K3Model:
        """Read every weight once, fused as the operators want. `dtype` is the activation and dense-weight dtype.

        Raises `UnsupportedError` for a model that does not divide over the ranks of `parallel`.
        """
        parallel = parallel or ParallelPlan()
        parallel.check(cfg)
        return cls(Build(cfg, ops, reader, torch.device(device), dtype, parallel))

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: CacheViews, aux_layers: Collection[int] = ()) -> Tensor:
        """Hidden states [T, D] after the final norm; advances the cache."""
        return self.forward_with_aux(batch, cache, aux_layers)[0]

    @torch.inference_mode()
    def forward_with_aux(
        self, batch: StepBatch, cache: CacheViews, aux_layers: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Also the raw residual stream [T, D] after each of `aux_layers`, which a DSpark draft reads (spec §8.3)."""
        stream, delta, aux = self._run(batch.token_ids, [batch] * len(self.layers), cache, aux_layers)
        return self.final(stream, delta), aux

    @torch.inference_mode()
    def forward_unnormed(self, token_ids: Tensor, batches: Sequence[StepBatch], cache: CacheViews) -> Tensor:
        """Hidden states [T, D] before the final norm, which `normed` applies; advances the cache.

        `batches` has the step as each layer sees it: where layers keep their states in different slots.
        """
        stream, delta, _ = self._run(token_ids, batches, cache, ())
        return self.final.unnormed(stream, delta)

    def _run(
        self, token_ids: Tensor, batches: Sequence[StepBatch], cache: CacheViews, aux_layers: Collection[int]
    ) -> tuple[Stream, Tensor, dict[int, Tensor]]:
        """All layers, but not the final join."""
        stream = Stream.start(self.embed(token_ids, self.embedding), self.num_blocks)
        delta, aux = None, {}
        for i, (layer, batch) in enumerate(zip(self.layers, batches, strict=True)):
            delta = layer(stream, delta, batch, cache)
            if i in aux_layers:
                aux[i] = stream.prefix + delta
        assert delta is not None
        return stream, delta, aux

    @torch.inference_mode()
    def commit(self, batch: StepBatch, cache: CacheViews, kept: Tensor) -> None:
        """Leave the states of the sequences of `batch.verify` as after the first `kept` int32 [N] of their new tokens.

        To be called once after each `forward` over such a batch. Their KV is there whatever is kept.
        """
        assert batch.verify is not None
        for layer in self.layers:
            if isinstance(layer.attention, KDA) and layer.attention.drafts is not None:
                index = layer.attention.index
                layer.attention.drafts.commit(kept, batch.verify, cache.conv[index], cache.state[index])

    @torch.inference_mode()
    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm of rows [R, D] of `forward_unnormed`."""
        return self.norm(hidden, self.final.weight, self.cfg.rms_norm_eps, None)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Final-normed hidden [R, D] to fp32 logits [R, vocab]."""
        logits = self.head(hidden)
        return logits if self.put_together is None else self.put_together(logits)
