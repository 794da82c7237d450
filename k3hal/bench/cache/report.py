"""One `bench cache` report: settings in, plain data out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from k3hal.bench.cache.capacity import capacity_report
from k3hal.bench.cache.oracle import foresee
from k3hal.bench.cache.outside import SimulatedTier
from k3hal.bench.cache.replay import Replay, ReplayResult, ReplaySettings
from k3hal.bench.cache.trace import Trace
from k3hal.bench.cache.units import UnitSequences
from k3hal.bench.cache.vllm_peer import run_peer
from k3hal.engine.cache.geometry import CacheGeometry, k3_geometry
from k3hal.errors import UsageError

SCHEMA = "k3hal.bench_cache/1"

POLICIES = ("cost", "second-hit", "prompt", "interval:4096", "none")
"""Those a picture compares."""

SWEEP = (1.0, 2.0, 4.0, 8.0)
"""Budgets of a picture, as multiples of `--budget-gb`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBench:
    """What to run. `budget` bytes of one rank; `concurrency` 1 is serial; `host` and `disk` bytes of
    one rank are an external tier's, none without `host`; a `peer` runs at TP8 with fp8 KV only."""

    budget: int
    policy: str = "cost"
    tp: int = 8
    kv: Literal["fp8", "bf16"] = "fp8"
    concurrency: int = 1
    match_unit: int = 128
    host: int = 0
    disk: int = 0
    oracle: bool = False
    peer: bool = False
    peer_python: Path | None = None
    capacity: bool = False
    micro: bool = False
    sweep: bool = False

    @property
    def geometry(self) -> CacheGeometry:
        return k3_geometry(self.tp, self.kv)


LIMITS = {"step_256_us": 500.0, "hash_lookup_12k_us": 300.0, "pages_100_us": 10.0, "index_bytes_per_unit": 200.0}
"""What the project set itself for its bookkeeping."""

_UNITS = 1_000_000
"""Match units in the index whose memory is measured."""

Say = Callable[[str], None]


def bench_cache(settings: CacheBench, trace: Trace | None, say: Say) -> dict[str, Any]:
    """Run what `settings` ask for; without a trace only capacity and bookkeeping. Raises `UsageError`."""
    from k3hal.bench.machine import circumstances

    if settings.peer and (settings.tp, settings.kv) != (8, "fp8"):
        raise UsageError("--peer vllm compares at --tp 8 and --kv fp8 only", hint="leave --tp and --kv away")
    report: dict[str, Any] = {**circumstances(), "settings": _settings(settings)}
    geometry = settings.geometry
    if settings.capacity:
        report["capacity"] = capacity_report(geometry, settings.budget)
    if trace is not None:
        report |= _replayed(settings, trace, say)
    if settings.micro:
        from k3hal.bench.cache.micro import measure

        say("bookkeeping alone")
        report["micro"] = {"k3hal": measure(units=_UNITS), "limits": LIMITS}
    if settings.peer:
        say("vLLM's manager on the same prompts")
        peer = run_peer(trace, [settings.budget], python=settings.peer_python, micro=settings.micro)
        report["peer"] = {
            "name": "vllm",
            "version": peer["version"],
            "hit_rate": peer["hit_rates"][0] if peer["hit_rates"] else None,
            "micro": peer["micro"],
        }
    return report


def _settings(settings: CacheBench) -> dict[str, Any]:
    return {
        "budget": settings.budget,
        "policy": settings.policy,
        "tp": settings.tp,
        "kv": settings.kv,
        "mode": "serial" if settings.concurrency == 1 else f"concurrent:{settings.concurrency}",
        "match_unit": settings.match_unit,
        "host": settings.host,
        "disk": settings.disk,
        "page_bytes": settings.geometry.page_bytes,
        "snapshot_bytes": settings.geometry.run_bytes,
    }


def _replayed(settings: CacheBench, trace: Trace, say: Say) -> dict[str, Any]:
    described = {
        "name": trace.name,
        "requests": len(trace),
        "prompt_tokens": trace.prompt_tokens,
        "output_tokens": trace.output_tokens,
        **trace.details,
    }
    result = _replay(settings, trace, settings.policy, settings.budget, say)
    report: dict[str, Any] = {"trace": described, **_figures(result)}
    if result.tier:
        say("the same without the external tier")
        alone = _replay(replace(settings, host=0, disk=0), trace, settings.policy, settings.budget, say)
        report["tier"] = _outside(result.tier, result.stats.prompt_tokens, alone.hit_rate)
    if settings.oracle or settings.sweep:
        say("the oracle")
        sequences = UnitSequences.of(trace, settings.match_unit)
        if settings.oracle:
            report |= _oracle(settings, sequences, settings.budget)
        if settings.sweep:
            report["sweep"] = _sweep(settings, trace, sequences, say)
    return report


def _replay(settings: CacheBench, trace: Trace, policy: str, budget: int, say: Say) -> ReplayResult:
    say(f"{policy} at {budget / 1e9:.4g} GB")
    chosen = ReplaySettings(
        geometry=settings.geometry,
        budget=budget,
        policy=policy,
        concurrency=settings.concurrency,
        tp=settings.tp,
        match_unit=settings.match_unit,
        host=settings.host,
        disk=settings.disk,
    )
    return Replay(trace, chosen).run()


def _figures(result: ReplayResult) -> dict[str, Any]:
    """The pinned keys, and what explains them."""
    stats = result.stats
    return {
        "hit_rate": result.hit_rate,
        "decoded_reuse_rate": result.answer_hits / result.answer_tokens if result.answer_tokens else None,
        "saved_flops": result.saved_flops,
        "saved_flops_rate": result.saved_flops / max(result.prompt_flops, 1.0),
        "recomputed_tokens": result.recomputed_tokens,
        "copies_bytes": stats.pages_copied * result.page_bytes,
        "extra_splits": stats.stops,
        "labels": dict(stats.labels),
        "cached_tokens": stats.cached_tokens,
        "prompt_tokens": stats.prompt_tokens,
        "preemptions": result.preemptions,
        "resumed": {"requests": stats.resumed_requests, "tokens": stats.resumed_tokens},
        "snapshots": {"taken": stats.snapshots_taken + stats.snapshots_kept_at_end, "evicted": stats.snapshots_evicted},
        "steps": result.steps,
        "simulated_seconds": result.simulated,
        "admission_us": _percentiles(result.admissions),
        "admission_cpu_us": _percentiles(result.admission_cpu),
        "step_us": _percentiles(result.step_times),
    }


def _outside(tier: SimulatedTier, prompt_tokens: int, alone: float) -> dict[str, Any]:
    """What the tier did; `alone` is the hit rate without it. Tokens that came from it count in `hit_rate`."""
    stats = tier.stats
    return {
        "hit_rate_without": alone,
        "hit_rate_from_tier": stats.hits / max(prompt_tokens, 1),
        "loads": stats.loads,
        "stores": stats.stores,
        "stores_dropped": stats.stores_dropped,
        "evicted": stats.evicted,
        "failures": stats.failures,
        "bytes_in": tier.bytes_in,
        "bytes_out": tier.bytes_out,
        "disk_bytes_read": tier.disk_bytes_read,
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    p50, p99 = (np.percentile(seconds, [50, 99]) * 1e6).tolist()
    return {"p50": p50, "p99": p99}


def _oracle(settings: CacheBench, sequences: UnitSequences, budget: int) -> dict[str, float]:
    geometry = settings.geometry
    unit_bytes = geometry.page_bytes * settings.match_unit // geometry.page_tokens
    known = foresee(sequences, unit_bytes=unit_bytes, snapshot_bytes=geometry.run_bytes, budget=budget)
    return {
        "oracle_hit_rate": known.reference,
        "bound_hit_rate": known.bound,
        "ceiling_hit_rate": known.ceiling,
    }


def _sweep(settings: CacheBench, trace: Trace, sequences: UnitSequences, say: Say) -> dict[str, Any]:
    """Hit rates of every policy, the oracle, the bound and the peer, over the budgets that hold the longest request."""
    geometry, longest = settings.geometry, max(r.prompt_tokens + r.output.size for r in trace) + 1
    least = (geometry.pages_for(longest) + 3 * geometry.pages_per_slot) * geometry.page_bytes
    budgets = [budget for factor in SWEEP if (budget := int(settings.budget * factor)) >= least]
    policies = tuple(dict.fromkeys((settings.policy, *POLICIES)))
    lines = {p: [_replay(settings, trace, p, budget, say).hit_rate for budget in budgets] for p in policies}
    known = [_oracle(settings, sequences, budget) for budget in budgets]
    peer = None
    if settings.peer:
        say("vLLM's manager at every budget")
        peer = run_peer(trace, budgets, python=settings.peer_python, micro=False)["hit_rates"]
    return {
        "budgets": budgets,
        "policies": lines,
        "oracle": [point["oracle_hit_rate"] for point in known],
        "bound": [point["bound_hit_rate"] for point in known],
        "peer": peer,
    }
