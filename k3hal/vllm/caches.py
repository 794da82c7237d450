"""vLLM's caches as the model sees them: views into what vLLM allocates, one for each layer."""
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MLAAttentionSpec, get_kv_quant_mode

from k3hal.model.batch import CacheViews
from k3hal.model.config import ModelConfig
from k3hal.vllm.backends import KdaBackend, MlaBackend
from k3hal.vllm.names import KDA_BACKEND
from k3hal.vllm.sizes import CacheDtypes, StateShapes, latent_width, state_shapes


class MlaCache(AttentionLayerBase):
    """The latents of one MLA layer: `kv` [pages, page tokens, width], page stride arbitrary."""

    def __init__(self, width: int, dtype: torch.dtype, on_bind: Callable[[], None]) -> None:
        self.width, self.dtype, self._on_bind = width, dtype, on_bind
        self.kv_cache = torch.empty(0)

    @property
    def kv(self) -> Tensor:
        return self.kv_cache

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take [blocks, 1, block tokens, width], by vLLM's contract."""
        self.kv_cache = kv_cache.squeeze(1).view(self.dtype)
        self._on_bind()

    def get_attn_backend(self) -> type[MlaBackend]:
        return MlaBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> MLAAttentionSpec:
        cache = vllm_config.cache_config
        return MLAAttentionSpec(
            block_size=cache.block_size,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=self.width,
            dtype=torch.uint8 if self.dtype == torch.float8_e4m3fn else self.dtype,
            cache_dtype_str=cache.cache_dtype,
            kv_quant_mode=get_kv_quant_mode(cache.cache_dtype),
        )


class KdaCache(MambaBase):
    """The states of one KDA layer: `kv_cache` is the convolution's window and the recurrent state, by slots."""

    def __init__(self, shapes: StateShapes, dtypes: tuple[torch.dtype, torch.dtype], on_bind: Callable[[], None]):
        self.shapes, self.dtypes, self._on_bind = shapes, dtypes, on_bind
        self.kv_cache: tuple[Tensor, ...] = ()

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        self._on_bind()

    def get_state_shape(self) -> StateShapes:
        return self.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, torch.dtype]:
        return self.dtypes

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum[KDA_BACKEND]

    def get_attn_backend(self) -> type[KdaBackend]:
        return KdaBackend


class Caches:
    """The caches of all layers, under their names in vLLM's forward context. `names[i]` is that of layer i."""

    def __init__(self, cfg: ModelConfig, dtypes: CacheDtypes, tp: int, prefix: str, context: dict[str, Any]) -> None:
        self.cfg, self.dtypes, self.tp = cfg, dtypes, tp
        self.names = [f"{prefix}model.layers.{i}.self_attn" for i in range(cfg.num_layers)]
        self.mla: list[MlaCache] = []
        self.kda: list[KdaCache] = []
        self._views: CacheViews | None = None
        for i, name in enumerate(self.names):
            if name in context:
                raise ValueError(f"two layers are called {name}")
            context[name] = self._kda() if cfg.is_kda(i) else self._mla()

    def _mla(self) -> MlaCache:
        self.mla.append(MlaCache(latent_width(self.cfg), self.dtypes.kv, self._forget))
        return self.mla[-1]

    def _kda(self) -> KdaCache:
        states = (self.dtypes.conv, torch.float32)
        self.kda.append(KdaCache(state_shapes(self.cfg, self.tp), states, self._forget))
        return self.kda[-1]

    def _forget(self) -> None:
        self._views = None

    @property
    def views(self) -> CacheViews:
        """What vLLM has bound."""
        if self._views is None:
            conv, state = zip(*(layer.kv_cache for layer in self.kda), strict=True)
            self._views = CacheViews(kv=tuple(layer.kv for layer in self.mla), conv=conv, state=state)
        return self._views
