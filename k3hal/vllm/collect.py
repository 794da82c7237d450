"""A server's workers as Prometheus metrics, read from their boards when scraped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from k3hal.vllm.figures import Figures, read_instance

_LABELS = ("model_name", "engine", "rank")
_COUNTERS = {
    "steps": ("k3hal_engine_steps", "Forward passes of the model.", ""),
    "tokens": ("k3hal_engine_step_tokens", "Tokens of all forward passes.", ""),
    "dumped": ("k3hal_dumped_cases", "Operator calls recorded by K3HAL_DUMP.", ""),
    "shadow_compared": ("k3hal_shadow_compared", "Operator calls compared with their reference.", "op"),
    "shadow_diverged": ("k3hal_shadow_diverged", "Operator calls that diverged from their reference.", "op"),
}
"""By the part of a figure's name before the slash: metric, help, and the label that the part after it is."""
_PLAN_LABELS = (*_LABELS, "op", "phase", "provider", "level")


class Served(NamedTuple):
    """One engine of a server: its boards' instance and data-parallel rank, and the name its metrics bear."""

    instance: str
    engine: int
    model_name: str


class WorkerFigures(Collector):
    """The figures of every engine in `served` that has a worker on this machine."""

    def __init__(self) -> None:
        self.served: list[Served] = []

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        found = [
            ((each.model_name, str(each.engine), str(figures.about["rank"])), figures)
            for each in self.served
            for figures in read_instance(each.instance, each.engine)
        ]
        return _families(found)


def _families(found: Sequence[tuple[tuple[str, ...], Figures]]) -> Iterator[Metric]:
    for kind, (name, text, label) in _COUNTERS.items():
        family = CounterMetricFamily(name, text, labels=(*_LABELS, *filter(None, [label])))
        for labels, figures in found:
            for figure, value in figures.values.items():
                start, slash, rest = figure.partition("/")
                if start == kind:
                    family.add_metric([*labels, *([rest] if slash else [])], value)
        if family.samples:
            yield family
    plan = GaugeMetricFamily("k3hal_plan_layers", "Layers in which a provider runs an operator.", labels=_PLAN_LABELS)
    for labels, figures in found:
        layers: dict[tuple[str, ...], int] = {}
        for entry in figures.about["operators"]:
            key = (entry["op"], entry["phase"], entry["provider"], entry["level"])
            layers[key] = layers.get(key, 0) + entry["layers"]
        for key, count in layers.items():
            plan.add_metric([*labels, *key], count)
    if plan.samples:
        yield plan
