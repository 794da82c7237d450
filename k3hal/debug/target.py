"""What a case is run with: a provider's function, the reference, or a composition, on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3hal.debug.case import Case
from k3hal.dispatch.assemble import tactics_in_force
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.errors import DispatchError, UsageError
from k3hal.dispatch.operator import Operator
from k3hal.dispatch.overrides import parse_overrides
from k3hal.dispatch.provider import DEFAULT, Provider
from k3hal.dispatch.registry import Registry, default_registry, get_operator
from k3hal.dispatch.select import REFERENCE, Decision, Selector, offered

CURRENT = "current"
"""The name of whatever selection would take."""


@dataclass(frozen=True, slots=True)
class Target:
    """A function with an operator's signature. `device` is a torch device string.

    `prepare` lays weight arguments out as `fn` wants them. `graph_safe`: a call may be captured. A variant of a target
    is `dataclasses.replace(target, ...)`.
    """

    op: str
    id: str
    fn: Callable[..., Any]
    prepare: Callable[..., Mapping[str, Any]] | None = None
    deterministic: bool = True
    backend: str = "dispatch"
    device: str = "cpu"
    graph_safe: bool = False

    @classmethod
    def of(cls, provider: Provider, device: str = "cpu") -> Target:
        promises = (provider.deterministic, provider.backend, device, provider.graph_safe)
        return cls(provider.op, provider.id, provider.fn, provider.prepare, *promises)

    @classmethod
    def reference(cls, operator: Operator) -> Target:
        """The operator's definition, on the CPU."""
        return cls(operator.name, "reference", operator.reference)

    @classmethod
    def decided(cls, decision: Decision, device: str) -> Target:
        """What a decision would bind. Another tactic than the default shows in the id: `cpu.chunked:chunk32`."""
        if decision.chosen:
            target = cls.of(decision.chosen, device)
            if decision.tactic == DEFAULT:
                return target
            return replace(target, id=f"{target.id}:{decision.tactic}", fn=decision.function())
        return cls(
            decision.call.op,
            decision.provider,
            decision.function(),
            decision.prepare if decision.parts else None,
            _deterministic(decision),
            device=device,
            graph_safe=decision.graph_safe,
        )


def _deterministic(decision: Decision) -> bool:
    own = decision.chosen is None or decision.chosen.deterministic
    return own and all(_deterministic(part) for part in decision.parts.values())


def find_target(case: Case, name: str, device: DeviceDescription, registry: Registry | None = None) -> Target:
    """The target called `name` (a provider's id, name or backend, `reference`, `composed`, `current`) for a case.

    A provider may be followed by `:TACTIC`; without that it is its default tactic, while `current` has the tactic that
    tuning found. Raises `UsageError` for an unknown name and `DispatchError`, with the reasons, when it does not run
    the case.
    """
    registry = registry or default_registry()
    overrides = () if name == CURRENT else parse_overrides(f"{case.op}={name}", "--provider", registry)
    tactics = tactics_in_force() if name == CURRENT else None
    decision = Selector(registry, overrides, "warn", tactics).decide(case.call(device))
    return Target.decided(decision, device.torch_device)


def peer_of(case: Case, target: Target, device: DeviceDescription, registry: Registry | None = None) -> Target | None:
    """The CPU provider a target is measured against, and the reference where none takes the case; None where it is
    the target itself.

    `device` is the host CPU's description.
    """
    known = (registry or default_registry()).of(case.op)
    providers = [p for p in known if "cpu" in p.needs.vendors and p.answer(case.call(device))]
    if not providers and target.id != REFERENCE:
        return Target.reference(get_operator(case.op))
    return next((Target.of(provider) for provider in providers if provider.id != target.id), None)


def tactic_names(case: Case, name: str, device: DeviceDescription, wanted: Sequence[str] = ("all",)) -> list[str]:
    """`name` with each tactic wanted (`all`: those it offers for the case, `default` first), as `find_target` takes it.

    The name alone where it says No. Raises `UsageError` where it has no such tactic.
    """
    registry = default_registry()
    overrides = () if name == CURRENT else parse_overrides(f"{case.op}={name}", "--provider", registry)
    try:
        chosen = Selector(registry, overrides, "warn").decide(case.call(device)).chosen
    except DispatchError:
        return [name]
    have = list(offered(chosen, case.call(device))) if chosen else [DEFAULT]
    for tactic in wanted:
        if tactic not in ("all", *have):
            found = chosen.id if chosen else name
            raise UsageError(f"{found} of {case.op} has no tactic {tactic!r}", hint=f"it has {', '.join(have)}")
    if chosen is None:
        return [name]
    return [f"{chosen.id}:{tactic}" for tactic in (have if "all" in wanted else wanted)]
