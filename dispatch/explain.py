"""All that is known about one class of calls: who would run it, who would not and why, and what it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from k3hal.dispatch.call import Call
from k3hal.dispatch.errors import DispatchError
from k3hal.dispatch.evidence import Level, level_of
from k3hal.dispatch.mxfp4 import Mxfp4, Mxfp4Path, declared_path, is_mxfp4, path_of
from k3hal.dispatch.plan_file import SavedPlan
from k3hal.dispatch.plan_pin import pinned_decision
from k3hal.dispatch.provider import Provider
from k3hal.dispatch.registry import get_operator
from k3hal.dispatch.select import Consideration, Decision, Selector, own_weights, part_calls


@dataclass(frozen=True, slots=True)
class Candidate:
    """One provider's answer. `auto` is False for one chosen only by name; `mxfp4` is None where it says nothing."""

    answer: Consideration
    priority: int
    auto: bool
    level: Level
    mxfp4: Mxfp4Path | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """A class of calls explained.

    `decision` is None where the policy refuses, and `refusal` says why. `parts` explains the finer operators of one
    that no coarse provider runs. `mxfp4` is None for calls without such weights, and for composed ones, whose part has
    it.
    """

    call: Call
    candidates: tuple[Candidate, ...]
    decision: Decision | None
    refusal: DispatchError | None = None
    level: Level = "E0"
    mxfp4: Mxfp4 | None = None
    parts: Mapping[str, Explanation] = field(default_factory=dict)


def explain(call: Call, selector: Selector, pinned: SavedPlan | None = None) -> Explanation:
    """Explain what `selector`, or a pinned plan in its place, does with a call.

    Raises `PlanError` as `pinned_decision` does and `BackendError` for a provider that crashes when asked.
    """
    try:
        decision = pinned_decision(pinned, call, selector.registry) if pinned else selector.decide(call)
    except DispatchError as error:
        return Explanation(call, _candidates(call, selector, None), None, error)
    return _explained(call, decision, selector, None)


def _explained(call: Call, decision: Decision, selector: Selector, weights: frozenset[str] | None) -> Explanation:
    candidates = _candidates(call, selector, weights)
    providers = zip(selector.registry.of(call.op), (c.answer for c in candidates), strict=True)
    plain = is_mxfp4(call) and not decision.composed
    return Explanation(
        call,
        candidates,
        decision,
        level=level_of(call.op, decision.provider, call.device.arch),
        mxfp4=path_of(call, decision.chosen, providers) if plain else None,
        parts={} if decision.chosen else _parts(call, decision, selector, weights),
    )


def _parts(
    call: Call, decision: Decision, selector: Selector, weights: frozenset[str] | None
) -> dict[str, Explanation]:
    """The finer operators with their decisions; of a reference that stands in for its parts, what they would be."""
    operator = get_operator(call.op)
    needed = part_calls(call, wide=False) if operator.lowering else {}
    own = own_weights(operator, needed, weights)
    decided = {name: decision.parts.get(name) or selector.decide(part) for name, part in needed.items()}
    return {name: _explained(part.call, part, selector, own) for name, part in decided.items()}


def _candidates(call: Call, selector: Selector, weights: frozenset[str] | None) -> tuple[Candidate, ...]:
    lines = selector.consider(call, weights)
    found = zip(selector.registry.of(call.op), lines, strict=True)
    return tuple(_candidate(provider, line, call, selector) for provider, line in found)


def _candidate(provider: Provider, line: Consideration, call: Call, selector: Selector) -> Candidate:
    registry = selector.registry
    return Candidate(
        line,
        registry.priority(provider),
        registry.backends[provider.backend].auto,
        level_of(call.op, provider.id, call.device.arch),
        declared_path(provider, call) if is_mxfp4(call) else None,
    )
