"""Selection: from a class of calls to a decision with its reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from k3hal.dispatch.beside import BESIDE, Beside
from k3hal.dispatch.call import Call, No, Yes
from k3hal.dispatch.errors import BackendError, DispatchError, UsageError
from k3hal.dispatch.operator import Operator
from k3hal.dispatch.overrides import Override
from k3hal.dispatch.provider import DEFAULT, Provider
from k3hal.dispatch.registry import Registry, check_signatures, get_operator
from k3hal.dispatch.tactics import TacticCache, TacticChoice
from k3hal.dispatch.words import nearest

FallbackPolicy = Literal["strict", "warn"]
Around: TypeAlias = "Callable[[Decision, Callable[..., Any]], Callable[..., Any]]"
REFERENCE, COMPOSED = "reference", "composed"
LEFT_OVER = "fallback warn"
"""The policy line of a reference that nobody asked for."""


@dataclass(frozen=True, slots=True)
class Consideration:
    """One line of a decision's trace: a provider (or `composed`, `reference`), and why it was or was not taken."""

    provider: str
    accepted: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """What runs a class of calls, and everything that was considered.

    `provider` is a provider id, `composed` or `reference`. `policy` names the line that decided. `parts` are the finer
    operators' decisions of a composed one. `tactic` is the provider's, `tactic_source` where it comes from (empty for
    what has no tactics).
    """

    call: Call
    provider: str
    policy: str
    trace: tuple[Consideration, ...]
    chosen: Provider | None = None
    parts: Mapping[str, Decision] = field(default_factory=dict)
    tactic: str = DEFAULT
    tactic_source: str = ""

    @property
    def backend(self) -> str:
        return self.chosen.backend if self.chosen else "dispatch"

    @property
    def composed(self) -> bool:
        return self.provider == COMPOSED

    @property
    def reference(self) -> bool:
        """Whether any part of this runs the reference."""
        return self.provider == REFERENCE or any(part.reference for part in self.parts.values())

    @property
    def graph_safe(self) -> bool:
        """Whether all that runs may be captured in a device graph. References make no such promise."""
        own = bool(self.parts) if self.chosen is None else self.chosen.graph_safe
        return own and all(part.graph_safe for part in self.parts.values())

    def function(self, around: Around | None = None, beside: Beside | None = None) -> Callable[..., Any]:
        """The callable to bind: the provider's own function or its tactic's, the reference, or a composition of parts.

        `around`, for debugging, may replace it and the function of every part; `beside` is for compositions.
        """
        if self.chosen:
            fn = offered(self.chosen, self.call)[self.tactic] if self.tactic != DEFAULT else self.chosen.fn
        elif self.provider == REFERENCE:
            fn = get_operator(self.call.op).reference
        else:
            lowering = get_operator(self.call.op).lowering
            assert lowering is not None
            parts = {name: self.fitted(name, part.function(around, beside)) for name, part in self.parts.items()}
            fn = lowering(parts | {BESIDE: beside} if beside else parts)
        return around(self, fn) if around else fn

    def fitted(self, part: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A part's function as the composition calls it: tensors of this call's dtype come in the part's own."""
        return fn if self.parts[part].call.dtype == self.call.dtype else _widened(fn, self.call.dtype)

    def prepare(self, **weights: Any) -> Mapping[str, Any]:
        """The weight arguments in the layout the chosen provider wants; as given where it asks for nothing.

        Of a composed operator every part lays out the weights that carry its own argument names.
        """
        if self.chosen and self.chosen.prepare:
            return self.chosen.prepare(**weights)
        for name, part in self.parts.items():
            own = {weight: weights[weight] for weight in get_operator(name).weights if weight in weights}
            weights |= part.prepare(**own)
        return weights


def _widened(fn: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    """A function called with float32 where tensors of `dtype` are given."""
    import torch

    narrow = getattr(torch, dtype)

    def wide(*args: Any, **named: Any) -> Any:
        return fn(*map(_one, args), **{name: _one(value) for name, value in named.items()})

    def _one(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype is narrow else value

    return wide


def part_calls(call: Call, *, wide: bool) -> dict[str, Call]:
    """The calls that a composed operator makes of its parts; `wide`: of its `wide_parts` in float32."""
    operator = get_operator(call.op)
    widened = operator.wide_parts if wide else ()
    return {
        name: replace(call, op=name, dims=dims, dtype="float32" if name in widened else call.dtype)
        for name, dims in operator.parts_of(call.dims).items()
    }


def answer(provider: Provider, call: Call, weights: frozenset[str] | None) -> Consideration:
    """A provider's answer. Within a composition, `weights` are the names it can have laid out at load."""
    try:
        said = provider.answer(call)
    except Exception as error:
        raise BackendError(f"provider {provider.id} crashed in supports() for {call.op}: {error!r}") from error
    if isinstance(said, No):
        return Consideration(provider.id, False, said.reasons)
    if not isinstance(said, Yes):
        raise BackendError(f"provider {provider.id} answered {said!r} for {call.op}, neither Yes nor No")
    if weights is not None and provider.prepare and not weights.issuperset(get_operator(call.op).weights):
        why = "lays out weights at load that the composed operator does not pass under the same names to it alone"
        return Consideration(provider.id, False, (why,))
    return Consideration(provider.id, True, (said.note,) if said.note else ())


def _with_every_reason(provider: Provider, call: Call, weights: frozenset[str] | None) -> Consideration:
    said = answer(provider, call, weights)
    return said if said.accepted else replace(said, reasons=provider.every_reason(call) or said.reasons)


def offered(provider: Provider, call: Call) -> Mapping[str, Callable[..., Any]]:
    """A provider's tactics for a class of calls, `default` first. Raises `BackendError` where they break a contract."""
    try:
        tactics = provider.tactics_for(call)
    except Exception as error:
        raise BackendError(f"provider {provider.id} crashed when asked for its tactics: {error!r}") from error
    check_signatures(provider, tactics)
    return tactics


def _refuse(call: Call, why: str, trace: list[Consideration], hint: str = "") -> DispatchError:
    details = [f"{c.provider}: {', '.join(c.reasons)}" for c in trace if not c.accepted]
    where = f"{call.op} ({call.phase}, {call.dtype}) on {call.device.id}"
    return DispatchError(f"{where}: {why}", hint="; ".join(filter(None, (*details, hint))))


def own_weights(operator: Operator, parts: Mapping[str, Any], outer: frozenset[str] | None) -> frozenset[str]:
    """The coarse operator's weight names that exactly one part takes: only these can be laid out for it."""
    taken = Counter(weight for name in parts for weight in get_operator(name).weights)
    mine = frozenset(weight for weight in operator.weights if taken[weight] == 1)
    return mine if outer is None else mine & outer


@dataclass(frozen=True, slots=True)
class Selector:
    """The policy in force: registry, overrides (later wins) and what to do when only a reference is left.

    An operator without a provider of its own is composed where it can be, unless all its parts would be references:
    its own reference is then the plainer way to the same values. `tactics` is what tuning has found; without it every
    provider runs its default tactic.
    """

    registry: Registry
    overrides: tuple[Override, ...] = ()
    fallback: FallbackPolicy = "strict"
    tactics: TacticCache | None = None

    def decide(self, call: Call) -> Decision:
        """The decision for one class of calls.

        Raises `DispatchError` when an override names a provider that says No, or when nothing but the reference is
        left under the strict policy; `BackendError` when a provider's `supports` crashes.
        """
        return self._decide(call, None)

    def consider(self, call: Call, weights: frozenset[str] | None = None) -> tuple[Consideration, ...]:
        """What every provider of the operator answers, with all its reasons, most preferred first.

        Whatever the policy would choose; `weights` as for `answer`.
        """
        return tuple(_with_every_reason(provider, call, weights) for provider in self.registry.of(call.op))

    def _decide(self, call: Call, weights: frozenset[str] | None) -> Decision:
        operator = get_operator(call.op)
        providers = self.registry.of(call.op)
        for override in reversed(self.overrides):
            if override.covers(call.op) and (found := self._overridden(override, call, operator, providers, weights)):
                return found
        trace: list[Consideration] = []
        for provider in providers:
            if not self.registry.backends[provider.backend].auto:
                trace.append(Consideration(provider.id, False, ("chosen only by name",)))
                continue
            trace.append(answer(provider, call, weights))
            if trace[-1].accepted:
                return self._taken(call, provider, f"priority {self.registry.priority(provider)}", trace)
        if operator.lowering:
            built = self._composed(call, operator, "no coarse provider", list(trace), weights)
            if any(part.policy != LEFT_OVER for part in built.parts.values()):
                return built
            trace.append(Consideration(COMPOSED, False, ("every part would run its reference",)))
        trace.append(Consideration(REFERENCE, self.fallback == "warn", ("the definition, not written for speed",)))
        if self.fallback == "strict":
            raise _refuse(call, "only the reference is left and the policy is strict", trace)
        return Decision(call, REFERENCE, LEFT_OVER, tuple(trace))

    def _taken(self, call: Call, provider: Provider, policy: str, trace: list[Consideration]) -> Decision:
        """The decision for a provider, with the tactic that tuning has found."""
        how = self.tactics.choose(provider, call) if self.tactics else TacticChoice()
        return Decision(call, provider.id, policy, tuple(trace), provider, {}, how.tactic, how.source)

    def _with_tactic(
        self, override: Override, call: Call, provider: Provider, trace: list[Consideration]
    ) -> Decision | None:
        """The decision for a provider by an override; None where a pattern names a tactic that it does not have.

        Raises `UsageError` for a name that is none of its tactics, `DispatchError` where only this call has it not.
        """
        policy = str(override)
        if not override.tactic:
            return self._taken(call, provider, policy, trace)
        tactics = offered(provider, call)
        if override.tactic in tactics:
            return Decision(call, provider.id, policy, tuple(trace), provider, {}, override.tactic, policy)
        if override.exact:
            if not callable(provider.tactics):  # the same for every call: no other one has it either
                hint = nearest(override.tactic, tactics, always_list=True)
                raise UsageError(f"{policy}: {provider.id} has no tactic {override.tactic!r}", hint=hint)
            why = f"{policy}: {provider.id} has no tactic {override.tactic!r} here"
            raise _refuse(call, why, trace, nearest(override.tactic, tactics, always_list=True))
        return None

    def _overridden(
        self,
        override: Override,
        call: Call,
        operator: Operator,
        providers: list[Provider],
        weights: frozenset[str] | None,
    ) -> Decision | None:
        policy = str(override)
        if override.name == REFERENCE:
            return Decision(call, REFERENCE, policy, (Consideration(REFERENCE, True, (policy,)),))
        if override.name == COMPOSED and operator.lowering:
            return self._composed(call, operator, policy, [], weights)
        found = override.pick(providers)
        trace = [answer(p, call, weights) for p in found]
        for provider, line in zip(found, trace, strict=True):
            if line.accepted:
                return self._with_tactic(override, call, provider, trace)
        if trace:
            raise _refuse(call, f"{policy} cannot run", trace)
        if override.exact:
            raise _refuse(call, f"{policy} names no provider of {call.op}", trace)
        return None

    def _composed(
        self, call: Call, operator: Operator, policy: str, trace: list[Consideration], outer: frozenset[str] | None
    ) -> Decision:
        own = own_weights(operator, operator.parts_of(call.dims), outer)
        widths = (True, False) if operator.wide_parts and call.dtype != "float32" else (False,)
        tried = [self._parts(part_calls(call, wide=wide), own) for wide in widths]
        built = [parts for parts in tried if not isinstance(parts, DispatchError)]
        if not built and isinstance(error := tried[-1], DispatchError):
            why = f"{policy}, and it cannot be composed: {error.message}"
            raise _refuse(call, why, trace, error.hint) from error
        parts = min(built, key=_left_over)  # of equals the first
        made_of = (f"{name}={d.provider}" + _in_dtype(d, call) for name, d in parts.items())
        trace.append(Consideration(COMPOSED, True, (", ".join(made_of),)))
        return Decision(call, COMPOSED, policy, tuple(trace), None, parts)

    def _parts(self, calls: Mapping[str, Call], own: frozenset[str]) -> dict[str, Decision] | DispatchError:
        """The parts' decisions, or what refuses the first that has none."""
        try:
            return {name: self._decide(call, own) for name, call in calls.items()}
        except DispatchError as error:
            return error


def _left_over(parts: Mapping[str, Decision]) -> int:
    return sum(part.policy == LEFT_OVER for part in parts.values())


def _in_dtype(part: Decision, call: Call) -> str:
    return "" if part.call.dtype == call.dtype else f" in {part.call.dtype}"
