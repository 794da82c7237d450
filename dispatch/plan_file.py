"""Plan files: a dispatch plan as JSON, and reading one back without trusting it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from k3hal.dispatch.call import PHASES, DimValue, Phase
from k3hal.dispatch.errors import PlanError
from k3hal.dispatch.plan import DispatchPlan, PlanEntry
from k3hal.dispatch.provider import DEFAULT
from k3hal.dispatch.registry import operator_names
from k3hal.dispatch.select import Decision
from k3hal.dispatch.words import nearest

NAME, MAJOR = "k3hal.op_plan", 1
SCHEMA = f"{NAME}/{MAJOR}"


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs an operator: a provider id with its tactic, `reference`, or `composed` of the choices in `parts`."""

    provider: str
    parts: Mapping[str, Choice] = field(default_factory=dict)
    tactic: str = DEFAULT

    def __str__(self) -> str:
        if self.tactic != DEFAULT:
            return f"{self.provider}:{self.tactic}"
        inside = ", ".join(f"{op}={choice}" for op, choice in sorted(self.parts.items()))
        return f"{self.provider}({inside})" if inside else self.provider


@dataclass(frozen=True, slots=True)
class SavedEntry:
    """One entry of a plan file. `dims` is None where the file names none."""

    op: str
    layers: tuple[int, ...]
    phase: Phase
    choice: Choice
    dims: Mapping[str, DimValue] | None = None


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """A plan file's contents; `source` is the path it was read from, for messages."""

    source: str
    device: str
    model: str
    entries: tuple[SavedEntry, ...]


def plan_json(plan: DispatchPlan) -> dict[str, Any]:
    """The plan as `op plan --json` prints it and `--plan` reads it."""
    device = plan.device
    return {
        "schema": SCHEMA,
        "device": device.id,
        "model": plan.model,
        "dtype": plan.dtype,
        "policy": plan.policy,
        "machine": {
            "vendor": device.vendor,
            "arch": device.arch,
            "present": device.present,
            "features": sorted(device.features),
            "packages": _packages(plan),
            "source": device.source,
        },
        "entries": [_entry_json(entry) for entry in plan.entries],
    }


def save_plan(plan: DispatchPlan, path: str | Path) -> None:
    """Write the plan. Raises `PlanError` when the file cannot be written."""
    try:
        Path(path).write_text(json.dumps(plan_json(plan), indent=1) + "\n", "utf-8")
    except OSError as error:
        raise PlanError(f"{path}: the plan cannot be written: {error.strerror}") from error


def saved(plan: DispatchPlan) -> SavedPlan:
    """The plan as its own file would be read back."""
    entries = (
        SavedEntry(e.request.op, e.request.layers, e.request.phase, choice_of(e.decision), e.request.dims)
        for e in plan.entries
    )
    return SavedPlan(f"{plan.model} on {plan.device.id}", plan.device.id, plan.model, tuple(entries))


def pairs_in(plan: SavedPlan) -> set[tuple[str, str]]:
    """Every operator of the plan, parts of composed ones included, with each provider that it has there."""
    rest = [(entry.op, entry.choice) for entry in plan.entries]
    pairs = set[tuple[str, str]]()
    while rest:
        op, choice = rest.pop()
        pairs.add((op, choice.provider))
        rest += choice.parts.items()
    return pairs


def choice_of(decision: Decision) -> Choice:
    return Choice(decision.provider, {op: choice_of(part) for op, part in decision.parts.items()}, decision.tactic)


def reasons(decision: Decision) -> list[str]:
    """What decided, where the tactic comes from if there is one to choose, then every line of the trace."""
    lines = [decision.policy]
    if decision.tactic_source:
        lines.append(f"tactic {decision.tactic}: {decision.tactic_source}")
    for line in decision.trace:
        detail = f": {', '.join(line.reasons)}" if line.reasons else ""
        lines.append(f"{line.provider}: {'yes' if line.accepted else 'no'}{detail}")
    return lines


def _entry_json(entry: PlanEntry) -> dict[str, Any]:
    request, decision = entry.request, entry.decision
    return {
        "op": request.op,
        "layers": list(request.layers),
        "phase": request.phase,
        "provider": decision.provider,
        "backend": decision.backend,
        "level": entry.level,
        "composed": decision.composed,
        "reference": decision.reference,
        "reasons": reasons(decision),
        "dims": dict(request.dims),
        "tactic": _tactic(decision),
        "parts": _parts_json(decision),
    }


def _parts_json(decision: Decision) -> dict[str, Any]:
    return {
        op: {
            "provider": part.provider,
            "reasons": reasons(part),
            "tactic": _tactic(part),
            "parts": _parts_json(part),
        }
        for op, part in decision.parts.items()
    }


def _tactic(decision: Decision) -> str | None:
    """The tactic's name; None for what has no tactics to choose from."""
    return decision.tactic if decision.chosen and decision.chosen.tactics is not None else None


def _packages(plan: DispatchPlan) -> dict[str, str]:
    """Versions of what the chosen providers ask for, and torch's."""
    names, rest = {"torch"}, [entry.decision for entry in plan.entries]
    while rest:
        decision = rest.pop()
        rest += decision.parts.values()
        if decision.chosen:
            names |= set(decision.chosen.needs.packages)
    return {name: plan.device.packages[name] for name in sorted(names) if name in plan.device.packages}


def load_plan(path: str | Path) -> SavedPlan:
    """Read a plan file. Raises `PlanError`, one line naming the file, the entry and the field that is wrong."""
    try:
        return _Reader(str(path)).plan(json.loads(Path(path).read_text("utf-8")))
    except OSError as error:
        raise PlanError(f"{path}: the plan cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise PlanError(f"{path}: not a JSON file: {error}", hint="`k3hal op plan --save FILE` writes one") from error


@dataclass(frozen=True, slots=True)
class _Reader:
    """Checks one file's values; `where` grows by the entry and part looked at."""

    where: str

    def fail(self, what: str, hint: str = "") -> NoReturn:
        raise PlanError(f"{self.where}: {what}", hint=hint)

    def at(self, name: str) -> _Reader:
        return _Reader(f"{self.where}: {name}")

    def plan(self, data: Any) -> SavedPlan:
        data = self.object(data)
        name, _, major = self.text(data, "schema").partition("/")
        if name != NAME:
            self.fail(f"schema is {data['schema']!r}, not a dispatch plan", hint=f"expected {SCHEMA!r}")
        if major.partition(".")[0] != str(MAJOR):
            self.fail(f"schema is {data['schema']!r}; this version reads {SCHEMA!r}")
        items = data.get("entries")
        if not isinstance(items, list):
            self.fail("'entries' is not a list")
        entries = tuple(self.at(f"entry {index}").entry(item) for index, item in enumerate(items))
        seen: set[tuple[str, str, int | None]] = set()
        for index, entry in enumerate(entries):
            for layer in entry.layers or (None,):
                key = (entry.op, entry.phase, layer)
                if key in seen:
                    where = "outside the layers" if layer is None else f"in layer {layer}"
                    self.at(f"entry {index}").fail(f"a second entry for {entry.op} ({entry.phase}) {where}")
                seen.add(key)
        return SavedPlan(self.where, self.text(data, "device"), self.text(data, "model"), entries)

    def entry(self, data: Any) -> SavedEntry:
        data = self.object(data)
        op, phase = self.operator(self.text(data, "op")), self.phase(self.text(data, "phase"))
        return SavedEntry(op, self.layers(data.get("layers")), phase, self.choice(data), self.dims(data.get("dims")))

    def phase(self, word: str) -> Phase:
        for phase in PHASES:
            if phase == word:
                return phase
        return self.fail(f"phase is {word!r}", hint=f"one of {', '.join(PHASES)}")

    def choice(self, data: Mapping[str, Any]) -> Choice:
        provider, parts = self.text(data, "provider"), data.get("parts", {})
        if not isinstance(parts, dict):
            self.fail("'parts' is not an object")
        if bool(parts) != (provider == "composed"):
            self.fail(f"provider is {provider!r} with {len(parts)} parts", hint="composed, and nothing else, has parts")
        tactic = data.get("tactic")
        if tactic is not None and not isinstance(tactic, str):
            self.fail("'tactic' is neither a name nor null")
        made_of = {self.operator(op): self.at(f"part {op}").part(part) for op, part in parts.items()}
        return Choice(provider, made_of, tactic or DEFAULT)

    def part(self, data: Any) -> Choice:
        return self.choice(self.object(data))

    def layers(self, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or any(type(layer) is not int or layer < 0 for layer in value):
            self.fail("'layers' is not a list of layer numbers")
        return tuple(value)

    def dims(self, value: Any) -> Mapping[str, DimValue] | None:
        if value is None:
            return None
        if not isinstance(value, dict) or any(isinstance(v, dict | list) for v in value.values()):
            self.fail("'dims' is not an object of plain values")
        return value

    def operator(self, name: str) -> str:
        if name not in operator_names():
            self.fail(f"unknown operator {name!r}", hint=nearest(name, operator_names()))
        return name

    def text(self, data: Mapping[str, Any], key: str) -> str:
        if not isinstance(data.get(key), str):
            self.fail(f"{key!r} is {'not a string' if key in data else 'missing'}")
        return data[key]

    def object(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail("not a JSON object")
        return value
