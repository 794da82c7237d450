"""Prometheus metrics: ours under `k3hal_`, and under vLLM's names where dashboards already know one."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from k3hal.debug import shadow_figures
from k3hal.engine.interface import Engine, EngineStats, RequestTiming, TierStats

_OURS, _COMPAT = "k3hal_", "vllm:"
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
_LABELS = ("model_name", "engine")

# Without a counterpart in vLLM.
_ONLY_OURS = (
    "k3hal_shadow_compared",
    "k3hal_shadow_diverged",
    "k3hal_ready",
    "k3hal_client_disconnects",
    "k3hal_parser_recoveries",
    "k3hal_engine_steps",
    "k3hal_prefix_cache_usage_perc",
    "k3hal_prefix_cache_resumed_queries",
    "k3hal_prefix_cache_resumed_hits",
    "k3hal_prefix_cache_snapshots_evicted",
    "k3hal_prefix_cache_misses",
    "k3hal_external_prefix_cache_loads",
    "k3hal_external_prefix_cache_stores",
    "k3hal_external_prefix_cache_stores_dropped",
    "k3hal_external_prefix_cache_written",
    "k3hal_external_prefix_cache_write_errors",
    "k3hal_external_prefix_cache_evicted",
    "k3hal_external_prefix_cache_damaged",
    "k3hal_external_prefix_cache_stale",
    "k3hal_external_prefix_cache_failures",
    "k3hal_external_prefix_cache_host_bytes",
    "k3hal_external_prefix_cache_disk_bytes",
)


class Metrics:
    """Everything `/metrics` shows. Engine figures are read at scrape time; the rest is observed as requests end."""

    def __init__(self, engine: Engine, model_name: str, *, compat: bool) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._registry = CollectorRegistry()
        self._compat = compat
        self.ready = False
        self._registry.register(_EngineFigures(engine, self))
        self._registry.register(_ShadowFigures())

        def seconds(name: str, text: str) -> Histogram:
            return self._histogram(name, text, _SECONDS)

        self._ttft = seconds("time_to_first_token_seconds", "From the request's arrival to its first token.")
        self._inter_token = _TokenHistogram(_OURS + "inter_token_latency_seconds", "Between outputs, per token.", self)
        self._registry.register(self._inter_token)
        self._per_token = seconds("request_time_per_output_token_seconds", "Mean time per token after the first.")
        self._e2e = seconds("e2e_request_latency_seconds", "From the request's arrival to its last token.")
        self._queue = seconds("request_queue_time_seconds", "From arrival to being scheduled.")
        self._prefill = seconds("request_prefill_time_seconds", "From being scheduled to the first token.")
        self._decode = seconds("request_decode_time_seconds", "From the first to the last token.")
        self._inference = seconds("request_inference_time_seconds", "From being scheduled to the last token.")
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generated = self._histogram("request_generation_tokens", "Tokens generated for a sequence.", _TOKENS)
        self._longest = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest sequence of a request.", _TOKENS
        )
        self._n = self._histogram("request_params_n", "The n of a request.", _COUNTS)
        self._max_tokens = self._histogram("request_params_max_tokens", "The max_tokens of a request.", _TOKENS)
        self._success = self._counter("request_success", "Sequences finished.", "finished_reason")
        self._rejected = self._counter("admission_rejections", "Requests refused before they ran.", "reason")
        self._recoveries = self._counter("parser_recoveries", "Malformed outputs understood anyway.", "kind")
        self._disconnects = self._counter("client_disconnects", "Requests whose client left before the end.")

    def render(self) -> bytes:
        """The exposition text."""
        if not self._compat:
            return generate_latest(self._registry)
        both = CollectorRegistry()
        both.register(_WithCompatNames(self._registry))
        return generate_latest(both)

    def collect(self) -> Iterable[Metric]:
        """The metrics under their own names."""
        return self._registry.collect()

    def labels(self) -> dict[str, str]:
        return self._labels

    def accepted(self, prompt_tokens: int, n: int, max_tokens: int | None) -> None:
        self._prompt.observe(prompt_tokens)
        self._n.observe(n)
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)

    def answered(self, longest: int) -> None:
        """Every sequence of a request is complete; `longest` is the most tokens one of them has."""
        self._longest.observe(longest)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(**self._labels, reason=reason).inc()

    def disconnected(self) -> None:
        self._disconnects.labels(**self._labels).inc()

    def recovered(self, kinds: Iterable[tuple[str, int]]) -> None:
        for kind, count in kinds:
            self._recoveries.labels(**self._labels, kind=kind).inc(count)

    def follow(self) -> SequenceClock:
        return SequenceClock(self)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        self._inter_token.observe(seconds / tokens)

    def finished(self, reason: str, tokens: int, latency: float, decode: float, timing: RequestTiming | None) -> None:
        self._success.labels(**self._labels, finished_reason=reason).inc()
        self._generated.observe(tokens)
        self._e2e.observe(latency)
        if tokens > 1:
            self._per_token.observe(decode / (tokens - 1))
        if timing is not None and timing.scheduled and timing.first_token:
            self._queue.observe(timing.scheduled - timing.arrival)
            self._prefill.observe(timing.first_token - timing.scheduled)
            self._decode.observe(timing.finished - timing.first_token)
            self._inference.observe(timing.finished - timing.scheduled)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(_OURS + name, text, _LABELS, buckets=buckets, registry=self._registry)
        return made.labels(**self._labels)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_OURS + name, text, (*_LABELS, *labels), registry=self._registry)


class _TokenHistogram(Collector):
    """A histogram that is observed for every token, on the event loop only.

    prometheus_client's own takes two locks and walks over the buckets, which costs as much as parsing the token.
    """

    def __init__(self, name: str, text: str, metrics: Metrics) -> None:
        self._name, self._text, self._metrics = name, text, metrics
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(_SECONDS, value)] += 1
        self._sum += value

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(floatToGoString, _SECONDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._text, labels=_LABELS)
        family.add_metric(list(self._metrics.labels().values()), buckets, self._sum)
        yield family


class SequenceClock:
    """Times one sequence as the client sees it."""

    __slots__ = ("_first", "_last", "_metrics", "_start")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.monotonic()
        self._first = self._last = 0.0

    def tokens(self, count: int) -> None:
        """`count` tokens arrived."""
        if not count:
            return
        now = time.monotonic()
        if self._first:
            self._metrics.next_tokens(now - self._last, count)
        else:
            self._first = now
            self._metrics.first_token(now - self._start)
        self._last = now

    def finished(self, reason: str, tokens: int, timing: RequestTiming | None) -> None:
        self._metrics.finished(reason, tokens, time.monotonic() - self._start, self._last - self._first, timing)


class _EngineFigures(Collector):
    """The engine's own counts, read when scraped."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        gauges = {
            "num_requests_running": ("Sequences running.", stats.num_running),
            "num_requests_waiting": ("Sequences waiting.", stats.num_waiting),
            "kv_cache_usage_perc": ("Share of the cache in use, 1 is full.", stats.kv_usage),
            "prefix_cache_usage_perc": ("Share of the cache kept for later prompts, 1 is full.", stats.cached_usage),
            "ready": ("1 while the server takes traffic.", int(self._metrics.ready)),
        }
        counters = {
            "prompt_tokens": ("Prompt tokens taken in.", stats.prompt_tokens),
            "prompt_tokens_cached": ("Prompt tokens found in the cache.", stats.cached_prompt_tokens),
            "prefix_cache_queries": ("Tokens looked up in the prefix cache.", stats.prefix.prompt_tokens),
            "prefix_cache_hits": ("Tokens found in the prefix cache.", stats.prefix.cached_tokens),
            "prefix_cache_resumed_queries": (
                "Tokens of preempted sequences looked up when they came back.",
                stats.prefix.resumed_tokens,
            ),
            "prefix_cache_resumed_hits": ("Those of them that were found.", stats.prefix.resumed_cached_tokens),
            "prefix_cache_snapshots_evicted": ("States given up for memory.", stats.prefix.snapshots_evicted),
            "generation_tokens": ("Tokens generated.", stats.generation_tokens),
            "num_preemptions": ("Sequences preempted.", stats.preemptions),
            "engine_steps": ("Engine steps.", stats.steps),
        }
        values = list(self._metrics.labels().values())
        for kind, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in table.items():
                family = kind(_OURS + name, text, labels=_LABELS)
                family.add_metric(values, value)
                yield family
        yield self._sources(stats, values)
        yield self._misses(stats, values)
        if stats.tier is not None:
            yield from _tier_figures(stats.tier, values)

    def _sources(self, stats: EngineStats, values: list[str]) -> CounterMetricFamily:
        """Prompt tokens by where their states came from, under vLLM's names for it."""
        text = "Prompt tokens by where their states came from."
        family = CounterMetricFamily(_OURS + "prompt_tokens_by_source", text, labels=(*_LABELS, "source"))
        found = stats.cached_prompt_tokens
        family.add_metric([*values, "local_cache_hit"], found)
        family.add_metric([*values, "local_compute"], stats.prompt_tokens - found)
        return family

    def _misses(self, stats: EngineStats, values: list[str]) -> CounterMetricFamily:
        """Prompt tokens that were not found, by why; with the hits they make up all that were looked up."""
        text = "Prompt tokens not found in the prefix cache, by reason."
        family = CounterMetricFamily(_OURS + "prefix_cache_misses", text, labels=(*_LABELS, "reason"))
        for reason, tokens in stats.prefix.labels.items():
            family.add_metric([*values, reason], tokens)
        return family


def _tier_figures(tier: TierStats, values: list[str]) -> Iterator[Metric]:
    """The external tier's counts, where there is one."""
    counters = {
        "external_prefix_cache_queries": ("Tokens looked up in the external tier.", tier.queries),
        "external_prefix_cache_hits": ("Tokens that came from the external tier.", tier.hits),
        "external_prefix_cache_loads": ("Prefixes that came from the external tier.", tier.loads),
        "external_prefix_cache_stores": ("Objects stored in the external tier.", tier.stores),
        "external_prefix_cache_stores_dropped": ("Objects there was no room or time to store.", tier.stores_dropped),
        "external_prefix_cache_written": ("Objects written to the disk or store behind host memory.", tier.written),
        "external_prefix_cache_write_errors": ("Writes there that failed.", tier.write_errors),
        "external_prefix_cache_evicted": ("Objects given up for memory or disk space.", tier.evicted),
        "external_prefix_cache_damaged": ("Objects of an earlier run that were of no use.", tier.damaged),
        "external_prefix_cache_stale": ("Reports and data that came when nobody waited for them.", tier.stale),
    }
    gauges = {
        "external_prefix_cache_host_bytes": ("Host memory in use by the external tier.", tier.host_bytes),
        "external_prefix_cache_disk_bytes": ("Disk space in use by the external tier.", tier.backing_bytes),
    }
    for kind, table in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
        for name, (text, value) in table.items():
            family = kind(_OURS + name, text, labels=_LABELS)
            family.add_metric(values, value)
            yield family
    text = "Prefixes that the external tier had and that were computed after all, by reason."
    family = CounterMetricFamily(_OURS + "external_prefix_cache_failures", text, labels=(*_LABELS, "reason"))
    for reason, prefixes in tier.failures.items():
        family.add_metric([*values, reason], prefixes)
    yield family


class _ShadowFigures(Collector):
    """What `K3HAL_SHADOW` has found in this process, by operator; nothing where it shadows nothing."""

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        tables = {
            "shadow_compared": ("Operator calls compared with their reference.", shadow_figures.compared),
            "shadow_diverged": ("Operator calls that diverged from their reference.", shadow_figures.diverged),
        }
        for name, (text, table) in tables.items():
            if shadow_figures.compared:
                family = CounterMetricFamily(_OURS + name, text, labels=("op",))
                for op in shadow_figures.compared:
                    family.add_metric([op], table[op])
                yield family


class _WithCompatNames(Collector):
    """Another registry's metrics, each a second time under vLLM's name if it has one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            yield metric
            if metric.name in _ONLY_OURS:
                continue
            alias = Metric(_rename(metric.name), metric.documentation, metric.type)
            alias.samples = [Sample(_rename(s.name), *s[1:]) for s in metric.samples]
            yield alias


def _rename(name: str) -> str:
    return _COMPAT + name.removeprefix(_OURS)
