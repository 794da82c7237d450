"""A picture of a run: latencies as distributions, and what happened when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from k3hal.bench.serve.answers import Answer
from k3hal.debug.figures import save_figure

_BINS, _NARROWEST = 120, 0.25
_LEAST_MS = 0.1


def save_serve_plot(report: Mapping[str, Any], answers: Sequence[Answer], path: Path) -> list[Path]:
    """Write `path` with the suffixes .png and .svg. Raises `InputError` for an unwritable place."""
    from matplotlib.figure import Figure

    good = [answer for answer in answers if not answer.error]
    figure = Figure(figsize=(11, 7), dpi=110, layout="constrained")
    (spread, first), (busy, rate) = figure.subplots(2, 2)
    _distributions(spread, good)
    _first_tokens(first, good, answers, report["settings"]["goodput"])
    _open_requests(busy, answers, report["duration"])
    _token_rate(rate, good, report["duration"])
    limit = report["max_concurrency"]
    figure.suptitle(
        f"{report['model_id']}: {report['num_prompts']} requests, {report['settings']['dataset']}, "
        f"rate {report['request_rate'] or 'of the trace'}" + (f", at most {limit} at once" if limit else "")
    )
    return save_figure(figure, path)


def _distributions(axes: Any, good: Sequence[Answer]) -> None:
    """Each latency's share of values up to it."""
    kinds = {
        "first token": [a.ttft for a in good],
        "per token": [a.tpot for a in good if a.tpot is not None],
        "between pieces": np.concatenate([np.empty(0), *(np.diff(a.at) for a in good)]),
        "whole answer": [a.e2el for a in good],
    }
    for number, (label, values) in enumerate(kinds.items()):
        ms = np.sort(np.asarray(values)) * 1e3
        ms = np.maximum(ms, _LEAST_MS)  # pieces that came in one read have no distance, which a logarithm cannot show
        if len(ms):
            axes.plot(ms, np.arange(1, len(ms) + 1) / len(ms), color=f"C{number}", linewidth=1.6, label=label)
            axes.plot(np.percentile(ms, (50, 95, 99)), (0.5, 0.95, 0.99), "o", color=f"C{number}", markersize=4)
    axes.set(xlabel="ms", ylabel="share up to", title="Latencies, with P50, P95 and P99", xscale="log", ylim=(0, 1.02))
    axes.grid(True, alpha=0.3)
    if good:
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4, frameon=False)


def _first_tokens(axes: Any, good: Sequence[Answer], answers: Sequence[Answer], goodput: Mapping[str, float]) -> None:
    axes.plot([a.sent for a in good], [a.ttft * 1e3 for a in good], ".", color="C0", markersize=4)
    failed = [a.sent for a in answers if a.error]
    if failed:
        axes.plot(
            failed, [0.0] * len(failed), "x", color="C3", markersize=6, label=f"{len(failed)} failed", clip_on=False
        )
        axes.legend(fontsize=8)
    if "ttft" in goodput:
        axes.axhline(goodput["ttft"], color="C3", linestyle="--", linewidth=1)
    axes.set(xlabel="sent, s", ylabel="ms", title="First token", ylim=(0, None))
    axes.grid(True, alpha=0.3)


def _open_requests(axes: Any, answers: Sequence[Answer], duration: float) -> None:
    changes = sorted([(a.sent, 1) for a in answers] + [(a.end or a.sent, -1) for a in answers])
    axes.step(
        [0.0, *(time for time, _ in changes), duration],
        [0, *np.cumsum([change for _, change in changes]).tolist(), 0],
        where="post",
        color="C2",
    )
    axes.set(xlabel="s", ylabel="requests", title="Open at once", ylim=(0, None))
    axes.grid(True, alpha=0.3)


def _token_rate(axes: Any, good: Sequence[Answer], duration: float) -> None:
    """Pieces a second; a server of ours sends a token a piece while the client keeps up."""
    times = np.concatenate([np.empty(0), *(np.asarray(a.at) for a in good)])
    bins = max(1, min(_BINS, int(duration / _NARROWEST)))
    counts, edges = np.histogram(times, bins=bins, range=(0, duration))
    axes.stairs(counts / np.diff(edges), edges, fill=True, color="C1", alpha=0.7)
    axes.set(xlabel="s", ylabel="pieces/s", title="Text that came", ylim=(0, None))
    axes.grid(True, alpha=0.3)
