"""Judges outputs by the tolerance policy: contract first, then three numbers against caps and the peer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from k3hal.debug.golden import Golden
from k3hal.debug.verdict import Status, TensorNumbers
from k3hal.dispatch.operator import Operator
from k3hal.dispatch.tolerance import Comparison, ToleranceClass, caps_of, compare, rounding

WARN_RATIO, FAIL_RATIO = 2.0, 4.0
"""Against the peer's error, or the floor if larger: above the first a warning, above the second a failure."""


def judge(
    operator: Operator,
    args: Mapping[str, Any],
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    peer: Mapping[str, Tensor] | None = None,
) -> tuple[TensorNumbers, ...]:
    """Every output of `expected` judged. `peer` are the outputs of the CPU provider on the same case."""
    out = []
    for name, golden in expected.items():
        dtype = expected.dtypes[name] if isinstance(expected, Golden) else golden.dtype
        tolerance, caps = caps_of(operator.outputs[name], dtype, args)
        if name not in actual:
            out.append(TensorNumbers(name, tolerance, "Fail", problem="missing"))
            continue
        caps = caps.beyond_rounding(rounding(golden, dtype))
        got = compare(actual[name], golden)
        error = compare(peer[name], golden).tensor if peer and name in peer else None
        problem = _dtype_problem(actual[name], dtype) or got.problem
        status, why = ("Fail", problem) if problem else _within(got, caps, error)
        out.append(TensorNumbers(name, tolerance, status, got.tensor, got.slice, got.peak, error, why))
    return tuple(out)


def _dtype_problem(actual: Tensor, wanted: torch.dtype) -> str:
    return "" if actual.dtype is wanted else f"dtype {actual.dtype}, the contract says {wanted}"


def _within(got: Comparison, caps: ToleranceClass, peer: float | None) -> tuple[Status, str]:
    if caps.exact:
        return ("Pass", "") if got.peak == 0.0 else ("Fail", f"not bit-exact: peak {got.peak:.3g}")
    for name in ("tensor", "slice", "peak"):
        value, cap = getattr(got, name), getattr(caps, name)
        if value > cap:
            return "Fail", f"{name} {value:.3g} is above its cap {cap:.3g}"
    if peer is not None:
        ratio = got.tensor / max(peer, caps.floor)
        if ratio > WARN_RATIO:
            status: Status = "Fail" if ratio > FAIL_RATIO else "QualityWarning"
            return status, f"tensor {got.tensor:.3g} is {ratio:.1f} times the CPU provider's (or the floor)"
    return "Pass", ""
