"""What a run's answers amount to, under the names that `vllm bench serve` gives its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from k3hal.bench.serve.answers import Answer

PERCENTILES = (50, 95, 99)

DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times")
"""Lists with one value for each request, in seconds where they are times; with `generated_texts` and `errors`."""


def summarize(name: str, seconds: Sequence[float] | np.ndarray) -> dict[str, float | None]:
    """`mean_NAME_ms`, `median_…`, `std_…`, `pN_…`; all None where nothing was measured."""
    keys = [f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", *(f"p{p}_{name}_ms" for p in PERCENTILES)]
    if not len(seconds):
        return dict.fromkeys(keys)
    ms = np.asarray(seconds) * 1e3
    values = [ms.mean(), np.median(ms), ms.std(), *np.percentile(ms, PERCENTILES)]
    return dict(zip(keys, map(float, values), strict=True))


def figures(answers: Sequence[Answer], duration: float, goodput: Mapping[str, float]) -> dict[str, Any]:
    """Counts, rates and latencies of a run that took `duration` seconds; `goodput` are objectives in milliseconds."""
    good = [answer for answer in answers if not answer.error]
    prompt, output = sum(a.prompt_tokens for a in good), sum(a.output_tokens for a in good)
    met = sum(_meets(answer, goodput) for answer in good)
    return {
        "duration": duration,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "total_cached_tokens": sum(a.cached_tokens for a in good),
        "request_throughput": len(good) / duration,
        "request_goodput": met / duration if goodput else None,
        "goodput_share": met / len(answers) if goodput else None,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
        **busiest(good),
        **summarize("ttft", [a.ttft for a in good]),
        **summarize("tpot", [a.tpot for a in good if a.tpot is not None]),
        **summarize("itl", np.concatenate([np.empty(0), *(np.diff(a.at) for a in good)])),
        **summarize("e2el", [a.e2el for a in good]),
        **summarize("client_queue_time", [a.sent - a.due for a in answers]),
        **summarize("client_late", [a.late for a in answers]),
        "error_counts": dict(Counter(a.error for a in answers if a.error).most_common(20)),
    }


def details(answers: Sequence[Answer]) -> dict[str, Any]:
    """The lists of one value a request, failed ones included."""
    return {
        "input_lens": [a.prompt_tokens for a in answers],
        "output_lens": [a.output_tokens for a in answers],
        "ttfts": [a.ttft if not a.error else 0.0 for a in answers],
        "itls": [np.diff(a.at).tolist() for a in answers],
        "latencies": [a.e2el if not a.error else 0.0 for a in answers],
        "start_times": [a.sent for a in answers],
        "queue_times": [a.sent - a.due for a in answers],
        "generated_texts": [a.text for a in answers],
        "errors": [a.error for a in answers],
    }


def busiest(answers: Sequence[Answer]) -> dict[str, float | int]:
    """The second in which most pieces came, and the most requests that were open at once."""
    times = np.concatenate([np.empty(0), *(np.asarray(a.at) for a in answers)])
    changes = sorted([(a.sent, 1) for a in answers] + [(a.end, -1) for a in answers])
    opened = np.cumsum([change for _, change in changes]) if changes else np.zeros(1, dtype=np.int64)
    return {
        "max_output_tokens_per_s": float(np.bincount(times.astype(np.int64)).max()) if len(times) else 0.0,
        "max_concurrent_requests": int(opened.max()),
    }


def pace_delays(answers: Sequence[Answer], period: float) -> np.ndarray:
    """By how many seconds each token came after its turn, of streams whose tokens are one character, `period` apart.

    The turns of a stream are the earliest ones that no token of it came before, so a stream that runs slow adds up.
    """
    delays = [np.empty(0)]
    for answer in answers:
        at = np.repeat(np.asarray(answer.at), [len(text) for text in answer.texts])
        over = at - period * np.arange(len(at))
        delays.append(over - over.min(initial=np.inf))
    return np.concatenate(delays)


def _meets(answer: Answer, goodput: Mapping[str, float]) -> bool:
    """Whether all objectives are met; a single token has no time per token to miss."""
    reached = {"ttft": answer.ttft, "tpot": answer.tpot or 0.0, "e2el": answer.e2el}
    return all(reached[name] * 1e3 <= limit for name, limit in goodput.items())
