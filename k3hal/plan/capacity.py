"""Context by concurrency: what fits a plan's accelerators, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from k3hal.plan.deployment import Deployment
from k3hal.plan.fit import longest_sequence
from k3hal.plan.memory import GB, GpuMemory
from k3hal.plan.refusal import RefusedPlanError

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SHADES = "█▓▒░"


@dataclass(frozen=True, slots=True)
class Row:
    """One context length: most sequences that fit, and GB of the tightest accelerator at each concurrency.

    A GB figure is None where it does not fit.
    """

    context: int
    sequences: int
    used_gb: tuple[float | None, ...]


def capacity(plan: Deployment) -> list[Row]:
    """Rows for contexts from 4096 tokens, doubling, to the longest a request may have. A sequence lives in one pool at
    a time: the smallest pool decides. Raises `RefusedPlanError` where the model's manifest is not known."""
    if not plan.memory or plan.weights is None:
        raise RefusedPlanError(f"the manifest of {plan.model_id} is not known", hint="give --model DIR")
    config = plan.weights.config
    longest = min(longest_sequence(group, config) for group in plan.groups)
    contexts, step = [], 4096
    while step < longest:
        contexts.append(step)
        step *= 2
    return [_row(plan.memory, context) for context in (*contexts, longest)]


def capacity_document(plan: Deployment, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "concurrencies": list(CONCURRENCIES),
        "device_gb": round(plan.hardware.gpu_gb, 3),
        "rows": [
            {"context": row.context, "max_concurrency": row.sequences, "used_gb": list(row.used_gb)} for row in rows
        ],
    }


def capacity_text(plan: Deployment, rows: Sequence[Row]) -> Iterator[str]:
    """The table of GB used on the tightest GPU, then the same as shades: darker is fuller, a dot does not fit."""
    yield f"GB used of {plan.hardware.gpu_gb:.0f} on each GPU, by context and sequences at once; - does not fit"
    yield f"{'context':>9} {'most':>6} " + " ".join(f"{n:>6}" for n in CONCURRENCIES)
    for row in rows:
        cells = " ".join(f"{'-' if used is None else format(used, '.1f'):>6}" for used in row.used_gb)
        yield f"{row.context:>9} {row.sequences:>6} {cells}"
    yield ""
    for row in rows:
        cells = "".join("  ·" if used is None else f" {_shade(used, plan.hardware.gpu_gb) * 2}" for used in row.used_gb)
        yield f"{row.context:>9} {cells}"
    yield f"{'':>9} " + "".join(f"{n:>3}" if n < 100 else f" {n}" for n in CONCURRENCIES)


def picture(plan: Deployment, rows: Sequence[Row]) -> str:
    """The same as an SVG document."""
    size, left, top = 56, 110, 60
    width, height = left + size * len(CONCURRENCIES) + 20, top + size * len(rows) + 50
    title = escape(f"{plan.model_id}, {plan.strategy} on {plan.nodes} x {plan.hardware.id}: GB used of each GPU")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/><text x="10" y="24" font-size="15">{title}</text>',
        f'<text x="10" y="{top - 10}">context</text>',
    ]
    for y, row in enumerate(rows):
        middle = top + size * y + size / 2 + 5
        parts.append(f'<text x="{left - 10}" y="{middle}" text-anchor="end">{row.context}</text>')
        for x, used in enumerate(row.used_gb):
            parts.append(_cell(left + size * x, top + size * y, size, used, plan.hardware.gpu_gb))
    below = top + size * len(rows)
    for x, n in enumerate(CONCURRENCIES):
        parts.append(f'<text x="{left + size * x + size / 2}" y="{below + 18}" text-anchor="middle">{n}</text>')
    parts.append(f'<text x="{left}" y="{below + 40}">sequences at once</text></svg>')
    return "\n".join(parts)


def _row(groups: Sequence[GpuMemory], context: int) -> Row:
    used = []
    for concurrency in CONCURRENCIES:
        each = [(memory, sum(memory.cost.of(context, concurrency))) for memory in groups]
        fits = all(cache <= memory.room for memory, cache in each)
        used.append(round(max(memory.fixed + cache for memory, cache in each) / GB, 1) if fits else None)
    return Row(context, min(memory.cost.sequences(context, memory.room) for memory in groups), tuple(used))


def _shade(used: float, total: float) -> str:
    return _SHADES[min(int((1 - used / total) * 8), len(_SHADES) - 1)]


def _cell(x: float, y: float, size: int, used: float | None, total: float) -> str:
    fill = "#eeeeee" if used is None else f"hsl(140,55%,{int(92 - 50 * min(used / total, 1))}%)"
    label = "" if used is None else f"{used:.0f}"
    return (
        f'<rect x="{x}" y="{y}" width="{size - 2}" height="{size - 2}" fill="{fill}"/>'
        f'<text x="{x + size / 2}" y="{y + size / 2 + 5}" text-anchor="middle">{label}</text>'
    )
