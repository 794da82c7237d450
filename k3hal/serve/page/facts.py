"""What the page shows: facts that stay, and the figures of `/metrics` in a form cheap enough to ask for each second."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from prometheus_client.metrics_core import Metric

from k3hal import __version__
from k3hal.serve.state import ServerState

# The page's name of a figure and the metric it is.
_FIGURES: Final = {
    "running": "k3hal_num_requests_running",
    "waiting": "k3hal_num_requests_waiting",
    "kv_usage": "k3hal_kv_cache_usage_perc",
    "cached_usage": "k3hal_prefix_cache_usage_perc",
    "prompt_tokens": "k3hal_prompt_tokens",
    "generation_tokens": "k3hal_generation_tokens",
    "prefix_queries": "k3hal_prefix_cache_queries",
    "prefix_hits": "k3hal_prefix_cache_hits",
    "preemptions": "k3hal_num_preemptions",
    "steps": "k3hal_engine_steps",
    "finished": "k3hal_request_success",
    "refused": "k3hal_admission_rejections",
}
_LATENCIES: Final = {"ttft": "k3hal_time_to_first_token_seconds", "itl": "k3hal_inter_token_latency_seconds"}


def about(state: ServerState) -> dict[str, Any]:
    """What holds as long as the server runs. `plan` is None where the engine has none."""
    info, config = state.engine.info, state.config
    return {
        "schema": "k3hal.about/1",
        "version": __version__,
        "started": state.created,
        "models": list(config.model_names),
        "device": info.device,
        "limits": {
            "max_model_len": info.max_model_len,
            "max_num_seqs": info.max_num_seqs,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "max_queue": info.max_queue,
        },
        "thinking": {
            "enabled": config.thinking.enabled,
            "effort": config.thinking.effort,
            "efforts": list(config.thinking.efforts),
        },
        "sampling": {name: config.generation_defaults.get(name, 1.0) for name in ("temperature", "top_p")},
        "plan": config.plan,
    }


def live(state: ServerState) -> dict[str, Any]:
    """The figures of now. `time` is in seconds and only for differences; counters are sums over their labels."""
    families = {metric.name: metric for metric in state.metrics.collect()}
    return {
        "schema": "k3hal.live/1",
        "time": time.monotonic(),
        "started": state.created,
        "status": state.status,
        "needs_key": state.keys.guards,
        **{name: _total(families[metric]) for name, metric in _FIGURES.items()},
        "latency": {name: _histogram(families[metric]) for name, metric in _LATENCIES.items()},
    }


def _total(metric: Metric) -> float:
    return sum(sample.value for sample in metric.samples if not sample.name.endswith("_created"))


def _histogram(metric: Metric) -> Mapping[str, Any]:
    """Cumulative `counts` of samples up to each of `bounds` (seconds) and beyond the last, and the `sum` of all."""
    buckets = [(float(s.labels["le"]), s.value) for s in metric.samples if s.name.endswith("_bucket")]
    return {
        "bounds": [bound for bound, _ in buckets[:-1]],
        "counts": [count for _, count in buckets],
        "sum": _only(s.value for s in metric.samples if s.name.endswith("_sum")),
    }


def _only(values: Iterable[float]) -> float:
    (value,) = values
    return value
