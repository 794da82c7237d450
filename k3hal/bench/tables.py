"""Reports as tables: the same cells for a terminal and for a page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3hal.bench.steps import PARTS

PLAN_PARTS = ("requests", "decide", "bind")


@dataclass(frozen=True, slots=True)
class Table:
    """`name` identifies the table on a page; `notes` are lines under it."""

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Aligned columns, the first one to the left."""
        lines = [list(self.header), *map(list, self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        aligned = [
            "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
            for line in lines
        ]
        return "\n".join([self.title, *aligned, *self.notes])

    def markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.header) - 1)]
        rows = [f"| {' | '.join(cells)} |" for cells in (self.header, rule, *self.rows)]
        return "\n".join([self.title, "", *rows, "", *(f"{note}  " for note in self.notes)]).rstrip()


def engine_tables(report: Mapping[str, Any]) -> list[Table]:
    """Rates of every engine and concurrency, then the parts of a step."""
    model = f"{report['model']['name']}, {report['dtype']}"
    key = f"engine {report['model']['name']} {report['dtype']}"
    sizes = f"{report['settings']['prompt_tokens']} prompt and {report['settings']['output_tokens']} output tokens"
    rows = [row for result in report["results"] for row in _rate_rows(result, report["settings"]["peer"])]
    header = ("concurrency", "engine", "decode tokens/s", "of floor", "prefill tokens/s", "first token ms", "ratio")
    band = report["bandwidth"]
    notes = [
        *_verdict(report),
        f"Floor at {_gb(band['best'])}/s (copy {_gb(band['copy']['median'])}/s, read {_gb(band['read']['median'])}/s): "
        + "; ".join(_floor(result) for result in report["results"])
        + ".",
        *_references(report),
        where(report),
    ]
    rates = Table(key, f"{model}, {sizes}, {report['settings']['repeat']} runs: median (least to most)", header, rows)
    return [
        Table(rates.name, rates.title, rates.header, rates.rows, notes),
        Table(
            f"steps {report['model']['name']} {report['dtype']}",
            f"{model}: parts of a decode step of k3hal",
            ("concurrency", "step ms", *PARTS, "scheduling + batch"),
            [_part_row(result) for result in report["results"]],
            [where(report)],
        ),
    ]


def dispatch_tables(report: Mapping[str, Any]) -> list[Table]:
    """Calls, then plans."""
    calls = [
        (name, *(_spread(call[kind], 1.0) for kind in ("bound_ns", "direct_ns", "overhead_ns")))
        for name, call in report["calls"].items()
    ]
    plans = [
        (name, str(plan["layers"]), str(plan["entries"]), *(_spread(plan[part], 1e3) for part in PLAN_PARTS))
        for name, plan in report["plans"].items()
    ]
    bound = ", ".join(f"{count} {kind}" for kind, count in report["bound"].items())
    pairs = f"{report['repeat']} pairs: median (least to most)"
    return [
        Table(
            "dispatch calls",
            f"A bound call against a direct one, ns a call, {pairs}",
            ("call", "bound", "direct", "overhead"),
            calls,
            [f"Bound in nano's plan: {bound}; limit {report['limit_ns']:.0f} ns.", where(report)],
        ),
        Table(
            "dispatch plans",
            f"Making a dispatch plan, ms, {pairs}",
            ("model", "layers", "entries", *PLAN_PARTS),
            plans,
            [where(report)],
        ),
    ]


def dump_tables(report: Mapping[str, Any]) -> list[Table]:
    """What an armed recorder costs."""
    name = f"{report['model']['name']} {report['dtype']}"
    rows = [
        (str(result["concurrency"]), arm, _spread(times["step"], 1e3), _spread(times["ratio"], 1.0, digits=3))
        for result in report["results"]
        for arm, times in result["arms"].items()
    ]
    title = f"{name.replace(' ', ', ')}: a decode step with `K3HAL_DUMP` armed and silent"
    rounds = f"{report['settings']['rounds']} rounds of {report['block']} steps: median (least to most)"
    return [
        Table(
            f"dump {name}",
            f"{title}, {rounds}",
            ("concurrency", "arm", "step ms", "ratio"),
            rows,
            [f"Limit of nonfinite {report['limit']}.", where(report)],
        )
    ]


def where(report: Mapping[str, Any]) -> str:
    """One line about machine, versions and date."""
    machine, versions = report["machine"], report["versions"]
    packages = ", ".join(f"{name} {v}" for name, v in versions.items() if v and name not in ("k3hal", "commit"))
    commit = versions["commit"] or "no commit"
    return (
        f"{machine['cpu']}, {machine['threads']} threads on {machine['cores']} cores ({machine['isa']}), "
        f"load {machine['load']}; k3hal {versions['k3hal']} at {commit}, {packages}; {report['date']}"
    )


def _rate_rows(result: Mapping[str, Any], peer: str | None) -> list[tuple[str, ...]]:
    ratio = _spread(result["ratio"], 1.0, "x") if result["ratio"] else "" if peer is None else "outputs differ"
    rows = [(str(result["concurrency"]), "k3hal", *_rates(result["ours"]), ratio)]
    if result["peer"]:
        rows.append((str(result["concurrency"]), str(peer), *_rates(result["peer"]), ""))
    return rows


def _rates(summary: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        _spread(summary["decode_tokens_per_s"], 1.0),
        f"{100 * summary['floor_share']:.1f} %",
        _spread(summary["prefill_tokens_per_s"], 1.0),
        _spread(summary["ttft"], 1e3),
    )


def _part_row(result: Mapping[str, Any]) -> tuple[str, ...]:
    parts = result["breakdown"]
    shares = [f"{100 * parts['share'][name]:.1f} %" for name in PARTS]
    both = f"{100 * parts['scheduling_and_batch_share']:.1f} %"
    return (str(result["concurrency"]), _spread(parts["step"], 1e3), *shares, both)


def _verdict(report: Mapping[str, Any]) -> list[str]:
    if report["outputs_equal"] is None:
        return []
    if report["outputs_equal"]:
        return ["Both engines gave the same tokens before anything was timed."]
    places = [(r["concurrency"], r["difference"]) for r in report["results"] if r["difference"]]
    return [
        f"No ratio at concurrency {concurrency}: outputs differ from output token {place['position']} of prompt "
        f"{place['prompt']} on."
        for concurrency, place in places
    ]


def _floor(result: Mapping[str, Any]) -> str:
    floor = result["floor"]
    return (
        f"{floor['bytes'] / 1e6:.1f} MB a step at {result['concurrency']} "
        f"({floor['experts_touched']:.0f} of {floor['experts_total']} experts)"
    )


def _references(report: Mapping[str, Any]) -> list[str]:
    slow = [op for op, provider in report["providers"].items() if "reference" in provider]
    return [f"Operators left to their reference: {', '.join(slow)}."] if slow else []


def _spread(spread: Mapping[str, float], scale: float, unit: str = "", digits: int | None = None) -> str:
    """`digits` after the point, else three that matter."""
    values = [spread[key] * scale for key in ("median", "min", "max")]
    median, low, high = (_number(value) if digits is None else f"{value:.{digits}f}" for value in values)
    return f"{median}{unit} ({low} to {high})"


def _number(value: float) -> str:
    """Three digits that matter."""
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB"
