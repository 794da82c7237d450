"""The report of timed operators, and its tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from k3hal.bench.tables import Table
from k3hal.conform.environment import device_json, statement, versions
from k3hal.dispatch.registry import default_registry

if TYPE_CHECKING:
    from k3hal.debug.bench import Timing
    from k3hal.debug.ceilings import Ceilings
    from k3hal.dispatch.device import DeviceDescription

SCHEMA = "k3hal.op_bench/1"
_NO_LIBRARIES = frozenset({"k3hal", "python", "numpy", "cpu", "compiler"})


def operators_report(
    op: str,
    device: DeviceDescription,
    ceilings: Mapping[str, Ceilings],
    timings: Sequence[Timing],
    left_out: Iterable[Sequence[str]] = (),
) -> dict[str, Any]:
    """What `--json` prints and `--save` keeps: the machine, its ceilings, and every timing."""
    registry = default_registry()
    return {
        "op": op,
        "device": device.id,
        "machine": device_json(device),
        "versions": versions(device, registry, registry.backends),
        "statement": statement().to_json(),
        "ceilings": {dtype: asdict(limit) for dtype, limit in ceilings.items()},
        "results": [timing.to_json() for timing in timings],
        "left_out": [list(key) for key in left_out],
    }


def operator_tables(report: Mapping[str, Any]) -> list[Table]:
    """One table, a row for each provider on each case. Runs of other operators have tables of other names."""
    machine = report["machine"]
    title = machine["title"] or machine["device"]
    on = "cold" if any(row["cache"] == "cold" for row in report["results"]) else "warm"
    header = ("case", "provider", "us", "of floor", "of copy", "of matmul", "in a row us", "spread", "how")
    notes = [
        "; ".join(
            f"{dtype}: copy {limit['bytes_per_s'] / 1e12:.3g} TB/s, matmul {limit['flops_per_s'] / 1e12:.4g} TFLOP/s"
            for dtype, limit in report["ceilings"].items()
        )
        + ", measured in the same run.",
        *(["No time was left for " + ", ".join("/".join(key) for key in report["left_out"]) + "."]
          if report["left_out"] else []),
        _where(report),
    ]  # fmt: skip
    rows = [_row(row, report["ceilings"]) for row in report["results"] if row["status"] != "NotSupported"]
    some = "" if report["op"] == "*" else f" {report['op']}"
    return [Table(f"operators {title}{some}", f"Operators on {title}, caches {on}", header, rows, notes)]


def _row(row: Mapping[str, Any], ceilings: Mapping[str, Any]) -> tuple[str, ...]:
    name = f"{row['op']} {row['case'].removeprefix(row['op'] + '-')}"
    problems = [*row["problems"], *(t["problem"] for t in row["tensors"] if t["problem"])]
    if not row["seconds"]:
        why = "; ".join([*problems, row["why"]])
        return (name, row["provider"], row["status"], "", "", "", "", "", why.strip("; ")[:120].replace("|", "/"))
    limit = ceilings[row["dtype"]]
    seconds = row["seconds"]
    return (
        name,
        row["provider"],
        micro(seconds),
        f"{seconds / row['floor']:.2f}x" if row["floor"] else "",
        f"{100 * row['bytes'] / seconds / limit['bytes_per_s']:.0f} %",
        f"{100 * row['flops'] / seconds / limit['flops_per_s']:.0f} %",
        micro(row["in_a_row"]) if row["in_a_row"] else "",
        f"{row['spread']:.2f}",
        how(row) + (f"; it fails: {problems[0][:80]}".replace("|", "/") if problems else ""),
    )


def how(row: Mapping[str, Any]) -> str:
    """How a time was taken, in words."""
    copies = f", {row['copies']} copies" if row["copies"] > 1 else ""
    return f"{row['method']}{copies}" + (f": {row['why']}" if row["why"] else "")


def micro(seconds: float) -> str:
    """Microseconds with three digits that matter."""
    value = 1e6 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _where(report: Mapping[str, Any]) -> str:
    machine, said, packages = report["machine"], report["statement"], report["versions"]
    first = [name for name in ("torch", "triton", "cuda", "rocm") if name in packages]
    names = [*first, *sorted(packages.keys() - {*first, *_NO_LIBRARIES})]
    found = ", ".join(f"{name} {packages[name]}" for name in names)
    state = (said["commit"][:12] or "no commit") + ("-dirty" if said["dirty"] else "")
    title = f"{machine['title'] or machine['device']} ({machine['arch']})"
    return f"{title}, k3hal {said['version']} at {state}, {found}; {said['created']}"
