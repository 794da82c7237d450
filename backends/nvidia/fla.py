"""The gated delta rule by flash-linear-attention's Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from k3hal.backends.nvidia._library import PRIORITY
from k3hal.dispatch import Answer, Call, Fault, Needs, provides
from k3hal.dispatch.library import recorded, unless, usable
from k3hal.dispatch.transforms import KeptNullSlot, gathered_states, live_rows, transformed, write_back, zeros_elsewhere

# 0.6.0 renamed the state's layout flag; what it takes has changed in every minor release.
NEEDS = Needs(packages={"fla-core": ">=0.6,<0.7", "triton": ">=3.3"}, dtypes=("bfloat16",), min_arch=80)
RECURRENT = recorded(
    __name__, "fla-core", "fla.ops.kda.fused_recurrent:fused_recurrent_kda_fwd",
    (
        "q", "k", "v", "g", "beta", "initial_state", "inplace_final_state", "state_v_first", "ssm_state_indices",
        "use_qk_l2norm_in_kernel", "out",
    ),
)  # fmt: skip
CHUNK = recorded(
    __name__, "fla-core", "fla.ops.kda.chunk:chunk_kda",
    (
        "q", "k", "v", "g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "safe_gate",
        "state_v_first", "cu_seqlens",
    ),
)  # fmt: skip
# Both are of forward kernels of chunks, on the B200.
CHUNK_FAULTS = (
    Fault(
        "https://github.com/fla-org/flash-linear-attention/issues/639",
        "chunk_kda reads memory that is not its own",
        arch=("sm_100", "sm_103"),
    ),
    Fault(
        "https://github.com/fla-org/flash-linear-attention/issues/913",
        "chunks' products are NaN from 1024 programs on",
        packages={"fla-core": "<=0.5", "triton": "<=3.7.0"},
        arch=("sm_100", "sm_103"),
    ),
)


def _head_dim(call: Call) -> str | None:
    dim = int(call.dims.get("head_dim") or 128)
    return unless(dim <= 256 and dim & (dim - 1) == 0, f"needs head_dim a power of two up to 256, this is {dim}")


def _supports_recurrent(call: Call) -> Answer:
    return usable(call, (RECURRENT,), _head_dim(call))


def _supports_chunk(call: Call) -> Answer:
    return usable(call, (CHUNK,), _head_dim(call))


@provides("kda_recurrent", name="fla", needs=NEEDS, supports=_supports_recurrent, priority=PRIORITY, graph_safe=True)
@transformed(KeptNullSlot(("state",)))
def kda_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor) -> Tensor:
    """See the operator. The library has no null slot."""
    rows = (x.unsqueeze(1).contiguous() for x in (q, k, v, g, beta))
    q, k, v, g, beta = rows
    out = torch.empty_like(v)
    RECURRENT(
        q=q, k=k, v=v, g=g, beta=beta, initial_state=state, inplace_final_state=True, state_v_first=True,
        ssm_state_indices=slots, use_qk_l2norm_in_kernel=True, out=out,
    )  # fmt: skip
    return zeros_elsewhere(slots != 0, out.squeeze(1))


def _chunk(*, bounded: bool) -> Callable[..., Tensor]:
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
        """See the operator. States are gathered and put back; the library leaves padding rows unwritten."""
        rows = [x.unsqueeze(0).contiguous() for x in (q, k, v, g, beta)]
        out, final = CHUNK(
            q=rows[0], k=rows[1], v=rows[2], g=rows[3], beta=rows[4],
            initial_state=gathered_states(state, slots, has_state), output_final_state=True,
            use_qk_l2norm_in_kernel=True, safe_gate=bounded, state_v_first=True, cu_seqlens=cu_seqlens.long(),
        )  # fmt: skip
        write_back(state, final, slots, cu_seqlens)
        return zeros_elsewhere(live_rows(cu_seqlens, slots, q.shape[0]), out.squeeze(0))

    return kda_chunk


def _tactics(call: Call) -> Mapping[str, Callable[..., Tensor]]:
    """Decays that are bounded may be taken out of a chunk's products."""
    return {"safe_gate": _chunk(bounded=True)} if call.dims.get("bounded") else {}


# It makes a list of chunks on the host, from lengths that it fetches.
kda_chunk = provides(
    "kda_chunk",
    name="fla",
    needs=NEEDS,
    supports=_supports_chunk,
    priority=PRIORITY,
    tactics=_tactics,
    faults=CHUNK_FAULTS,
)(_chunk(bounded=False))
