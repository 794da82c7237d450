"""The report of `bench serve` as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3hal.bench.serve.report import remarks
from k3hal.bench.tables import Table, where

_LATENCIES = {
    "ttft": "first token",
    "tpot": "per token",
    "itl": "between pieces",
    "e2el": "whole answer",
    "queue_time": "queued in the server",
    "client_queue_time": "held back by the client",
    "client_late": "client late",
    "pace_delay": "behind the pace",
}
_COLUMNS = ("mean", "median", "p95", "p99")


def serve_tables(report: Mapping[str, Any]) -> list[Table]:
    """Latencies, then rates and costs."""
    settings = report["settings"]
    name = f"{report['model_id']} {_load(report)}"
    title = f"{report['num_prompts']} requests, {_load(report)}, {_source(settings)}, to {settings['endpoint']}"
    rows = [
        (label, *(_ms(report.get(f"{column}_{key}_ms")) for column in _COLUMNS))
        for key, label in _LATENCIES.items()
        if _shown(report, key)
    ]
    return [
        Table(f"serve {name}", f"{title}: latency, ms", ("latency", *_COLUMNS), rows, remarks(dict(report))),
        Table(f"serve rates {name}", f"{title}: rates and costs", ("figure", "value"), _rates(report), [where(report)]),
    ]


def _shown(report: Mapping[str, Any], key: str) -> bool:
    if report.get(f"mean_{key}_ms") is None:
        return False
    return key != "client_queue_time" or report["max_concurrency"] is not None


def _load(report: Mapping[str, Any]) -> str:
    rate, limit = report["request_rate"], report["max_concurrency"]
    text = "at the trace's times" if rate is None else "all at once" if rate == "inf" else f"{rate:g} a second"
    pace = report["settings"]["paced"]
    return text + (f", at most {limit} at once" if limit else "") + (f", paced at {pace:g} tokens/s" if pace else "")


def _source(settings: Mapping[str, Any]) -> str:
    if settings["dataset"] != "synthetic":
        return settings["dataset"]
    return f"{settings['input_len']} prompt and {settings['output_len']} output tokens"


def _rates(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("duration s", f"{report['duration']:.2f}"),
        ("completed, failed", f"{report['completed']}, {report['failed']}"),
        ("requests/s", f"{report['request_throughput']:.2f}"),
        ("output tokens/s", f"{report['output_throughput']:.1f}"),
        ("prompt and output tokens/s", f"{report['total_token_throughput']:.1f}"),
        ("pieces of text for a token", _ratio(report["total_pieces"], report["total_output_tokens"])),
        ("most at once", str(report["max_concurrent_requests"])),
        ("prompt tokens, cached", f"{report['total_input_tokens']:,}, {report['total_cached_tokens']:,}"),
    ]
    if report["request_goodput"] is not None:
        objectives = " ".join(f"{name}:{limit:g}" for name, limit in report["settings"]["goodput"].items())
        share = f"{100 * report['goodput_share']:.1f} %"
        rows.append((f"good requests/s ({objectives})", f"{report['request_goodput']:.2f}, {share}"))
    if report["wrong_answers"] is not None:
        rows.append(("answers with lost or doubled tokens", str(report["wrong_answers"])))
    for side in ("client", "server"):
        cost = report[f"{side}_cpu_us_per_token"]
        if cost is not None:
            rows.append((f"{side} CPU us/token", f"{cost:.1f} ({100 * report[f'{side}_cpu_share']:.0f} % of a core)"))
    if report["server_memory_after"]:
        before, after = report["server_memory_before"] / 1e6, report["server_memory_after"] / 1e6
        rows.append(("server MB, before and after", f"{before:.0f}, {after:.0f}"))
    return rows


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.2f}" if whole else ""


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
