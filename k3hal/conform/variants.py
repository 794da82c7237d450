"""Other ways to run the same model: with each operator's next provider, and with coarse operators composed of finer."""

from __future__ import annotations

from collections.abc import Iterator

from k3hal.dispatch.operator import Operator
from k3hal.dispatch.plan import DispatchPlan
from k3hal.dispatch.registry import get_operator
from k3hal.dispatch.select import COMPOSED, REFERENCE, Decision, Selector

DEFAULT = "default"
MOST = 3
"""The place in preference up to which an operator's providers get a run of the whole model."""


def variants(plan: DispatchPlan, selector: Selector) -> Iterator[tuple[str, str]]:
    """Each one's name and the overrides (as `--ops` takes them) that make it of a default plan.

    `choice N` gives every operator its Nth provider, where that many say Yes to all the model's calls of it; the others
    stay. `composed` composes what has finer operators and is not composed already.
    """
    accepted: dict[str, list[str]] = {}
    for entry in plan.entries:
        for decision in _tree(entry.decision):
            op = decision.call.op
            yes = [said.provider for said in selector.consider(decision.call) if said.accepted]
            yes = [name for name in yes if selector.registry.backends[name.partition(".")[0]].auto]
            accepted[op] = [name for name in accepted.get(op, yes) if name in yes]
    for place in range(1, MOST):
        ops = {op: names[place] for op, names in accepted.items() if len(names) > place}
        if ops:
            yield f"choice {place + 1}", _overrides(ops)
    ops = {e.request.op: COMPOSED for e in plan.entries if _composable(get_operator(e.request.op), e.decision)}
    if ops:
        yield COMPOSED, _overrides(ops)


def _tree(decision: Decision) -> Iterator[Decision]:
    yield decision
    for part in decision.parts.values():
        yield from _tree(part)


def _composable(operator: Operator, decision: Decision) -> bool:
    return operator.lowering is not None and decision.provider not in (COMPOSED, REFERENCE)


def _overrides(ops: dict[str, str]) -> str:
    return ",".join(f"{op}={name}" for op, name in sorted(ops.items()))
