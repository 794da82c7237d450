"""Draws the times of a slice's layers over batch, for each context, above the floors of their operators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3hal.bench.slice_tables import words
from k3hal.bench.slice_work import ENDS
from k3hal.debug.figures import save_figure
from k3hal.errors import UnsupportedError

_MARKERS = "osD^v"


def save_plot(report: Mapping[str, Any], path: Path) -> list[Path]:
    """Write `path` with the suffixes .png and .svg.

    Raises `UnsupportedError` when no decode was measured, `InputError` for an unwritable place.
    """
    from matplotlib.figure import Figure

    rows = [row for row in report["decode"] if "layers" in row]
    if not rows:
        raise UnsupportedError("nothing to plot", hint="no decode was measured")
    kinds = [kind for kind in rows[0]["layers"] if kind != ENDS]
    figure = Figure(figsize=(1.2 + 4.2 * len(kinds), 4.6), dpi=110, layout="constrained")
    all_axes = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    for axes, kind in zip(all_axes, kinds, strict=True):
        _draw(axes, rows, kind)
    all_axes[0].set_ylabel("us a layer")
    all_axes[-1].legend(fontsize=8, loc="upper left")
    figure.suptitle(f"{report['model']['name']} on {report['accelerator']}, {report['dtype']}: decode", fontsize=11)
    return save_figure(figure, path)


def _draw(axes: Any, rows: list[Mapping[str, Any]], kind: str) -> None:
    """Measured times solid, floors dashed, a colour for each context."""
    from matplotlib.ticker import ScalarFormatter

    batches = sorted({row["batch"] for row in rows})
    for number, context in enumerate(dict.fromkeys(row["context"] for row in rows)):
        mine = [(row["batch"], row["layers"][kind]) for row in rows if row["context"] == context]
        xs, style = [batch for batch, _ in mine], {"color": f"C{number}", "linewidth": 1.4}
        times = [1e6 * figure["seconds"] for _, figure in mine]
        axes.plot(xs, times, "-", marker=_MARKERS[number % 5], markersize=4, label=f"{words(context)} tokens", **style)
        axes.plot(xs, [1e6 * figure["floor"] for _, figure in mine], "--", alpha=0.7, **style)
    axes.plot([], [], "--", color="0.4", label="operators' floors")
    axes.set(xscale="log", yscale="log", xlabel="sequences", title=kind)
    axes.set_xticks(batches)
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.grid(True, alpha=0.3)
