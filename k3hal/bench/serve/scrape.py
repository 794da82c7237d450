"""What the server says of itself: models, version, and its metrics before and after a run."""

from __future__ import annotations

import math
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from prometheus_client.parser import text_string_to_metric_families

from k3hal.bench.serve.figures import PERCENTILES
from k3hal.errors import UsageError

_QUEUE = "vllm:request_queue_time_seconds"
_OURS = {"k3hal_request_queue_time_seconds": _QUEUE}


@dataclass(frozen=True, slots=True)
class Queue:
    """A histogram of the times requests waited in the server: cumulative counts by upper bound in seconds."""

    buckets: Mapping[float, float]
    total: float

    @property
    def count(self) -> float:
        """All observations."""
        return max(self.buckets.values(), default=0.0)


def get(base_url: str, path: str, api_key: str | None) -> bytes | None:
    """The body of a GET; None where the server has no such page."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(base_url.rstrip("/") + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.read()
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise UsageError(f"{base_url}: the server wants a key ({error.code})", hint="give --api-key") from None
        return None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise UsageError(
            f"{base_url}: {getattr(reason, 'strerror', None) or reason}", hint="is the server up?"
        ) from None


def model_id(base_url: str, api_key: str | None) -> str:
    """The first model the server lists."""
    body = get(base_url, "/v1/models", api_key)
    try:
        return orjson.loads(body or b"")["data"][0]["id"]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        raise UsageError(f"{base_url}/v1/models lists no model", hint="name one with --model") from None


def queue_of(base_url: str, api_key: str | None) -> Queue | None:
    """The histogram as it stands; None where the server has no such metric."""
    body = get(base_url, "/metrics", api_key)
    if body is None:
        return None
    buckets: dict[float, float] = {}
    total: float | None = None
    try:
        families = list(text_string_to_metric_families(body.decode(errors="replace")))
    except ValueError:
        return None
    wanted = {_QUEUE} if any(f.name == _QUEUE for f in families) else set(_OURS)
    for family in families:
        if family.name in wanted:
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    bound = float(sample.labels["le"])
                    buckets[bound] = buckets.get(bound, 0.0) + sample.value
                elif sample.name.endswith("_sum"):
                    total = (total or 0.0) + sample.value
    return None if total is None else Queue(buckets, total)


def queue_figures(before: Queue | None, after: Queue | None) -> dict[str, Any]:
    """Mean and percentiles of what came between; percentiles are as exact as the buckets. None without a histogram."""
    keys = ("mean_queue_time_ms", "median_queue_time_ms", *(f"p{p}_queue_time_ms" for p in PERCENTILES))
    if before is None or after is None or after.count <= before.count:
        return dict.fromkeys(keys)
    counts = {bound: count - before.buckets.get(bound, 0.0) for bound, count in sorted(after.buckets.items())}
    number = after.count - before.count
    ranks = (_quantile(counts, number * p / 100) for p in (50, *PERCENTILES))
    values = [(after.total - before.total) / number, *ranks]
    return {key: 1e3 * value for key, value in zip(keys, values, strict=True)}


def _quantile(counts: Mapping[float, float], rank: float) -> float:
    """Where the observation of that rank lies, taking those of a bucket as spread evenly over it."""
    low = below = 0.0
    for bound, count in counts.items():
        if count >= rank:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low
