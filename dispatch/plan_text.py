"""Dispatch plans for people: one table row an entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3hal.dispatch.plan import DispatchPlan, PlanEntry
from k3hal.dispatch.plan_file import choice_of
from k3hal.dispatch.plan_pin import layer_ranges

if TYPE_CHECKING:
    from rich.table import Table


def plan_table(plan: DispatchPlan) -> Table:
    """A rich table of operator, phase, layers, provider, evidence level and what decided."""
    from rich.table import Table

    table = Table(title=f"{plan.model} on {plan.device.id}, {plan.dtype}, {plan.policy}", title_justify="left")
    for column in ("operator", "phase", "layers", "provider", "level", "because"):
        table.add_column(column, overflow="fold")
    for entry in plan.entries:
        layers = layer_ranges(entry.request.layers).partition(" ")[2]
        shown = f"{choice_of(entry.decision)}"
        style = "yellow" if entry.decision.reference else None
        table.add_row(
            entry.request.op, entry.request.phase, layers, shown, entry.level, entry.decision.policy, style=style
        )
    return table


def plan_summary(plan: DispatchPlan) -> str:
    """How many entries run what, in one line."""
    kinds = [_kind(entry) for entry in plan.entries]
    counts = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    return f"{len(kinds)} entries: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())


def _kind(entry: PlanEntry) -> str:
    decision = entry.decision
    if decision.composed:
        return "composed with references" if decision.reference else "composed"
    return "reference" if decision.reference else decision.backend
