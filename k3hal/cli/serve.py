"""`k3hal serve`: a model behind an OpenAI-compatible HTTP API."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3hal.cli.common import (
    Config,
    Device,
    Draft,
    DType,
    ExpertActivations,
    Graphs,
    KvCacheDType,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MemoryBudget,
    Ops,
    Plan,
    Tokenizer,
    settings_from,
)
from k3hal.cli.serve_flags import (
    ENGINE_FLAGS,
    SERVER_FLAGS,
    PrefixCachePolicy,
    PrefixMatchUnit,
    RetentionInterval,
    with_flags,
)
from k3hal.errors import UsageError

if TYPE_CHECKING:
    import ssl

    from k3hal.engine.memory import MemoryPlan
    from k3hal.engine.replay import ReplayEngine
    from k3hal.serve.settings import ServeSettings
    from k3hal.serve.state import ServerState
    from k3hal.tokenizer import Tokenizer as K3Tokenizer


@with_flags(ENGINE_FLAGS | SERVER_FLAGS)
def serve(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Checkpoint directory; default: a small built-in one.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on.  [default: 127.0.0.1]")
    ] = None,
    port: Annotated[int | None, typer.Option(metavar="N", help="Port; 0 picks a free one.  [default: 8000]")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Key that /v1 requests must bear; may be repeated.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Model id to answer to, may be repeated; default: the checkpoint's name."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="replay:FILE", help="Replay token ids instead of running a model.")
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option(metavar="N", help="Most requests waiting; beyond it 429.  [default: 1024]")
    ] = None,
    prefix_cache_policy: PrefixCachePolicy = None,
    prefix_match_unit: PrefixMatchUnit = None,
    prefix_cache_retention_interval: RetentionInterval = None,
    metrics_compat: Annotated[
        str | None, typer.Option(metavar="on|off", help="Also export vLLM's metric names.  [default: on]")
    ] = None,
    drain_timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="On SIGTERM, time for running requests.  [default: 30]")
    ] = None,
    ops: Ops = None,
    device: Device = None,
    dtype: DType = None,
    kv_cache_dtype: KvCacheDType = None,
    expert_activations: ExpertActivations = None,
    memory_budget: MemoryBudget = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    graphs: Graphs = None,
    draft: Draft = None,
    tokenizer: Tokenizer = None,
    plan: Plan = None,
    config: Config = None,
    **more: Any,
) -> None:
    """Serve MODEL over an OpenAI-compatible HTTP API until SIGTERM or Ctrl-C."""
    from k3hal.serve.settings import ServeSettings

    _run(settings_from(ctx, ServeSettings), time.monotonic())


def _run(settings: ServeSettings, begun: float) -> None:
    from k3hal.serve.logs import configure_logs
    from k3hal.serve.server import Server, bind
    from k3hal.serve.tracing import make_provider

    configure_logs(settings.log_format, settings.log_level)
    tls = _tls(settings)
    traces = make_provider(settings.otlp_traces_endpoint) if settings.otlp_traces_endpoint else None
    # First, so that a port in use is reported before minutes of loading.
    with bind(settings.host, settings.port) as sock:
        try:
            Server(_build(settings), announce=typer.echo, begun=begun, tls=tls, traces=traces).run(sockets=[sock])
        finally:
            if traces is not None:
                traces.shutdown()


def _tls(settings: ServeSettings) -> ssl.SSLContext | None:
    from k3hal.serve.server import tls_context

    if settings.ssl_certfile is not None:
        return tls_context(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
    if settings.ssl_keyfile or settings.ssl_ca_certs:
        raise UsageError("a key or a CA needs a certificate to go with it", hint="give --ssl-certfile")
    return None


def _build(settings: ServeSettings) -> ServerState:
    """The engine and everything around it, from the merged settings."""
    from k3hal.serve.state import ServerState

    defaults: dict[str, Any] = {}
    plan: dict[str, Any] | None = None
    if settings.engine is not None:
        engine, tokenizer = _replay(settings)
        name = "replay"
    else:
        from k3hal.debug.arm import armed
        from k3hal.dispatch.plan_file import plan_json
        from k3hal.engine.build import build_engine

        with armed(os.environ):
            built = build_engine(settings.model, **settings.engine_options())
        _tell_memory(settings, built.memory, built.engine.info.device)
        engine, tokenizer, name = built.engine, built.tokenizer, built.model_name
        defaults, plan = dict(built.generation_defaults), plan_json(built.plan)
    return ServerState(engine, tokenizer, settings.server_config(name, defaults, engine.info.device, plan))


def _tell_memory(settings: ServeSettings, memory: MemoryPlan, device: str) -> None:
    """The memory plan on stderr: a table, or a line of the log where that is for machines."""
    from k3hal.cli.memory_table import print_memory

    if settings.log_format == "json":
        logging.getLogger("k3hal.serve").info("memory on %s: %s", device, memory)
    else:
        print_memory(f"memory on {device}", memory.report(), stderr=True)


def _replay(settings: ServeSettings) -> tuple[ReplayEngine, K3Tokenizer]:
    from k3hal.engine.replay import ReplayEngine
    from k3hal.tokenizer import Tokenizer as K3Tokenizer

    kind, _, file = (settings.engine or "").partition(":")
    if kind != "replay" or not file:
        raise UsageError(f"unknown engine {settings.engine!r}", hint="the only named engine is replay:FILE")
    if settings.tokenizer is None:
        raise UsageError("a replay engine needs a tokenizer", hint="give --tokenizer DIR")
    tokenizer = K3Tokenizer.from_dir(settings.tokenizer)
    names = ("max_model_len", "max_num_seqs", "max_queue")
    given = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
    return ReplayEngine.from_file(file, tokenizer, **given), tokenizer
