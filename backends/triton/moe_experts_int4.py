"""Routed experts with int4 weights: codes are decoded in registers, on their way to bfloat16 tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from k3hal.backends.triton._experts import Cut, Shape
from k3hal.backends.triton._int4 import pack
from k3hal.backends.triton._triton import NEEDS, kernels, runs
from k3hal.backends.triton.moe_experts_mxfp4 import fitting
from k3hal.dispatch import provides

CUT = Cut(
    few=(Shape(64, 128, 4, 3), Shape(64, 128, 2, 3)),
    some=(Shape(64, 128, 4, 3), Shape(64, 128, 4, 3)),
    many=(Shape(64, 128, 4, 3), Shape(128, 128, 4, 3)),
    tallest=64,  # A group's sums stand beside those of all, in registers.
)


def _packed(w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor) -> Mapping[str, Any]:
    (first, first_scale), (second, second_scale) = pack(w13, w13_scale), pack(w2, w2_scale)
    return {"w13": first, "w13_scale": first_scale, "w2": second, "w2_scale": second_scale}


def _cut(cut: Cut) -> Callable[..., Tensor]:
    def moe_experts_int4(
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
            x, ids, weights, w13, w13_scale, w2, w2_scale, activation, (beta, linear_beta), mine, format="int4"
        )

    return moe_experts_int4


def _narrow(cut: Cut) -> Cut:
    gate, down = cut.few
    return replace(cut, few=(replace(gate, rows=32, warps=2), replace(down, rows=32, warps=2)))


moe_experts_int4 = provides(
    "moe_experts_int4",
    name="grouped",
    needs=NEEDS,
    supports=runs,
    prepare=_packed,
    graph_safe=True,
    tactics={
        "narrow": _cut(_narrow(CUT)),
        "sorted": _cut(replace(CUT, direct=0)),
        "tall": _cut(replace(CUT, tallest=128)),
    },
)(_cut(CUT))
