"""The router's choice: one program a row; the best k are taken one by one, of equal scores the lowest expert first."""

# Triton types what it iterates over as an iterator without an end.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _route(
    logits, bias, weights, ids, logits_stride, experts, scale,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < experts
    scores = 1 / (1 + tl.exp(-tl.load(logits + row * logits_stride + at, live, 0.0)))
    # Floats as integers of the same order (0.0 makes -0.0 the same as 0.0), all above what is no choice.
    bits = (scores + tl.load(bias + at, live, 0.0) + 0.0).to(tl.int32, bitcast=True)
    none: tl.constexpr = -(2**31)
    key = tl.where(live, tl.maximum(tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), none + 1), none)
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.min(tl.where(key == tl.max(key, 0), at, BLOCK), 0)
        chosen = tl.where(slot == i, best, chosen)
        key = tl.where(at == best, none, key)
    # Read again: to pick them out of `scores` takes another sum over all experts for each.
    taken = tl.load(logits + row * logits_stride + chosen, slot < TOP_K, 0.0)
    taken = tl.where(slot < TOP_K, 1 / (1 + tl.exp(-taken)), 0.0)
    if RENORMALIZE:
        taken = tl.div_rn(taken, tl.zeros([SLOTS], tl.float32) + (tl.sum(taken, 0) + 1e-20))
    tl.store(weights + row * TOP_K + slot, taken * scale, slot < TOP_K)
    tl.store(ids + row * TOP_K + slot, chosen, slot < TOP_K)


def moe_route(
    logits: Tensor, bias: Tensor, top_k: int, renormalize: bool, scale: float, warps: int
) -> tuple[Tensor, Tensor]:
    """See the operator."""
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    if tokens:
        _route[(tokens,)](
            logits, bias, weights, ids, logits.stride(0), experts, scale,
            top_k, triton.next_power_of_2(top_k), renormalize, triton.next_power_of_2(experts), num_warps=warps,
        )  # fmt: skip
    return weights, ids
