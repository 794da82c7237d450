"""Tolerance classes and the three numbers every output is judged by (conformance policy P1-P3)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ToleranceClass:
    """Caps on `tensor`, `slice` and `peak`, and the `floor` that rounding explains. `exact` asks for equal bits."""

    floor: float
    tensor: float
    slice: float
    peak: float
    exact: bool = False

    def beyond_rounding(self, ideal: Comparison) -> ToleranceClass:
        """The class for a golden that rounding alone, once and to the nearest, takes `ideal` away from itself.

        Caps are made for many elements of like size. Where a few large ones decide, one rounding may be a third of a
        cap or all of it; no cap is below 1.5 times that.
        """
        own = {name: max(getattr(self, name), 1.5 * getattr(ideal, name)) for name in ("tensor", "slice", "peak")}
        return self if self.exact else replace(self, **own)


CLASSES: dict[str, ToleranceClass] = {
    "fp32": ToleranceClass(1e-7, 1e-5, 1e-4, 1e-3),
    "norm": ToleranceClass(0.0017, 0.003, 0.012, 0.03),
    "matmul": ToleranceClass(0.0017, 0.005, 0.016, 0.05),
    "kda_state": ToleranceClass(1e-6, 0.002, 0.01, math.inf),
    "fp8_cache": ToleranceClass(0.026, 0.04, 0.08, 0.2),
    "exact": ToleranceClass(0.0, 0.0, 0.0, 0.0, exact=True),
}
MIN_SLICE = 32


@dataclass(frozen=True, slots=True)
class Comparison:
    """RMS error over RMS of the golden: whole tensor, worst row or column, and the largest single error."""

    tensor: float
    slice: float
    peak: float
    problem: str = ""

    def passes(self, tolerance: ToleranceClass) -> bool:
        if self.problem:
            return False
        if tolerance.exact:
            return self.peak == 0.0
        return self.tensor <= tolerance.tensor and self.slice <= tolerance.slice and self.peak <= tolerance.peak


def rounding(golden: Tensor, dtype: torch.dtype) -> Comparison:
    """What rounding a golden to `dtype` costs it; nothing where it is of that dtype."""
    return Comparison(0.0, 0.0, 0.0) if golden.dtype is dtype else compare(golden.to(dtype), golden)


def compare(actual: Tensor, golden: Tensor) -> Comparison:
    """Judge `actual` against `golden` (same shape; golden may be wider). Non-finite masks must agree.

    Slices are rows (all leading dims flattened) and last-axis columns of at least 32 elements, their RMS floored at
    1e-3 of the tensor's.
    """
    import torch

    if actual.shape != golden.shape:
        return Comparison(math.inf, math.inf, math.inf, f"shape {tuple(actual.shape)}, expected {tuple(golden.shape)}")
    if actual.numel() == 0:
        return Comparison(0.0, 0.0, 0.0)
    a, g = actual.detach().double(), golden.detach().double()
    finite = torch.isfinite(golden.to(actual.dtype))
    if not torch.equal(torch.isfinite(a), finite):
        return Comparison(math.inf, math.inf, math.inf, "non-finite values differ from the golden's")
    zero = torch.zeros((), dtype=torch.float64)
    error, g = torch.where(finite, a - g, zero), torch.where(finite, g, zero)
    rms = float(g.square().mean().sqrt())
    if rms == 0.0:
        worst = float(error.abs().max())
        return Comparison(worst, worst, worst)
    rows_e, rows_g = (t.reshape(-1, t.shape[-1]) if t.ndim else t.reshape(1, 1) for t in (error, g))
    worst = 0.0
    for axis in (0, 1):
        if rows_e.shape[axis] >= MIN_SLICE:
            below = rows_g.square().mean(axis).sqrt().clamp_min(1e-3 * rms)
            worst = max(worst, float((rows_e.square().mean(axis).sqrt() / below).max()))
    return Comparison(float(error.square().mean().sqrt()) / rms, worst, float(error.abs().max()) / rms)
