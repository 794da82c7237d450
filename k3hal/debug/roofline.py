"""Draws timings under the machine's measured roofline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from k3hal.debug.bench import Timing
from k3hal.debug.ceilings import Ceilings
from k3hal.debug.figures import save_figure
from k3hal.errors import UnsupportedError

_MARKERS = "osD^vP"
_NUMBER_SIZE = 7.5
_ROW_INCHES, _LETTER_INCHES = 0.165, 0.066
"""Of the list beside the picture, a row for each case."""


def save_roofline(timings: Sequence[Timing], ceilings: Mapping[str, Ceilings], title: str, path: Path) -> list[Path]:
    """Write `path` with the suffixes .png and .svg: FLOP/s over FLOPs per byte.

    A line for each dtype, named with its ceilings; a point for each timing, coloured by provider and shaped by dtype;
    a number at each case's points, and beside the picture what that case is and each provider's share of the roofline.

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
    cases = dict.fromkeys(t.verdict.case for t in sorted(shown, key=lambda t: (_dtype_of(t, ceilings), _intensity(t))))
    numbers = {case: number for number, case in enumerate(cases, 1)}
    providers = list(dict.fromkeys(t.verdict.provider for t in shown))
    height, width = max(5.5, 0.8 + _ROW_INCHES * (len(numbers) + 2)), _list_width(numbers, providers)
    figure = Figure(figsize=(8 + width, height), dpi=110, layout="constrained")
    axes, beside = figure.subplots(1, 2, width_ratios=[8, width])
    colours = {provider: f"C{n % 10}" for n, provider in enumerate(providers)}
    _draw_ceilings(axes, shown, ceilings)
    _draw_points(axes, shown, ceilings, colours)
    axes.set(title=title)
    figure.draw_without_rendering()
    _name_slope(axes, ceilings)
    _draw_numbers(axes, shown, numbers)
    _draw_list(beside, shown, numbers, colours)
    return save_figure(figure, path)


def _intensity(timing: Timing) -> float:
    return timing.flops / timing.bytes


def _speed(timing: Timing) -> float:
    return timing.flops / (timing.seconds or 1.0)


def _dtype_of(timing: Timing, ceilings: Mapping[str, Ceilings]) -> str:
    """The dtype, which a case's id ends in, before its seed."""
    return next((d for d in ceilings if f"-{d}" in timing.verdict.case), next(iter(ceilings)))


def _rate(value: float, unit: str) -> str:
    """`4.10 TB/s`."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}/s"
    return f"{value:.3g} {unit}/s"


def _draw_ceilings(axes: Any, shown: Sequence[Timing], ceilings: Mapping[str, Ceilings]) -> None:
    """A slope of bytes/s and a flat of FLOP/s for each dtype, each named where it is."""
    from matplotlib.ticker import EngFormatter

    ridges = [limit.flops_per_s / limit.bytes_per_s for limit in ceilings.values()]
    intensities = [*map(_intensity, shown), *ridges]
    left, right = min(intensities) / 2.5, max(intensities) * 4
    for (dtype, limit), ridge, style in zip(ceilings.items(), ridges, ("-", "--", "-.", ":") * 2, strict=False):
        xs = [left, ridge, right]
        ys = [min(limit.flops_per_s, x * limit.bytes_per_s) for x in xs]
        axes.plot(xs, ys, style, color="0.35", linewidth=1.4, label=f"ceilings, {dtype}")
        axes.annotate(
            f"{dtype} matmul {_rate(limit.flops_per_s, 'FLOP')}", (right, limit.flops_per_s), (-4, 4),
            textcoords="offset points", ha="right", va="bottom", fontsize=8, color="0.25",
        )  # fmt: skip
    fastest = max(limit.flops_per_s for limit in ceilings.values())
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(min(map(_speed, shown)) / 2.5, 2.5 * fastest))
    axes.set(xlabel="FLOPs per byte of the case (least work)", ylabel="speed")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(EngFormatter("FLOP/s"))
    axes.grid(True, which="major", alpha=0.35)
    axes.grid(True, which="minor", alpha=0.12)


def _name_slope(axes: Any, ceilings: Mapping[str, Ceilings]) -> None:
    """The bytes/s of the copies, along the line that they are."""
    copies = sorted(limit.bytes_per_s for limit in ceilings.values())
    low, high = (_rate(value, "B") for value in (copies[0], copies[-1]))
    begin = axes.get_xlim()[0] * 1.1
    (x0, y0), (x1, y1) = axes.transData.transform([(x, x * copies[-1]) for x in (begin, begin * 1.1)])
    axes.annotate(
        f"copy {high}" if low == high else f"copy {low} to {high}", (begin, begin * copies[-1]), (0, 5),
        textcoords="offset points", va="bottom", fontsize=8, color="0.25",
        rotation=math.degrees(math.atan2(y1 - y0, x1 - x0)), rotation_mode="anchor",
    )  # fmt: skip


def _draw_points(
    axes: Any, shown: Sequence[Timing], ceilings: Mapping[str, Ceilings], colours: Mapping[str, str]
) -> None:
    for provider, (dtype, marker) in product(colours, zip(ceilings, _MARKERS * 2, strict=False)):
        mine = [t for t in shown if t.verdict.provider == provider and _dtype_of(t, ceilings) == dtype]
        if mine:
            style = {"marker": marker, "color": colours[provider], "s": 26, "zorder": 3}
            axes.scatter([*map(_intensity, mine)], [*map(_speed, mine)], label=f"{provider}, {dtype}", **style)
    axes.legend(fontsize=8, loc="best")


def _draw_numbers(axes: Any, shown: Sequence[Timing], numbers: Mapping[str, int]) -> None:
    """Each case's number above its fastest point, or beside it where another number is."""
    best: dict[str, Timing] = {}
    for timing in shown:
        known = best.get(timing.verdict.case)
        if known is None or _speed(timing) > _speed(known):
            best[timing.verdict.case] = timing
    taken: list[tuple[float, float]] = []
    scale = axes.figure.dpi / 72
    for case, timing in sorted(best.items(), key=lambda item: _intensity(item[1])):
        x, y = axes.transData.transform((_intensity(timing), _speed(timing)))
        places = [(dx, dy) for dy in (9, 19, -11, 29, -21, 39, 49, 59) for dx in (0, 12, -12)]
        free = next((p for p in places if _free(x + p[0] * scale, y + p[1] * scale, taken, scale)), places[0])
        taken.append((x + free[0] * scale, y + free[1] * scale))
        line = {"arrowstyle": "-", "linewidth": 0.4, "color": "0.6"} if max(map(abs, free)) > 12 else None
        axes.annotate(
            str(numbers[case]), (_intensity(timing), _speed(timing)), free, textcoords="offset points",
            ha="center", va="center", fontsize=_NUMBER_SIZE, arrowprops=line, zorder=4,
        )  # fmt: skip


def _free(x: float, y: float, taken: Sequence[tuple[float, float]], scale: float) -> bool:
    return all(abs(x - a) > 11 * scale or abs(y - b) > 9.5 * scale for a, b in taken)


def _columns(numbers: Mapping[str, int], providers: Iterable[str]) -> list[float]:
    """Where the columns of the list end, in inches: the cases', then each provider's."""
    words = [max(map(len, map(_short, numbers))) + 5, *(max(len(provider), 6) + 3 for provider in providers)]
    return list(accumulate(_LETTER_INCHES * letters for letters in words))


def _list_width(numbers: Mapping[str, int], providers: Iterable[str]) -> float:
    return max(3.0, _columns(numbers, providers)[-1])


def _short(case: str) -> str:
    """A case's id without its operator, which the title names."""
    return case.partition("-")[2]


def _draw_list(axes: Any, shown: Sequence[Timing], numbers: Mapping[str, int], colours: Mapping[str, str]) -> None:
    """What each number is, and the share of the roofline that each provider reached there."""
    columns, rows = _columns(numbers, colours)[1:], axes.get_window_extent().height / axes.figure.dpi / _ROW_INCHES
    axes.set_axis_off()
    axes.set(xlim=(0, _list_width(numbers, colours)), ylim=(rows, 0))
    share = {(t.verdict.case, t.verdict.provider): t.roofline for t in shown}
    axes.text(0, 0.5, "case, and % of the roofline", fontsize=8, va="center", weight="bold")
    for right, (provider, colour) in zip(columns, colours.items(), strict=True):
        style = {"fontsize": _NUMBER_SIZE, "ha": "right", "va": "center", "color": colour}
        axes.text(right, 1.7, provider, **style)
        for case, number in numbers.items():
            value = share.get((case, provider))
            if value is not None:
                axes.text(right, number + 1.7, f"{100 * value:.1f}", **style)
    for case, number in numbers.items():
        axes.text(0.2, number + 1.7, str(number), fontsize=_NUMBER_SIZE, ha="right", va="center")
        axes.text(0.3, number + 1.7, _short(case), fontsize=_NUMBER_SIZE, va="center")
