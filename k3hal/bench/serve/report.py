"""`k3hal bench serve`: a run from its settings to its report."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from k3hal.bench.machine import circumstances
from k3hal.bench.serve.answers import Answer, read_answer
from k3hal.bench.serve.client import Load, Target, run_load
from k3hal.bench.serve.dataset import Planned, bodies, plan_requests
from k3hal.bench.serve.figures import details, figures, pace_delays, summarize
from k3hal.bench.serve.options import CHAT, ServeBench
from k3hal.bench.serve.paced import PacedAnswers
from k3hal.bench.serve.process import ServerProcess, own_server
from k3hal.bench.serve.progress import bar
from k3hal.bench.serve.scrape import get, model_id, queue_figures, queue_of
from k3hal.errors import UnsupportedError

SCHEMA = "k3hal.bench_serve/1"

LATE_MS = 10.0
"""A client that sends its requests later than this (P99) is no open loop: the report says so."""


@dataclass(frozen=True, slots=True)
class Report:
    """The document that `--json` prints, without its schema, and what it was made from."""

    document: dict[str, Any]
    answers: list[Answer]


@dataclass(frozen=True, slots=True)
class _Server:
    url: str
    process: ServerProcess | None
    paced: PacedAnswers | None


def bench_serve(settings: ServeBench, say: Callable[[str], None]) -> Report:
    """Put the load on the server and report. `say` takes lines for people.

    Raises `UsageError` where the server cannot be reached, `UnsupportedError` where it does not answer a first request.
    """
    before = circumstances()
    planned = plan_requests(settings)
    with _server(settings, len(planned), say) as server:
        named = settings.model if settings.base_url is not None else None
        model = named or model_id(server.url, settings.api_key)
        target = Target(server.url, settings.endpoint, settings.api_key)
        _warm_up(settings, planned, target, model)
        say(f"{len(planned)} requests to {server.url}{settings.endpoint}")
        queue = queue_of(server.url, settings.api_key)
        cpu, memory = _usage(server.process)
        load = asyncio.run(run_load(target, planned, bodies(planned, settings, model), settings, bar))
        cpu_after, memory_after = _usage(server.process)
        queue_after = queue_of(server.url, settings.api_key)
        version = get(server.url, "/version", settings.api_key)
    answers = [read_answer(exchange) for exchange in load.exchanges]
    document = {
        **before,
        **_vllm_head(settings, model, len(planned)),
        "settings": {k: v for k, v in dataclasses.asdict(settings).items() if k not in ("api_key", "request_rate")},
        "server_version": _version(version),
        **figures(answers, load.seconds, settings.goodput),
        **queue_figures(queue, queue_after),
        **_pace(settings, server.paced, answers),
        **_costs(answers, load, cpu_after - cpu, server.process is not None),
        "server_memory_before": memory or None,
        "server_memory_after": memory_after or None,
        **(details(answers) if settings.details else {}),
    }
    return Report(document, answers)


@contextlib.contextmanager
def _server(settings: ServeBench, count: int, say: Callable[[str], None]) -> Iterator[_Server]:
    if settings.base_url is not None:
        process = None if settings.server_pid is None else ServerProcess(settings.server_pid)
        yield _Server(settings.base_url.rstrip("/"), process, None)
        return
    with tempfile.TemporaryDirectory(prefix="k3hal-bench-") as folder:
        flags, paced = ([settings.model] if settings.model else []), None
        if settings.paced is not None:
            paced = PacedAnswers(count + settings.warmups, settings.output_len, settings.seed)
            flags = [*paced.write(Path(folder), settings.paced), "--max-num-seqs", str(count)]
        say("starting a server")
        with own_server(flags) as (url, pid):
            yield _Server(url, ServerProcess(pid), paced)


def _warm_up(settings: ServeBench, planned: list[Planned], target: Target, model: str) -> None:
    """A few short requests one after the other. Raises `UnsupportedError` if one is not answered."""
    first = dataclasses.replace(planned[0], due=0.0, output_len=min(4, planned[0].output_len))
    one = dataclasses.replace(settings, concurrency=None)
    for _ in range(settings.warmups):
        load = asyncio.run(run_load(target, [first], bodies([first], settings, model), one, _unwatched))
        answer = read_answer(load.exchanges[0])
        if answer.error:
            raise UnsupportedError(f"the first request was not answered: {answer.error}")


@contextlib.asynccontextmanager
async def _unwatched(_: object):
    yield


def _usage(process: ServerProcess | None) -> tuple[float, int]:
    return (0.0, 0) if process is None else (process.cpu_seconds(), process.memory())


def _vllm_head(settings: ServeBench, model: str, count: int) -> dict[str, Any]:
    """What `vllm bench serve` puts in front of its results; the machine's facts keep their own `date`."""
    backend = "openai-chat" if settings.endpoint == CHAT else "openai"
    # A trace has a rate of its own, which is no number to give.
    rate = settings.request_rate or (math.inf if settings.trace is None else None)
    return {
        "endpoint_type": backend,
        "backend": backend,
        "label": None,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": count,
        "request_rate": "inf" if rate == math.inf else rate,
        "burstiness": settings.burstiness,
        "max_concurrency": settings.concurrency,
    }


def _pace(settings: ServeBench, paced: PacedAnswers | None, answers: list[Answer]) -> dict[str, Any]:
    """How far tokens came behind the pace, and how many answers were not what was sent. None without a pace."""
    if paced is None or settings.paced is None:
        return summarize("pace_delay", []) | {"wrong_answers": None}
    good = [answer for answer in answers if not answer.error]
    return summarize("pace_delay", pace_delays(good, 1 / settings.paced)) | {"wrong_answers": paced.wrong(answers)}


def _costs(answers: list[Answer], load: Load, server_cpu: float, known: bool) -> dict[str, Any]:
    """Processor time of both sides, in microseconds for each token of the answers, and the client's share of a core."""
    tokens = sum(answer.output_tokens for answer in answers if not answer.error)
    return {
        "total_pieces": sum(len(answer.at) for answer in answers),
        "client_cpu_us_per_token": 1e6 * load.cpu / tokens if tokens else None,
        "client_cpu_share": load.cpu / load.seconds,
        "server_cpu_us_per_token": 1e6 * server_cpu / tokens if tokens and known else None,
        "server_cpu_share": server_cpu / load.seconds if known else None,
    }


def _version(body: bytes | None) -> str | None:
    try:
        return str(orjson.loads(body or b"")["version"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None


def remarks(report: dict[str, Any]) -> list[str]:
    """What a reader must know before trusting the numbers; empty when nothing is wrong."""
    out = []
    late = report["p99_client_late_ms"]
    if report["request_rate"] != "inf" and late is not None and late > LATE_MS:
        out.append(
            f"The client itself was late: P99 {late:.1f} ms. Its machine is too busy, or the rate too high for it."
        )
    if report["client_cpu_share"] > 0.7:
        out.append(f"The client used {100 * report['client_cpu_share']:.0f} % of a core: latencies include its own.")
    if report["wrong_answers"]:
        out.append(f"{report['wrong_answers']} answers lost, doubled or mixed up tokens.")
    return out + [f"{count} failed: {error}" for error, count in report["error_counts"].items()]
