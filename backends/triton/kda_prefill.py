"""KDA prefill in chunks: what does not depend on the state in one launch, then the states, then the norm."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from k3hal.backends.triton._kda import CHUNK_TILES, laid_out, supports
from k3hal.backends.triton._triton import NEEDS, kernels
from k3hal.dispatch import provides


def _of(**tiles: int) -> Callable[..., Tensor]:
    def kda_prefill(
        qkv: Tensor,
        raw_gate: Tensor,
        beta_logits: Tensor,
        out_gate: Tensor,
        conv_weight: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        norm_weight: Tensor,
        conv_state: Tensor,
        state: Tensor,
        slots: Tensor,
        cu_seqlens: Tensor,
        has_state: Tensor,
        lower_bound: float | None,
        eps: float,
    ) -> Tensor:
        """See the operator. Prepared by `laid_out`."""
        module = kernels("kda_chunk")
        return module.kda_prefill(
            qkv, raw_gate, beta_logits, out_gate, conv_weight, A_log, dt_bias, norm_weight,
            conv_state, state, slots, cu_seqlens, has_state, lower_bound, eps, module.Tiles(**tiles),
        )  # fmt: skip

    return kda_prefill


kda_prefill = provides(
    "kda_prefill", name="chunked", needs=NEEDS, supports=supports, prepare=laid_out, graph_safe=True,
    tactics={name: _of(**tiles) for name, tiles in CHUNK_TILES.items()},
)(_of())  # fmt: skip
