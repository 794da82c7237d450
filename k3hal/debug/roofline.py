"""Draws timings under the machine's measured roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from k3hal.debug.bench import Timing
from k3hal.debug.ceilings import Ceilings
from k3hal.errors import InputError, UnsupportedError


def save_roofline(timings: Sequence[Timing], ceilings: Mapping[str, Ceilings], title: str, path: Path) -> list[Path]:
    """Write `path` with the suffixes .png and .svg: a point for each timing, a line for each
    dtype: FLOP/s over FLOPs per byte.

    Raises `UnsupportedError` without matplotlib, or when no timing has FLOPs to show; `InputError` for an unwritable
    place.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError("--plot needs matplotlib", hint="install k3hal[plot]") from None
    shown = [t for t in timings if t.seconds and t.flops and t.bytes]
    if not shown:
        raise UnsupportedError("nothing to plot", hint="no timed case has both FLOPs and bytes")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    intensities = [t.flops / t.bytes for t in shown]
    ridges = [limit.flops_per_s / limit.bytes_per_s for limit in ceilings.values()]
    left, right = min([*intensities, *ridges]) / 4, max([*intensities, *ridges]) * 4
    for (dtype, limit), ridge in zip(ceilings.items(), ridges, strict=True):
        line = [left, ridge, right]
        axes.plot(line, [min(limit.flops_per_s, x * limit.bytes_per_s) for x in line], label=f"{dtype}, measured")
    for provider in dict.fromkeys(t.verdict.provider for t in shown):
        mine = [t for t in shown if t.verdict.provider == provider]
        axes.scatter(
            [t.flops / t.bytes for t in mine], [t.flops / (t.seconds or 1) for t in mine], label=provider, s=24
        )
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="FLOP/s", title=title)
    axes.legend()
    axes.grid(True, which="both", alpha=0.2)
    files = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    try:
        for file in files:
            figure.savefig(file)
    except OSError as error:
        raise InputError(f"{path}: the picture cannot be written: {error.strerror or error}") from error
    return files
