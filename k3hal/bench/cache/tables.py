"""`bench cache` reports as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from k3hal.bench.tables import Table, where

_MICRO = {
    "step_256_us": ("a decode step of 256, µs", "{:.0f}"),
    "hash_lookup_12k_us": ("hash and look up 12,000 tokens, µs", "{:.0f}"),
    "next_turn_us": ("the next turn of such a prompt, µs", "{:.1f}"),
    "pages_100_us": ("take and return 100 pages, µs", "{:.1f}"),
    "index_bytes_per_unit": ("index of 1,000,000 match units, bytes each", "{:.0f}"),
}


def cache_tables(report: Mapping[str, Any]) -> list[Table]:
    """Those of the parts that ran, the machine under the last."""
    tables: list[Table] = []
    if "trace" in report:
        tables.append(_replay(report))
    if "sweep" in report:
        tables.append(_sweep(report))
    if "micro" in report:
        tables.append(_micro(report))
    if "capacity" in report:
        tables += _capacity(report)
    last = tables.pop()
    return [*tables, Table(last.name, last.title, last.header, last.rows, [*last.notes, where(report)])]


def _what(report: Mapping[str, Any]) -> str:
    settings = report["settings"]
    return f"{Path(report['trace']['name']).name}, TP{settings['tp']}, {settings['kv']} KV, {settings['mode']}"


def _replay(report: Mapping[str, Any]) -> Table:
    settings, total = report["settings"], report["prompt_tokens"]
    rows: list[tuple[str, str]] = [("hit rate", _percent(report["hit_rate"]))]
    if "oracle_hit_rate" in report:
        rows += [
            ("the oracle's", _percent(report["oracle_hit_rate"])),
            ("proven bound", _percent(report["bound_hit_rate"])),
            ("unlimited memory", _percent(report["ceiling_hit_rate"])),
        ]
    if report.get("peer", {}).get("hit_rate") is not None:
        rows.append((f"vLLM {report['peer']['version']}", _percent(report["peer"]["hit_rate"])))
    rows += _tier(report.get("tier"))
    reuse = report["decoded_reuse_rate"]
    rows += [
        ("decoded tokens found again", "none came back" if reuse is None else _percent(reuse)),
        ("FLOPs saved", f"{_percent(report['saved_flops_rate'])}, {report['saved_flops']:.3g}"),
        *((f"missed: {label}", _percent(tokens / total)) for label, tokens in report["labels"].items()),
        ("computed again", f"{report['recomputed_tokens']:,} tokens"),
        ("copied", f"{report['copies_bytes'] / 1e9:.1f} GB"),
        ("chunks split", f"{report['extra_splits']:,}"),
        ("snapshots taken, given up", "{taken:,}, {evicted:,}".format(**report["snapshots"])),
        ("preemptions", f"{report['preemptions']:,}"),
        ("admission µs, p50 and p99", _pair(report["admission_us"])),
        ("of processor time", _pair(report["admission_cpu_us"])),
        ("step µs, p50 and p99", _pair(report["step_us"])),
    ]
    trace = report["trace"]
    title = f"{_what(report)}, {settings['budget'] / 1e9:.4g} GB{_outside(settings)}, policy {settings['policy']}"
    tokens = f"{trace['prompt_tokens']:,} prompt and {trace['output_tokens']:,} output tokens"
    return Table(
        f"cache {title}", title, ("", settings["policy"]), rows, [f"{trace['requests']:,} requests, {tokens}."]
    )


def _outside(settings: Mapping[str, Any]) -> str:
    """The sizes of the external tier, where there is one; reports of earlier versions have none."""
    sizes = [(settings.get(kind, 0), kind) for kind in ("host", "disk")]
    return "".join(f" + {size / 1e9:.4g} GB {kind}" for size, kind in sizes if size)


def _tier(tier: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if tier is None:
        return []
    failed = ", ".join(f"{count:,} {reason}" for reason, count in tier["failures"].items() if count)
    return [
        ("without the external tier", _percent(tier["hit_rate_without"])),
        ("came from the tier", f"{_percent(tier['hit_rate_from_tier'])}, {tier['loads']:,} prefixes"),
        ("moved to and from it", f"{tier['bytes_out'] / 1e9:.1f} GB, {tier['bytes_in'] / 1e9:.1f} GB"),
        ("did not come", failed or "none"),
    ]


def _sweep(report: Mapping[str, Any]) -> Table:
    sweep = report["sweep"]
    header = ("hit rate", *(f"{budget / 1e9:.4g} GB" for budget in sweep["budgets"]))
    rows = [(policy, *map(_percent, rates)) for policy, rates in sweep["policies"].items()]
    if sweep["peer"]:
        rows.append((f"vLLM {report['peer']['version']}", *map(_percent, sweep["peer"])))
    rows += [("oracle", *map(_percent, sweep["oracle"])), ("proven bound", *map(_percent, sweep["bound"]))]
    mine = sweep["policies"][report["settings"]["policy"]]
    shares = [_percent(rate / best) for rate, best in zip(mine, sweep["oracle"], strict=True)]
    rows.append((f"{report['settings']['policy']} of oracle", *shares))
    return Table(f"cache sweep {_what(report)}", _what(report), header, rows)


def _micro(report: Mapping[str, Any]) -> Table:
    ours, limits = report["micro"]["k3hal"], report["micro"]["limits"]
    theirs = (report.get("peer") or {}).get("micro") or {}
    rows = []
    for key in ours:
        name, form = _MICRO[key]
        cells = [form.format(values[key]) if key in values else "" for values in (ours, limits, theirs)]
        rows.append((name, *cells))
    peer = f"vLLM {report['peer']['version']}" if theirs else ""
    header = ("median", "k3hal", "limit", peer) if theirs else ("median", "k3hal", "limit")
    return Table(
        "cache bookkeeping", "Bookkeeping of scheduler and cache", header, [row[: len(header)] for row in rows]
    )


def _capacity(report: Mapping[str, Any]) -> Sequence[Table]:
    settings, capacity = report["settings"], report["capacity"]
    budget = f"TP{settings['tp']}, {settings['kv']} KV, {capacity['budget'] / 1e9:.4g} GB"
    rows = [
        (
            f"{row['context']:,}",
            str(row["concurrency"]),
            f"{row['reserved'] / 1e9:.2f} GB",
            f"{100 * row['waste']:.2f} %",
            "yes" if row["fits"] else "no",
            f"{row['most']:,}",
        )
        for row in capacity["rows"]
    ]
    padding = [
        (
            f"TP{row['tp']} {row['kv']}",
            f"{row['page_bytes']:,}",
            f"{row['snapshot_bytes']:,}",
            str(row["snapshot_pages"]),
            f"{100 * row['waste']:.2f} %",
        )
        for row in capacity["padding"]
    ]
    return [
        Table(
            f"cache capacity {budget}",
            f"Sequences that fit: {budget}",
            ("context", "sequences", "memory", "waste", "fit", "most"),
            rows,
            ["Waste is padding of states; the last page of a context that is no whole number of pages adds to it."],
        ),
        Table(
            "cache padding",
            "Padding of a state snapshot, in whole pages",
            ("ranks and KV", "page bytes", "snapshot bytes", "pages", "waste"),
            padding,
        ),
    ]


def _percent(rate: float) -> str:
    return f"{100 * rate:.1f} %"


def _pair(times: Mapping[str, float]) -> str:
    return f"{times['p50']:.0f}, {times['p99']:.0f}"
