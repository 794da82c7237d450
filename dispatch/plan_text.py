"""Dispatch plans for people: one table row an entry, the parts of a composed one under it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from k3hal.dispatch.plan import DispatchPlan, PlanEntry
from k3hal.dispatch.plan_pin import layer_ranges
from k3hal.dispatch.provider import DEFAULT
from k3hal.dispatch.select import Decision

if TYPE_CHECKING:
    from rich.table import Table


def plan_table(plan: DispatchPlan) -> Table:
    """A rich table of operator, phase, layers, provider, evidence level and what decided."""
    from rich.table import Table

    table = Table(
        title=f"{plan.model} on {plan.device.id}, {plan.dtype}, {plan.policy}",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for column in ("operator", "phase", "layers", "provider", "level", "because"):
        table.add_column(column, no_wrap=column in ("operator", "provider"))
    for entry in plan.entries:
        request, decision = entry.request, entry.decision
        layers = _layers(request.layers)
        row = (request.op, request.phase, layers, _runs(decision), entry.level, decision.policy)
        table.add_row(*row, style="yellow" if decision.reference else None)
        for depth, op, part in _parts(decision, 1):
            row = (f"{'  ' * depth}{op}", "", "", f"{'  ' * depth}{_runs(part)}", "", part.policy)
            table.add_row(*row, style="yellow" if part.reference else None)
    return table


def _runs(decision: Decision) -> str:
    """The provider, and its tactic unless that is the default."""
    return decision.provider if decision.tactic == DEFAULT else f"{decision.provider}:{decision.tactic}"


def _parts(decision: Decision, depth: int) -> Iterator[tuple[int, str, Decision]]:
    for op, part in decision.parts.items():
        yield depth, op, part
        yield from _parts(part, depth + 1)


def _layers(layers: tuple[int, ...]) -> str:
    """Layer numbers, by their count and ends where they are many runs."""
    text = layer_ranges(layers).partition(" ")[2]
    return text if text.count(",") <= 2 else f"{len(layers)} of {min(layers)}-{max(layers)}"


def plan_summary(plan: DispatchPlan) -> str:
    """How many entries run what, in one line."""
    counts = Counter(_kind(entry) for entry in plan.entries)
    return f"{len(plan.entries)} entries: " + ", ".join(f"{counts[kind]} {kind}" for kind in sorted(counts))


def _kind(entry: PlanEntry) -> str:
    decision = entry.decision
    if decision.composed:
        return "composed with references" if decision.reference else "composed"
    return "reference" if decision.reference else decision.backend
