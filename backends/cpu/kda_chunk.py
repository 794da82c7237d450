"""The gated delta rule on CPU in chunks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from k3hal.backends._kda_chunks import CHUNK, OTHER_CHUNKS, in_chunks
from k3hal.dispatch import provides


def _of_length(length: int) -> Callable[..., Tensor]:
    def kda_chunk(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        slots: Tensor,
        cu_seqlens: Tensor,
        has_state: Tensor,
    ) -> Tensor:
        """See the operator."""
        return in_chunks(length, q, k, v, g, beta, state, slots, cu_seqlens, has_state)

    return kda_chunk


kda_chunk = provides("kda_chunk", name="chunked", tactics={f"chunk{n}": _of_length(n) for n in OTHER_CHUNKS})(
    _of_length(CHUNK)
)
