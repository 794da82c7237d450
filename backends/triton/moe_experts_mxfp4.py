"""Routed experts with MXFP4 weights: codes are decoded in registers, on their way to bfloat16 tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from k3hal.backends.triton._experts import PACKED, Cut, other_cuts
from k3hal.backends.triton._mxfp4 import pack
from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.dispatch import provides
from k3hal.dispatch.packages import INSTALLED

TALLEST = 64
"""Choices of a tile where 128 do not compile."""


@cache
def tall_tiles_compile(arch: str, triton: str) -> bool:
    """Triton before 3.9 gives sums of 128 by 128 all of Blackwell's tensor memory, and makes a kernel that does nothing
    of a product whose weights want some of it too, without a word (3.6.0, 3.7.1 and 3.8.0 for sm_100)."""
    return not arch.startswith("sm_10") or Version(triton) >= Version("3.9")


def fitting(cut: Cut, device: torch.device) -> Cut:
    """The cut, with tiles that compile for the device."""
    from k3hal.backends.triton.kernels.programs import arch

    fits = tall_tiles_compile(arch(device), INSTALLED["triton"])
    return cut if fits else replace(cut, tallest=min(cut.tallest, TALLEST))


def packed(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> Mapping[str, Any]:
    """Both stacks in blocks, codes apart from scales; as many bytes as before but for a K that is not in 128s."""
    (first, first_scale), (second, second_scale) = pack(w13, w13_scale), pack(w2, w2_scale)
    return {"w13": first, "w13_scale": first_scale, "w2": second, "w2_scale": second_scale}


def _cut(cut: Cut) -> Callable[..., Tensor]:
    def moe_experts_mxfp4(
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        w13: Tensor,
        w13_scale: Tensor,
        w2: Tensor,
        w2_scale: Tensor,
        activation: str,
        beta: float,
        linear_beta: float,
    ) -> Tensor:
        """See the operator. The activation is rounded to x dtype between the GEMMs."""
        mine = fitting(cut, x.device)
        return kernels("experts").sum_of_experts(
            x, ids, weights, w13, w13_scale, w2, w2_scale, activation, (beta, linear_beta), mine, format="mxfp4"
        )

    return moe_experts_mxfp4


moe_experts_mxfp4 = provides(
    "moe_experts_mxfp4",
    name="grouped",
    needs=NEEDS,
    supports=runs,
    prepare=packed,
    graph_safe=True,
    mxfp4="w4a16",
    tactics={name: _cut(cut) for name, cut in other_cuts(PACKED).items()},
)(_cut(PACKED))
