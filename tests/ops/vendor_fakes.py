"""Vendor libraries as their sources describe them, in plain torch: what they are called with decides what they do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from k3hal.backends.nvidia import deep_gemm, fla, flash_kda, flash_mla, triton_kernels
from k3hal.dispatch.library import Function, loaded
from k3hal.dispatch.ops._kda import delta_step
from k3hal.dispatch.ops.kda_gate import kda_gate
from k3hal.dispatch.ops.mx_dequantize import mx_dequantize

from .flashinfer_fakes import FLASHINFER, dense, latent_attention, sequences

TILE = 16


@contextmanager
def installed(fakes: dict[Function, Callable[..., Any]]) -> Iterator[list[dict[str, Any]]]:
    """Modules with these functions in place of the real ones; gives the arguments of every call as they come."""
    calls: list[dict[str, Any]] = []
    try:
        with pytest.MonkeyPatch.context() as patch:
            for function, fake in fakes.items():
                if function.module not in sys.modules:
                    patch.setitem(sys.modules, function.module, ModuleType(function.module))
                owner, _, name = function.name.rpartition(".")
                module = sys.modules[function.module]
                holder = attrgetter(owner)(module) if owner else module
                patch.setattr(holder, name, _strict(function, fake, calls), raising=False)
            loaded.cache_clear()
            yield calls
    finally:
        loaded.cache_clear()


def _strict(function: Function, fake: Callable[..., Any], calls: list[dict[str, Any]]) -> Callable[..., Any]:
    """`fake` under the recorded signature: an argument that is not in it, or one that lacks, is an error."""
    signature = function.records[-1].signature

    def call(**arguments: Any) -> Any:
        signature.bind(**arguments)
        calls.append(arguments)
        return fake(**arguments)

    call.__signature__ = signature
    return call


def fla_recurrent(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, inplace_final_state: bool,
    state_v_first: bool, ssm_state_indices: Tensor, use_qk_l2norm_in_kernel: bool, out: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One token of each of B sequences. Slot 0 is a slot like any other."""
    dense(q, k, v, g, beta, out)
    assert inplace_final_state and state_v_first and use_qk_l2norm_in_kernel and q.shape[1] == 1
    for n, slot in enumerate(ssm_state_indices.tolist()):
        new, _, row = delta_step(initial_state[slot], q[n, 0], k[n, 0], v[n, 0], g[n, 0], beta[n, 0])
        initial_state[slot], out[n, 0] = new, row.to(out.dtype)
    return out, initial_state


def fla_chunk(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, output_final_state: bool,
    use_qk_l2norm_in_kernel: bool, safe_gate: bool, state_v_first: bool, cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rows of no sequence stay unwritten, and states of empty ones too."""
    dense(q, k, v, g, beta, initial_state)
    assert q.shape[0] == 1 and cu_seqlens.dtype is torch.int64 and initial_state.dtype is torch.float32
    assert output_final_state and use_qk_l2norm_in_kernel and state_v_first and isinstance(safe_gate, bool)
    out, final = torch.full_like(v, torch.nan), torch.full_like(initial_state, torch.nan)
    sequences(
        out[0], final, initial_state, cu_seqlens, lambda s, t: delta_step(s, *(x[0, t] for x in (q, k, v, g, beta)))
    )
    return out, final


def flash_kda_fwd(
    *, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, out: Tensor, A_log: Tensor,
    dt_bias: Tensor, lower_bound: float, initial_state: Tensor, final_state: Tensor, cu_seqlens: Tensor,
) -> None:  # fmt: skip
    """Raw gate and logits in, bf16 out, both results in the caller's memory."""
    dense(q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, cu_seqlens)
    assert {x.dtype for x in (q, k, v, g, beta, out)} == {torch.bfloat16} and cu_seqlens.dtype is torch.int64
    assert scale == q.shape[-1] ** -0.5 and -5 <= lower_bound <= 0
    decay, write = kda_gate(g[0], beta[0], A_log, dt_bias, lower_bound)
    sequences(
        out[0], final_state, initial_state, cu_seqlens,
        lambda s, t: delta_step(s, q[0, t], k[0, t], v[0, t], decay[t], write[t]),
    )  # fmt: skip


def flash_mla_decode(
    *, q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, head_dim_v: int,
    tile_scheduler_metadata: Any, softmax_scale: float, causal: bool,
) -> tuple[Tensor, None]:  # fmt: skip
    """q [B, 1, H, D], cache [P, page, 1, D]; a plan serves one call."""
    assert q.shape[1] == 1 and k_cache.shape[2] == 1 and not causal
    assert not tile_scheduler_metadata.used
    tile_scheduler_metadata.used = True
    return latent_attention(q, k_cache[:, :, 0], block_table, cache_seqlens, softmax_scale, head_dim_v), None


def deep_gemm_product(*, a: Tensor, b: Tensor, d: Tensor, grouped_layout: Tensor) -> None:
    """Every tile of rows belongs to one expert, its last rows maybe to none, which are left unwritten."""
    dense(a, b, d, grouped_layout)
    assert a.shape[0] % TILE == 0 and grouped_layout.dtype is torch.int32
    d.fill_(torch.nan)
    for first in range(0, a.shape[0], TILE):
        kinds = grouped_layout[first : first + TILE]
        experts = set(kinds[kinds >= 0].tolist())
        assert len(experts) <= 1, "two experts in one tile"
        for expert in experts:
            rows = first + (kinds >= 0).nonzero().flatten()
            d[rows] = (a[rows].float() @ b[expert].float().T).to(d.dtype)


def ragged(*, slice_sizes: Tensor, n_total_rows: int) -> Any:
    """Sizes of the slices, in order."""
    assert slice_sizes.dtype is torch.int32 and int(slice_sizes.sum()) <= n_total_rows
    return SimpleNamespace(sizes=slice_sizes.tolist(), rows=n_total_rows)


def triton_kernels_product(
    *, a: Tensor, b: Tensor, bias: None, a_ragged_metadata: Any, gather_indx: Tensor | None, precision_config: Any
) -> Tensor:
    """b [E, K / 2, N] with K inner in memory; rows after the last slice are left unwritten."""
    scale = precision_config.b_mx_scale
    assert b.stride(-2) == 1 and scale.stride(-2) == 1 and bias is None
    x = a if gather_indx is None else a[gather_indx.long()]
    out = torch.full((a_ragged_metadata.rows, b.shape[2]), torch.nan, dtype=precision_config.out_dtype)
    first = 0
    for expert, size in enumerate(a_ragged_metadata.sizes):
        codes, scales = b[expert].t().contiguous(), scale[expert].t().contiguous()
        weight = mx_dequantize(codes, scales, torch.float32)
        out[first : first + size] = (x[first : first + size].float() @ weight.T).to(out.dtype)
        first += size
    return out


FAKES: dict[Function, Callable[..., Any]] = {
    **FLASHINFER,
    fla.RECURRENT: fla_recurrent,
    fla.CHUNK: fla_chunk,
    flash_kda.FORWARD: flash_kda_fwd,
    flash_mla.METADATA: lambda: (SimpleNamespace(used=False), None),
    flash_mla.DECODE: flash_mla_decode,
    deep_gemm.ALIGNMENT: lambda: TILE,
    deep_gemm.PRODUCT: deep_gemm_product,
    triton_kernels.RAGGED: ragged,
    triton_kernels.PRECISION: SimpleNamespace,
    triton_kernels.PRODUCT: triton_kernels_product,
}
