"""OpenTelemetry traces: one span a request, under the client's own where it sends a `traceparent`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from k3hal import __version__
from k3hal.errors import UnsupportedError
from k3hal.serve.request_info import RequestInfo, info_in

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

# Figures of a request under the names of the semantic conventions for generative AI, where those have one.
_NAMES = {
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons",
}


def make_provider(endpoint: str) -> TracerProvider:
    """Sends spans to `endpoint` over OTLP, in the background. Raises `UnsupportedError` without the packages."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise UnsupportedError("traces need OpenTelemetry", hint="install k3hal[otel]") from None
    return provider_of(OTLPSpanExporter(endpoint=endpoint))


def provider_of(exporter: SpanExporter) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "k3hal", "service.version": __version__}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class Traces:
    """ASGI middleware; `provider` is shut down by whoever made it."""

    def __init__(self, app: ASGIApp, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._tracer = provider.get_tracer("k3hal.serve", __version__)
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        info = info_in(scope)
        context = self._propagator.extract(Headers(scope=scope))
        name = f"{scope['method']} {scope['path']}"
        with self._tracer.start_as_current_span(name, context, SpanKind.SERVER, record_exception=False) as span:
            try:
                await self._app(scope, receive, send)
            finally:
                span.set_attributes(_attributes(scope, info))
                if info.status >= 500:
                    span.set_status(Status(StatusCode.ERROR))


def _attributes(scope: Scope, info: RequestInfo) -> dict[str, Any]:
    """All figures of a request; texts are not among them."""
    facts = {_NAMES.get(name, f"k3hal.{name}"): value for name, value in info.figures().items() if value is not None}
    return {
        "http.request.method": scope["method"],
        "url.path": scope["path"],
        "http.response.status_code": info.status,
        "k3hal.request_id": info.id,
        **facts,
    }
