"""Tables of a slice's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from k3hal.bench.tables import Table, where


def slice_tables(report: Mapping[str, Any]) -> list[Table]:
    """Decode, prefill, what is far from its floor, real steps of the engine, what returns, and the modelled whole."""
    makers = (_decode, _prefill, _operators, _engine, _returning, _modelled)
    return [table for maker in makers if (table := maker(report)) is not None]


def _key(report: Mapping[str, Any]) -> str:
    """What tells a report's tables from those of others on the same page."""
    return f"{report['model']['name']} {report['dtype']} {report['device'].partition(':')[0]}"


def words(tokens: int) -> str:
    """`128k`: tokens in units of 1024."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def why_not(row: Mapping[str, Any]) -> str:
    """Why a row of a report has no figures; empty where it has."""
    if not row["fits"]:
        return f"does not fit: needs {row['needs'] / 1e9:.1f} GB"
    return "" if "layers" in row else "left out: the time limit was over"


def _head(report: Mapping[str, Any]) -> str:
    layers = ", ".join(f"{count} {kind}" for kind, count in report["model"]["layers"].items())
    return f"{report['model']['name']} ({layers}) on {report['accelerator']}, {report['dtype']}"


def _notes(report: Mapping[str, Any]) -> list[str]:
    ceilings = report["ceilings"]
    floors = (
        f"Floors at {ceilings['bytes_per_s'] / 1e9:.0f} GB/s and {ceilings['flops_per_s'] / 1e12:.2f} TFLOP/s, "
        "measured in this run."
    )
    return [floors, where(report)]


def _micro(figure: Mapping[str, Any]) -> str:
    return f"{_digits(1e6 * figure['seconds'])} ({figure['seconds'] / figure['floor']:.2f}x)"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def _kinds(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(next((row["layers"] for row in rows if "layers" in row), {}))


def _decode(report: Mapping[str, Any]) -> Table | None:
    rows = report["decode"]
    if not rows:
        return None
    kinds, cells = _kinds(rows), []
    for row in rows:
        head = (str(row["batch"]), words(row["context"]))
        why = why_not(row)
        if not why:
            step, figures = row["step"], [_micro(row["layers"][kind]) for kind in kinds]
            launch = "" if step["launched"] is None else _digits(1e6 * step["launched"])
            cells.append((*head, *figures, _micro(step), launch, f"{row['batch'] / step['seconds']:.0f}"))
        else:
            blank = [""] * (len(kinds) + 2)
            cells.append((*head, *blank, why))
    title = f"{_head(report)}: decode, us (x the operators' floors)"
    header = ("sequences", "context", *kinds, "step", "launch", "tokens/s")
    return Table(f"slice decode {_key(report)}", title, header, cells, _notes(report))


def _prefill(report: Mapping[str, Any]) -> Table | None:
    rows = report["prefill"]
    if not rows:
        return None
    kinds, cells = _kinds(rows), []
    for row in rows:
        why = why_not(row)
        if not why:
            figures = [_micro(row["layers"][kind]) for kind in kinds]
            cells.append((words(row["tokens"]), *figures, _micro(row["step"]), f"{row['tokens_per_s']:.0f}"))
        else:
            blank = [""] * (len(kinds) + 1)
            cells.append((words(row["tokens"]), *blank, why))
    chunk = report["settings"]["max_num_batched_tokens"]
    title = f"{_head(report)}: prefill in chunks of {chunk}, us (x the operators' floors)"
    header = ("tokens", *kinds, "all", "tokens/s")
    return Table(f"slice prefill {_key(report)}", title, header, cells, _notes(report))


def _operators(report: Mapping[str, Any]) -> Table | None:
    """A column for each step; decode's only where an operator's work is not that of a step to the left."""
    columns = {
        f"{row['batch']} x {words(row['context'])}": row["layers"] for row in report["decode"] if "layers" in row
    }
    for row in report["prefill"]:
        for chunk in row.get("chunks", ()):
            columns.setdefault(f"prefill at {words(chunk['context'])}", chunk["layers"])
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for column, layers in columns.items():
        for kind, figure in layers.items():
            for part in figure.get("operators", ()):
                key = (kind, part["operator"], part["provider"])
                ratio = part["seconds"] / max(part["floor"], 1e-12)
                cells.setdefault(key, {})[column] = f"{_digits(1e6 * part['seconds'])} ({ratio:.2f}x)"
    if not cells:
        return None
    shown = [column for column in columns if any(column in row for row in cells.values())]
    rows = [(*key, *(row.get(column, "") for column in shown)) for key, row in sorted(cells.items(), key=_by_kind)]
    title = f"{_head(report)}: operators by themselves, us in a layer (x the floor)"
    header = ("layer", "operator", "provider", *shown)
    return Table(f"slice operators {_key(report)}", title, header, rows, _notes(report))


def _by_kind(item: tuple[tuple[str, str, str], Any]) -> str:
    """Rows keep their order within a kind of layer."""
    return item[0][0]


def _engine(report: Mapping[str, Any]) -> Table | None:
    rows = report["engine"]
    if not rows:
        return None
    parts = list(rows[0]["host"])
    header = ("sequences", "prompt", "prefill tokens/s", "step us (least to most)", "decode tokens/s", *parts, "idle")
    cells = []
    for row in rows:
        step, rates = row["step"], [f"{row[name]:.0f}" for name in ("prefill_tokens_per_s", "tokens_per_s")]
        spread = f"{_digits(1e6 * step['median'])} ({_digits(1e6 * step['min'])} to {_digits(1e6 * step['max'])})"
        host = [_digits(1e6 * row["host"][part]) for part in parts]
        idle = "" if row["idle"] is None else f"{100 * row['idle']:.1f} %"
        cells.append((str(row["batch"]), str(row["prompt"]), rates[0], spread, rates[1], *host, idle))
    depth, start = rows[0]["depth"], report["start_up"]["seconds"]
    title = f"{_head(report)}: the engine itself, {depth} steps planned at once, built in {start:.1f} s"
    notes = [
        f"The host's {', '.join(parts)} in us a step; idle: the device's share of time between steps.",
        where(report),
    ]
    return Table(f"slice engine {_key(report)}", title, header, cells, notes)


def _returning(report: Mapping[str, Any]) -> Table | None:
    # Reports made before this was measured have no such rows.
    rows = report.get("returning")
    if not rows:
        return None
    cells = []
    for row in rows:
        taken = {name: f"{1e3 * row['first_token'][name]:.2f}" for name in ("median", "min", "max")}
        spread = f"{taken['median']} ({taken['min']} to {taken['max']})"
        cells.append((words(row["tokens"]), f"{1e3 * row['cold']:.2f}", str(row["cached"]), spread))
    header = ("prompt", "first token ms", "cached when it returns", "first token ms then (least to most)")
    title = f"{_head(report)}: prompts whose head was answered before, one at a time"
    notes = [f"Each comes with {rows[0]['tail']} other tokens at its end.", where(report)]
    return Table(f"slice returning {_key(report)}", title, header, cells, notes)


def _modelled(report: Mapping[str, Any]) -> Table | None:
    rows = report["modelled"]
    if not rows:
        return None
    parts = list(rows[0]["parts"])
    cells = [
        (
            str(row["batch"]),
            words(row["context"]),
            *(f"{1e3 * row['parts'][part]:.2f}" for part in parts),
            f"{1e3 * row['seconds']:.2f}",
            f"{row['tokens_per_s']:.0f}",
        )
        for row in rows
    ]
    cost, name = report["settings"]["collective_us"], report["model"]["name"]
    title = f"MODELLED, not measured: a decode step of all 93 layers of Kimi K3 on ranks like {name}'s, ms"
    notes = [
        f"Added up from the layers' times above; a collective taken as {cost:g} us, whatever its size. Memory is not "
        "asked about.",
        where(report),
    ]
    header = ("sequences", "context", *parts, "step", "tokens/s")
    return Table(f"slice modelled {_key(report)}", title, header, cells, notes)
