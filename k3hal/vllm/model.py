"""Kimi K3 and Kimi-Linear as vLLM's model classes: the model text does the work."""
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator

from k3hal.dispatch.runtime import runtime_for
from k3hal.engine.largest import Bounds
from k3hal.errors import UnsupportedError
from k3hal.model.batch import CacheViews
from k3hal.model.generated import GeneratedModel
from k3hal.model.k3 import K3Model
from k3hal.model.requests import PAGE_TOKENS
from k3hal.vllm import limits
from k3hal.vllm.caches import Caches
from k3hal.vllm.dispatch import parallel_of, watched_plan
from k3hal.vllm.sizes import StateShapes, cache_dtypes, scratch_views, state_shapes
from k3hal.vllm.step import StepRows, StepSlots, largest_scratch_steps, layer_batches, scratch_step
from k3hal.vllm.weights import config_of, open_weights, source_of

_log = logging.getLogger("vllm.k3hal")


class KimiLinearForCausalLM(nn.Module):
    """One rank of the text model. It has no parameters that vLLM knows of: the weights belong to the operators."""

    is_hybrid: ClassVar[Literal[True]] = True
    has_inner_state: ClassVar[Literal[True]] = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        """Raises `UnsupportedError` for options there is no support for, and what making a dispatch plan raises."""
        super().__init__()
        limits.check(vllm_config)
        self.source = source_of(vllm_config)
        self.cfg = self.source.config
        if not (self.cfg.kda_layers and self.cfg.mla_layers):
            raise UnsupportedError(
                "the model has layers of one kind only; in vLLM k3hal takes those with KDA and MLA",
                hint="k3hal serve does",
            )
        model, cache = vllm_config.model_config, vllm_config.cache_config
        self.dtypes = cache_dtypes(model.dtype, cache.cache_dtype)
        self.device = torch.device(vllm_config.device_config.device)
        self.parallel = parallel_of(vllm_config)
        self.parallel.check(self.cfg)
        self.watch = watched_plan(self.cfg, vllm_config, self.dtypes, self.parallel)
        context = vllm_config.compilation_config.static_forward_context
        self.caches = Caches(self.cfg, self.dtypes, self.parallel.world, prefix, context)
        scheduler = vllm_config.scheduler_config
        self.bounds = Bounds(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, model.max_model_len)
        self._untried = True
        self._model: K3Model | None = None
        if isinstance(self.source, GeneratedModel):  # nobody calls `load_weights` then
            self.load_weights(())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Read the weights by K3HAL's loader, which takes each once and in the form an operator wants it.

        vLLM's own iterator, `weights`, is left alone: it reads nothing before it is asked, and from when it is asked
        vLLM counts what loading takes, so that its own line on that means nothing.
        """
        dtype, begin = self.dtypes.conv, time.perf_counter()
        with torch.inference_mode(), open_weights(self.source, self.device, dtype) as reader:
            ops = self.watch.bind(runtime_for(self.watch.plan.device).beside)
            self._model = K3Model.load(self.cfg, ops, reader, device=self.device, dtype=dtype, parallel=self.parallel)
        _log.info("%s read by k3hal in %.1f s", self.source.name, time.perf_counter() - begin)
        return set()

    @property
    def model(self) -> K3Model:
        assert self._model is not None, "no weights are loaded"
        return self._model

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """[T] to [T, D]."""
        return self.model.embed(input_ids.long(), self.model.embedding)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, D] before the final norm; advances the caches vLLM has bound.

        No layer uses a position. Without metadata vLLM measures memory: the step is one prompt in caches of its own,
        and on an accelerator, the first time, the steps that need most of it are tried before.
        """
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return self._try_out(input_ids)
        steps = [metadata[name] for name in self.caches.names]
        batches = layer_batches(input_ids.long(), steps)
        with self.watch.step(input_ids.shape[0]):
            return self.model.forward_unnormed(batches[0].token_ids, batches, self.caches.views)

    def _try_out(self, input_ids: Tensor) -> Tensor:
        tokens = input_ids.shape[0]
        pages = -(-tokens // PAGE_TOKENS)
        views = scratch_views(self.cfg, self.dtypes, self.parallel.world, pages, self.device)
        # A CPU's cache is as large as its user says, whatever steps take; there the longest ones take minutes.
        if self._untried and self.device.type != "cpu" and tokens >= self.bounds.max_num_batched_tokens:
            self._untried = False
            for count, rows, slots in largest_scratch_steps(self.bounds, pages, PAGE_TOKENS, self.device):
                self._run(input_ids[:count], views, rows, slots)
        return self._run(input_ids, views, *scratch_step([0], [tokens], pages, pages, PAGE_TOKENS, self.device))

    def _run(self, input_ids: Tensor, views: CacheViews, rows: StepRows, slots: StepSlots) -> Tensor:
        steps = [slots if self.cfg.is_kda(i) else rows for i in range(self.cfg.num_layers)]
        batches = layer_batches(input_ids.long(), steps)
        return self.model.forward_unnormed(batches[0].token_ids, batches, views)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """fp32 logits [R, vocab] of rows [R, D] of what `forward` gave; the final norm is here."""
        return self.model.logits(self.model.normed(hidden_states))

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> StateShapes:
        return state_shapes(config_of(vllm_config), vllm_config.parallel_config.tensor_parallel_size)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, torch.dtype]:
        return vllm_config.model_config.dtype, torch.float32

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, Any]:
        """How a block's window and state are copied to the next block: as those of vLLM's own KDA."""
        return MambaStateCopyFuncCalculator.kda_state_copy_func()

    @classmethod
    def get_mamba_state_copy_funcs(cls, mamba_types: set[Any]) -> dict[Any, tuple[Any, Any]]:
        return dict.fromkeys(mamba_types, cls.get_mamba_state_copy_func())


class KimiK3ForConditionalGeneration(KimiLinearForCausalLM):
    """Kimi K3's text model; its vision tower is left out, so it takes no images."""
