"""What operators would take on a chip, by paper alone: their own count of the least work, and the published limits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3hal.bench.outlines import Outlines
from k3hal.bench.tables import Table
from k3hal.conform.environment import device_json, statement
from k3hal.debug.case import sample_case
from k3hal.dispatch.call import Call
from k3hal.dispatch.errors import DispatchError
from k3hal.dispatch.evidence import level_of

if TYPE_CHECKING:
    from k3hal.dispatch.device import DeviceDescription
    from k3hal.dispatch.operator import Operator, Sample
    from k3hal.dispatch.select import Decision, Selector

SCHEMA = "k3hal.op_bench_model/1"


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds that a call's bytes and FLOPs take at the chip's published limits; None where one is not published.

    FLOPs count at the chip's rate for the activations' dtype, in which the contracts multiply: what a provider
    computes outside the matrix units takes longer.
    """

    memory: float | None
    compute: float | None

    @classmethod
    def of(cls, flops: float, moved: float, dtype: str, machine: DeviceDescription) -> Floor:
        rate = machine.flops.get(dtype)
        compute = flops / rate if rate else None if flops else 0.0
        return cls(moved / machine.bandwidth if machine.bandwidth else None, compute)

    @property
    def seconds(self) -> float | None:
        """The longer of both; the memory's alone where no rate is known, None where no bandwidth is."""
        return None if self.memory is None else max(self.memory, self.compute or 0.0)

    @property
    def bound(self) -> str:
        """`memory` or `compute`; `unknown` unless both limits are published."""
        if self.memory is None or self.compute is None:
            return "unknown"
        return "memory" if self.memory >= self.compute else "compute"


def modelled_report(
    op: str, machine: DeviceDescription, samples: Iterable[tuple[Operator, Sequence[Sample]]], selector: Selector
) -> dict[str, Any]:
    """What `--json` prints and `--save` keeps. Nothing runs, and no large tensor takes memory.

    `left_out` names the operators without a floor on one chip: what moves between ranks does not go through its memory.
    """
    results: list[dict[str, Any]] = []
    left_out: list[str] = []
    for operator, mine in samples:
        if operator.family == "collective":
            left_out.append(operator.name)
            continue
        results += [modelled_row(operator, sample, machine, selector) for sample in mine]
    return {
        "op": op,
        "modelled": True,
        "device": machine.id,
        "machine": {**device_json(machine), "source": machine.source, "notes": list(machine.notes)},
        "limits": {"bytes_per_s": machine.bandwidth or None, "flops_per_s": dict(machine.flops)},
        "statement": statement().to_json(),
        "results": results,
        "left_out": left_out,
    }


def modelled_row(operator: Operator, sample: Sample, machine: DeviceDescription, selector: Selector) -> dict[str, Any]:
    """One sample: its work, its floor in seconds, and what selection takes for it there."""
    with Outlines():
        case = sample_case(operator, sample)
    cost = operator.cost(**case.args)
    floor = Floor.of(cost.flops, cost.bytes, case.dtype, machine)
    return {
        "op": operator.name,
        "case": case.id,
        "dtype": case.dtype,
        "phase": case.phase,
        "dims": dict(case.dims),
        "flops": cost.flops,
        "bytes": cost.bytes,
        "memory_seconds": floor.memory,
        "compute_seconds": floor.compute,
        "floor": floor.seconds,
        "bound": floor.bound,
        **_chosen(case.call(machine), selector),
    }


def _chosen(call: Call, selector: Selector) -> dict[str, Any]:
    """The provider, or why selection refuses every one."""
    try:
        decision = selector.decide(call)
    except DispatchError as error:
        return {"provider": None, "level": "E0", "policy": error.message, "reference": False, "parts": {}}
    return {
        "provider": decision.provider,
        "level": level_of(call.op, decision.provider, call.device.arch),
        "policy": decision.policy,
        "reference": decision.reference,
        "parts": _parts(decision),
    }


def _parts(decision: Decision) -> dict[str, Any]:
    return {op: {"provider": part.provider, "parts": _parts(part)} for op, part in decision.parts.items()}


def modelled_tables(report: Mapping[str, Any]) -> list[Table]:
    """One table, a row for each sample; its title and its notes say that nothing was measured."""
    machine, said = report["machine"], report["statement"]
    title = machine["title"] or machine["device"]
    header = ("case", "GFLOP", "MB", "modelled floor us", "bound by", "evidence", "would run")
    state = (said["commit"][:12] or "no commit") + ("-dirty" if said["dirty"] else "")
    notes = [
        "Modelled: nothing ran. The floor is the longer of the least bytes over the memory bandwidth and the FLOPs "
        "over the rate for the activations' dtype: with cold caches and in that dtype no kernel is faster.",
        f"{_limits(report['limits'])}. Source: {machine['source']}.",
        *machine["notes"],
        *_compositions(report),
        *([f"No floor on one chip, as they move data between ranks: {', '.join(report['left_out'])}."]
          if report["left_out"] else []),
        f"k3hal {said['version']} at {state}; {said['created']}",
    ]  # fmt: skip
    some = "" if report["op"] == "*" else f" {report['op']}"
    rows = [_cells(row) for row in report["results"]]
    return [Table(f"operators modelled {title}{some}", f"Operators on {title}, modelled", header, rows, notes)]


def _limits(limits: Mapping[str, Any]) -> str:
    memory = f"{limits['bytes_per_s'] / 1e12:.3g} TB/s" if limits["bytes_per_s"] else "unknown"
    rates = [
        f"{dtype} {f'{rate / 1e12:.5g} TFLOP/s' if rate else 'unknown'}"
        for dtype in ("float32", "bfloat16")
        for rate in (limits["flops_per_s"].get(dtype),)
    ]
    return f"Published limits: memory {memory}; {'; '.join(rates)}"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    floor = "unknown"
    if row["floor"] is not None:
        us = 1e6 * row["floor"]
        floor = ("at least " if row["bound"] == "unknown" else "") + (f"{us:.0f}" if us >= 100 else f"{us:.3g}")
    return (
        f"{row['op']} {row['case'].removeprefix(row['op'] + '-')}",
        f"{row['flops'] / 1e9:.4g}",
        f"{row['bytes'] / 1e6:.4g}",
        floor,
        row["bound"],
        row["level"],
        _runs(row),
    )


def _runs(row: Mapping[str, Any]) -> str:
    """The provider, with the parts of what is composed that run their reference; the other parts stand in a note."""
    if row["provider"] is None:
        return f"nothing: {row['policy']}".replace("|", "/")
    slow = [op for op, provider in _leaves(row["parts"]) if provider == "reference"]
    return row["provider"] + (f" (reference: {', '.join(slow)})" if slow else "")


def _leaves(parts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for op, part in parts.items():
        yield op, part["provider"]
        yield from _leaves(part["parts"])


def _compositions(report: Mapping[str, Any]) -> list[str]:
    """A note for each way in which an operator would be composed."""
    return list(
        dict.fromkeys(
            f"{row['op']} composed: {', '.join(f'{op} {provider}' for op, provider in _leaves(row['parts']))}."
            for row in report["results"]
            if row["parts"]
        )
    )
