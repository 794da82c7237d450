"""Tolerance classes and the three numbers every output is judged by (conformance policy P1-P3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MARGIN = 1.5
"""No cap is below this many times what rounding alone explains."""


@dataclass(frozen=True, slots=True)
class ToleranceClass:
    """Caps on `tensor`, `slice` and `peak`, and the `floor` that rounding explains. `exact` asks for equal bits.

    `measured` are the three largest numbers of references and CPU providers over all samples a CPU holds, outputs of at
    least 1,000 elements; `where` says in what. `python -m k3hal.debug.floors` measures them anew.
    """

    floor: float
    tensor: float
    slice: float
    peak: float
    exact: bool = False
    measured: tuple[float, float, float] = (0.0, 0.0, 0.0)
    where: str = ""

    def beyond_rounding(self, ideal: Comparison) -> ToleranceClass:
        """The class for a golden that rounding alone, once and to the nearest, takes `ideal` away from itself.

        Caps are made for many elements of like size. Where a few large ones decide, one rounding may be a third of a
        cap or all of it; no cap is below `_MARGIN` times that.
        """
        own = {name: max(getattr(self, name), _MARGIN * getattr(ideal, name)) for name in ("tensor", "slice", "peak")}
        return self if self.exact else replace(self, **own)


CLASSES: dict[str, ToleranceClass] = {
    "fp32": ToleranceClass(
        1.5e-6, 1e-5, 1e-4, 1e-3,
        measured=(1.5e-6, 2.7e-5, 8.0e-6),
        where="linear and linear_fp32 at K = 7168 (5.6e-7 up to K = 3584); slice kda_chunk at the gate's bound",
    ),
    "fp32_state": ToleranceClass(
        1e-6, 1e-5, 1e-4, 1e-3,
        measured=(2.3e-7, 2.7e-6, 4.0e-6),
        where="kda_prefill, T = 70, open gates; slice kda_decode",
    ),
    "norm": ToleranceClass(
        0.0017, 0.003, 0.012, 0.03,
        measured=(0.00175, 0.0031, 0.033),
        where="one rounding to bf16: causal_conv1d; slice and peak silu_and_mul, whose largest value is 16 RMS",
    ),
    "matmul": ToleranceClass(
        0.0017, 0.005, 0.016, 0.05,
        measured=(0.0018, 0.0031, 0.029),
        where="one rounding to bf16: kda_prefill, T = 70 and 98; peak kda_chunk, T = 70",
    ),
    "kda_state": ToleranceClass(
        1e-6, 0.002, 0.01, math.inf,
        measured=(2.1e-7, 3.7e-7, 2.5e-6),
        where="kda_chunk, T = 70, open gates",
    ),
    "kda_layer_state": ToleranceClass(
        2e-4, 0.002, 0.01, math.inf,
        measured=(9.4e-7, 4.4e-6, 2.5e-5),
        where="kda_prefill, T = 70, open gates; 1.2e-4 in 1 of 1500 seeds of kda_decode, see `_STATES`",
    ),
    "exact": ToleranceClass(0.0, 0.0, 0.0, 0.0, exact=True),
}  # fmt: skip
MIN_SLICE = 32
_STATE_TOKENS, _STATE_CAP = 1000, 0.01
_MOST_TOKENS, _MOST_ELEMENTS = 1 << 20, 1 << 31
_STEP_CAP = 0.001
"""Of a state moved a token at a time, in a bf16 call: rounded to bf16 it would be off by 0.0017."""
_STATES = ("kda_state", "kda_layer_state")
"""Of the second what goes in is rounded to the activation dtype inside, by the convolution: one value that falls on
the other side is 1e-4 of a small state."""


def caps_of(tolerance: str, output: torch.dtype, args: Mapping[str, Any]) -> tuple[str, ToleranceClass]:
    """The class that judges an output of class `tolerance` and dtype `output` in a call, and its caps there.

    What is not rounded to a narrow dtype is judged as fp32, whatever the operator: `norm` and `matmul` outputs in
    fp32, and states where all that goes in is fp32 too. A state's caps grow with the root of the longest sequence.
    """
    import torch

    name = tolerance
    if output is torch.float32 and tolerance in ("norm", "matmul"):
        name = "fp32"
    elif tolerance in _STATES and all(a.dtype is torch.float32 for a in _floats(args)):
        name = "fp32_state"
    caps, cu_seqlens = CLASSES[name], args.get("cu_seqlens")
    if name in _STATES and cu_seqlens is None:
        return name, replace(caps, tensor=_STEP_CAP)
    if tolerance not in _STATES or cu_seqlens is None or cu_seqlens.numel() < 2:
        return name, caps
    growth = max(1.0, math.sqrt(int((cu_seqlens[1:] - cu_seqlens[:-1]).max()) / _STATE_TOKENS))
    growth = min(growth, _STATE_CAP / caps.tensor)
    return name, replace(caps, tensor=caps.tensor * growth, slice=caps.slice * growth, peak=caps.peak * growth)


def may_judge(declared: str, used: str) -> bool:
    """Whether `caps_of` may take class `used` for an output that declares another: only a stricter one."""
    stricter = {"fp32": ("norm", "matmul"), "fp32_state": _STATES}
    return used == declared or declared in stricter.get(used, ())


def rounding_at_most(golden: Tensor, dtype: torch.dtype) -> Comparison:
    """The most that `rounding` can give for any values of a golden's shape: half a step of each, relative to itself."""
    import torch

    if not golden.numel():
        return Comparison(0.0, 0.0, 0.0)
    unit = torch.finfo(dtype).eps / 2
    # One element may hold all of an RMS: its rounding is then sqrt(elements) of it.
    if golden.dtype is not dtype:
        return Comparison(unit, unit, unit * math.sqrt(golden.numel()))
    half = dtype in (torch.bfloat16, torch.float16)
    return Comparison(0.0, 0.0, 2 * unit * math.sqrt(golden.numel()) / _MARGIN if half else 0.0)


def loosest(name: str) -> ToleranceClass:
    """The loosest caps and floor that a class may have, whatever a call's values: for who does not know them.

    A state's grow with the longest sequence, all with what one rounding to the output's dtype may cost.
    """
    caps = CLASSES[name]
    if caps.exact:
        return caps
    unit = 2.0**-24 if name in ("fp32", "fp32_state") else 2.0**-8  # half a step of bf16, the coarsest dtype
    growth = 1.0
    if name in (*_STATES, "fp32_state"):
        growth = min(math.sqrt(_MOST_TOKENS / _STATE_TOKENS), _STATE_CAP / caps.tensor)
    # One element may hold all of an RMS: its rounding is then sqrt(elements) of it.
    most = Comparison(unit, unit, 2 * unit * math.sqrt(_MOST_ELEMENTS) / _MARGIN)
    grown = {key: getattr(caps, key) * growth for key in ("tensor", "slice", "peak")}
    return replace(caps, **grown, floor=max(caps.floor, unit)).beyond_rounding(most)


def _floats(args: Mapping[str, Any]) -> list[Tensor]:
    import torch

    return [value for value in args.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]


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


def rounding(golden: Tensor, dtype: torch.dtype, head: int = 0) -> Comparison:
    """What rounding a golden to `dtype` costs it.

    One of that dtype has been rounded itself: a value near the middle of a step goes to either end of it, so that two
    good results can lie a whole step apart. Few elements do; only the peak sees one.
    """
    if golden.dtype is not dtype:
        return compare(golden.to(dtype), golden, head)
    return Comparison(0.0, 0.0, _step_at_most(golden))


def _step_at_most(rounded: Tensor) -> float:
    """The step between neighbours at the largest finite value, by the RMS, so that `beyond_rounding` allows one.

    0 in fp32 and fp64, whose steps no cap is near.
    """
    import torch

    if rounded.dtype not in (torch.bfloat16, torch.float16):
        return 0.0
    values = torch.where(torch.isfinite(rounded), rounded, 0.0).double()
    if not values.any():
        return 0.0
    step = torch.finfo(rounded.dtype).eps * 2.0 ** (math.frexp(values.abs().max().item())[1] - 1)
    return step / float(values.square().mean().sqrt()) / _MARGIN


def compare(actual: Tensor, golden: Tensor, head: int = 0) -> Comparison:
    """Judge `actual` against `golden` (same shape; golden may be wider). Non-finite masks must agree.

    Slices are rows (all leading dims flattened) and last-axis columns of at least 32 elements, their RMS floored at
    1e-3 of the tensor's. `head` is the width of one head where a row holds several: each is a slice of its own.
    """
    import torch

    if actual.shape != golden.shape:
        return Comparison(math.inf, math.inf, math.inf, f"shape {tuple(actual.shape)}, expected {tuple(golden.shape)}")
    if actual.numel() == 0 or _same_bits(actual, golden):
        return Comparison(0.0, 0.0, 0.0)
    a, g = actual.detach().double(), golden.detach().double()
    finite = torch.isfinite(golden.to(actual.dtype).double())
    if not torch.equal(torch.isfinite(a), finite):
        return Comparison(math.inf, math.inf, math.inf, "non-finite values differ from the golden's")
    odd = (torch.where(finite, 0.0, value.to(actual.dtype).double()) for value in (a, golden))
    if not torch.equal(*(value.nan_to_num(0.0) for value in odd)):
        return Comparison(math.inf, math.inf, math.inf, "NaN and the infinities differ from the golden's")
    zero = torch.zeros((), dtype=torch.float64, device=g.device)
    error, g = torch.where(finite, a - g, zero), torch.where(finite, g, zero)
    rms = float(g.square().mean().sqrt())
    if rms == 0.0:
        worst = float(error.abs().max())
        return Comparison(worst, worst, worst)
    rows_e, rows_g = (t.reshape(-1, t.shape[-1]) if t.ndim else t.reshape(1, 1) for t in (error, g))
    worst = max(_worst_slice(rows_e, rows_g, axis, rms) for axis in (0, 1))
    if head:
        worst = max(worst, _worst_slice(rows_e.reshape(-1, head), rows_g.reshape(-1, head), 1, rms))
    return Comparison(float(error.square().mean().sqrt()) / rms, worst, float(error.abs().max()) / rms)


def _same_bits(actual: Tensor, golden: Tensor) -> bool:
    """Whether there is nothing to compare: an arena is large, and comparing copies it several times."""
    import torch

    if actual.dtype is not golden.dtype or actual.is_complex():
        return False
    # One element counts as contiguous whatever its stride, with which it is no row of bytes.
    dense = (tensor.detach().contiguous() for tensor in (actual, golden))
    a, g = (tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in dense)
    return a.device == g.device and torch.equal(a, g)


def _worst_slice(error: Tensor, golden: Tensor, axis: int, rms: float) -> float:
    """The largest error along an axis of rows; 0 where the slices are too short to say."""
    if error.shape[axis] < MIN_SLICE:
        return 0.0
    below = golden.square().mean(axis).sqrt().clamp_min(1e-3 * rms)
    return float((error.square().mean(axis).sqrt() / below).max())
