"""Judges outputs by the tolerance policy: contract first, then three numbers against caps and the peer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from k3hal.debug.golden import Golden
from k3hal.debug.verdict import Status, TensorNumbers
from k3hal.dispatch.operator import Operator
from k3hal.dispatch.tolerance import Comparison, ToleranceClass, caps_of, compare, rounding, rounding_at_most

WARN_RATIO, FAIL_RATIO = 2.0, 4.0
"""Against the peer's error, or the floor if larger: above the first a warning, above the second a failure."""


def judge(
    operator: Operator,
    args: Mapping[str, Any],
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    peer: Mapping[str, Tensor] | None = None,
    *,
    alone: bool = False,
) -> tuple[TensorNumbers, ...]:
    """Every output of `expected` judged. `peer` are the outputs of the CPU provider on the same case.

    `alone` says that there can be no peer, as for the CPU provider itself: the floors judge in its place.
    """
    actual = _settled(operator, args, actual, expected)
    return tuple(_judged(operator, args, name, actual, expected, peer or {}, alone) for name in expected)


def _judged(
    operator: Operator,
    args: Mapping[str, Any],
    name: str,
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    peer: Mapping[str, Tensor],
    alone: bool,
) -> TensorNumbers:
    golden, dtype = expected[name], _contract_dtype(expected, name)
    tolerance, caps = caps_in_force(operator, args, name, expected)
    if name not in actual:
        return TensorNumbers(name, tolerance, "Fail", problem="missing")
    head = _head(operator, args, name, dtype)
    got = compare(actual[name], golden, head)
    error = compare(peer[name], golden, head).tensor if name in peer else None
    problem = _dtype_problem(actual[name], dtype) or got.problem
    status, why = ("Fail", problem) if problem else status_of(got, caps, error, alone=alone)
    broken = status == "Fail" and not got.passes(caps)
    if broken and (not problem or got.problem) and (where := largest_error(actual[name], golden)):
        why += f"; {where}"
    limits = (caps.tensor, caps.slice, caps.peak)
    return TensorNumbers(name, tolerance, status, got.tensor, got.slice, got.peak, error, why, limits, caps.floor)


def caps_in_force(
    operator: Operator, args: Mapping[str, Any], name: str, expected: Mapping[str, Tensor]
) -> tuple[str, ToleranceClass]:
    """The class that judges an output and its caps and floor there: none is below what rounding `expected` explains."""
    dtype = _contract_dtype(expected, name)
    tolerance, caps = caps_of(operator.outputs[name], dtype, args)
    return tolerance, _beyond(caps, rounding(expected[name], dtype, _head(operator, args, name, dtype)))


def loosest_caps(
    operator: Operator, args: Mapping[str, Any], name: str, expected: Mapping[str, Tensor]
) -> ToleranceClass:
    """The loosest that `caps_in_force` can be for other values of the same shapes and dtypes."""
    dtype = _contract_dtype(expected, name)
    _, caps = caps_of(operator.outputs[name], dtype, args)
    return _beyond(caps, rounding_at_most(expected[name], dtype))


def _beyond(caps: ToleranceClass, ideal: Comparison) -> ToleranceClass:
    return caps if caps.exact else replace(caps.beyond_rounding(ideal), floor=max(caps.floor, ideal.tensor))


def _head(operator: Operator, args: Mapping[str, Any], name: str, dtype: torch.dtype) -> int:
    """The width of one head where each is judged by itself, else 0."""
    # In fp32 a whole row's cap sees 1e-3 in one head of 96; a head alone may be all cancellation.
    apart = name in operator.heads and dtype is not torch.float32
    return args[operator.heads[name]].shape[-1] if apart else 0


def status_of(got: Comparison, caps: ToleranceClass, peer: float | None, *, alone: bool) -> tuple[Status, str]:
    """The status that three numbers have under the caps in force, and why it is no Pass. `peer` and `alone` are as in
    `judge`: the error of the CPU provider, and whether the floor judges in its place."""
    status, why = _within(got, caps)
    if status == "Pass" and not caps.exact and (alone or peer is not None):
        return _ratio(got.tensor, max(peer or 0.0, caps.floor))
    return status, why


def _settled(
    operator: Operator, args: Mapping[str, Any], actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """The outputs, ties settled where they can be."""
    comparable = all(
        name in actual and actual[name].shape == golden.shape and actual[name].dtype is _contract_dtype(expected, name)
        for name, golden in expected.items()
    )
    # Only a golden knows its arguments' outputs whole: other pairs may be parts of them.
    if operator.settle_ties is None or not comparable or not isinstance(expected, Golden):
        return actual
    return operator.settle_ties(args, actual, expected)


def _contract_dtype(expected: Mapping[str, Tensor], name: str) -> torch.dtype:
    return expected.dtypes[name] if isinstance(expected, Golden) else expected[name].dtype


def _dtype_problem(actual: Tensor, wanted: torch.dtype) -> str:
    return "" if actual.dtype is wanted else f"dtype {actual.dtype}, the contract says {wanted}"


def largest_error(actual: Tensor, golden: Tensor) -> str:
    """Where the largest error is and what stands there, in words; what is finite on one side only comes first."""
    if actual.shape != golden.shape or not actual.numel() or not actual.ndim:
        return ""
    a, g = actual.detach().double(), golden.detach().double()
    error = (a - g).abs().nan_to_num(torch.inf, torch.inf)
    error[(a == g) | (a.isnan() & g.isnan())] = 0.0
    at = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
    return f"at {at} it is {float(a[tuple(at)]):.6g} for {float(g[tuple(at)]):.6g}"


def _within(got: Comparison, caps: ToleranceClass) -> tuple[Status, str]:
    if caps.exact:
        return ("Pass", "") if got.peak == 0.0 else ("Fail", f"not bit-exact: peak {got.peak:.3g}")
    for name in ("tensor", "slice", "peak"):
        value, cap = getattr(got, name), getattr(caps, name)
        if value > cap:
            return "Fail", f"{name} {value:.3g} is above its cap {cap:.3g}"
    return "Pass", ""


def _ratio(error: float, against: float) -> tuple[Status, str]:
    ratio = error / against
    if ratio <= WARN_RATIO:
        return "Pass", ""
    status: Status = "Fail" if ratio > FAIL_RATIO else "QualityWarning"
    return status, f"tensor {error:.3g} is {ratio:.1f} times the CPU provider's (or the floor)"
