"""Shapes and dtypes of the caches, from the model's config and vLLM's options. Knows no vLLM."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3hal.errors import UnsupportedError
from k3hal.model.batch import CacheViews
from k3hal.model.config import ModelConfig
from k3hal.model.requests import PAGE_TOKENS

StateShapes = tuple[tuple[int, int], tuple[int, int, int]]

_KV_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class CacheDtypes:
    """Dtypes of the latents and of the convolutions' windows; recurrent states are fp32."""

    kv: torch.dtype
    conv: torch.dtype


def cache_dtypes(activations: torch.dtype, kv_cache_dtype: str) -> CacheDtypes:
    """Of a model that computes in `activations`; `kv_cache_dtype` in vLLM's words. Raises `UnsupportedError`."""
    if activations not in (torch.bfloat16, torch.float32):
        raise UnsupportedError(f"dtype {activations} is not supported", hint="use --dtype bfloat16 or float32")
    kv = activations if kv_cache_dtype == "auto" else _KV_DTYPES.get(kv_cache_dtype)
    if kv is None or (kv == torch.bfloat16 and activations == torch.float32):
        hint = f"use auto or fp8 with --dtype {str(activations).removeprefix('torch.')}"
        raise UnsupportedError(f"kv cache dtype {kv_cache_dtype} is not supported", hint=hint)
    return CacheDtypes(kv, activations)


def latent_width(cfg: ModelConfig) -> int:
    """Channels of a token's entry in the latent cache."""
    return cfg.kv_lora_rank + cfg.qk_rope_head_dim


def state_shapes(cfg: ModelConfig, tp: int) -> StateShapes:
    """One slot of one KDA layer on one of `tp` ranks: the convolution's window [W - 1, 3 H K], the state [H, V, K]."""
    heads, dim = cfg.kda_heads // tp, cfg.kda_head_dim
    return (cfg.conv_width - 1, 3 * heads * dim), (heads, dim, dim)


def scratch_views(cfg: ModelConfig, dtypes: CacheDtypes, tp: int, num_pages: int, device: torch.device) -> CacheViews:
    """Caches of so many pages and one slot, besides the null page and slot; all layers of a kind share them."""
    conv, state = state_shapes(cfg, tp)
    kda, mla = len(cfg.kda_layers), cfg.num_layers - len(cfg.kda_layers)
    kv = torch.zeros(1 + num_pages, PAGE_TOKENS, latent_width(cfg), device=device).to(dtypes.kv)
    return CacheViews(
        kv=(kv,) * mla,
        conv=(torch.zeros(2, *conv, dtype=dtypes.conv, device=device),) * kda,
        state=(torch.zeros(2, *state, dtype=torch.float32, device=device),) * kda,
    )
