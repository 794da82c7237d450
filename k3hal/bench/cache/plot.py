"""Draws hit rate against budget: every policy, the oracle, the bound, and vLLM where it ran."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3hal.debug.figures import save_figure
from k3hal.errors import UnsupportedError, UsageError


def check_plot(path: Path) -> None:
    """Before minutes are spent on what a picture would show.

    Raises `UnsupportedError` where none can be made and `UsageError` where it could not be written.
    """
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: {path.parent} is not a directory")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UnsupportedError("--plot needs matplotlib", hint="install k3hal[plot]") from None


def save_plot(report: Mapping[str, Any], path: Path) -> list[Path]:
    """Write `path` with the suffixes .png and .svg. Raises `InputError` for an unwritable place."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, PercentFormatter, ScalarFormatter

    sweep, settings = report["sweep"], report["settings"]
    budgets = [budget / 1e9 for budget in sweep["budgets"]]
    figure = Figure(figsize=(8.6, 4.8), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.fill_between(budgets, sweep["oracle"], sweep["bound"], color="0.88", linewidth=0)
    axes.plot(budgets, sweep["bound"], "-", color="0.6", linewidth=1, label="proven bound")
    axes.plot(budgets, sweep["oracle"], "--", color="0.35", linewidth=1.3, label="oracle, knows the future")
    for number, (policy, rates) in enumerate(sweep["policies"].items()):
        width = 2.2 if policy == settings["policy"] else 1.3
        axes.plot(budgets, rates, "o-", color=f"C{number}", linewidth=width, markersize=4, label=policy)
    if sweep["peer"]:
        axes.plot(budgets, sweep["peer"], "s:", color="black", linewidth=1.3, markersize=4, label="vLLM's manager")
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticklabels([f"{budget:.3g}" for budget in budgets])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(bottom=0)
    axes.grid(True, alpha=0.3)
    axes.set(xlabel=f"GB a rank (TP{settings['tp']}, {settings['kv']} KV)", ylabel="prompt tokens that hit")
    axes.set_title(f"{Path(report['trace']['name']).name}, {report['trace']['requests']} requests, {settings['mode']}")
    figure.legend(fontsize=8, loc="outside right center")
    return save_figure(figure, path)
