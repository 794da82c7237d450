"""The flags of `k3hal serve` beyond those every verb shares, one annotated type each. None means "not given"."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

PrefixCachePolicy = Annotated[
    str | None,
    typer.Option(
        "--prefix-cache-policy",
        metavar="POLICY",
        help="Which prefixes are kept: cost, second-hit, prompt, interval or none.  [default: cost]",
    ),
]
PrefixMatchUnit = Annotated[
    int | None,
    typer.Option("--prefix-match-unit", metavar="N", help="Tokens in which prefixes are compared.  [default: 128]"),
]
RetentionInterval = Annotated[
    int | None,
    typer.Option(
        "--prefix-cache-retention-interval", metavar="N", help="Tokens between kept states, for the policy interval."
    ),
]


def _flag(kind: Any, name: str, metavar: str | None, text: str) -> Any:
    return Annotated[kind | None, typer.Option(f"--{name}", metavar=metavar, help=text)]


SERVER_FLAGS: dict[str, Any] = {
    "api_key_file": _flag(
        Path, "api-key-file", "FILE", "Keys, one a line, with their limits; read again when it changes."
    ),
    "requests_per_minute": _flag(int, "requests-per-minute", "N", "Most requests a minute and key."),
    "max_concurrent_requests": _flag(int, "max-concurrent-requests", "N", "Most requests at a time and key."),
    "ssl_certfile": _flag(Path, "ssl-certfile", "FILE", "Serve HTTPS with this certificate (chain)."),
    "ssl_keyfile": _flag(Path, "ssl-keyfile", "FILE", "Its private key, if it is in a file of its own."),
    "ssl_ca_certs": _flag(Path, "ssl-ca-certs", "FILE", "Demand client certificates signed by these."),
    "cors_origin": _flag(list[str], "cors-origin", "ORIGIN", "Browser origin that may ask, or *; may be repeated."),
    "max_body_bytes": _flag(int, "max-body-bytes", "N", "Largest request body.  [default: 67108864]"),
    "body_timeout": _flag(float, "body-timeout", "SECONDS", "For a client to send a body.  [default: 60]"),
    "drain_delay": _flag(
        float, "drain-delay", "SECONDS", "On SIGTERM, answer new requests for so long, unready.  [default: 0]"
    ),
    "request_timeout": _flag(float, "request-timeout", "SECONDS", "For a whole answer.  [default: no limit]"),
    "write_timeout": _flag(float, "write-timeout", "SECONDS", "For a client to read what is sent.  [default: 60]"),
    "idle_timeout": _flag(float, "idle-timeout", "SECONDS", "Between two requests of a connection.  [default: 5]"),
    "stream_ping": _flag(
        float, "stream-ping", "SECONDS", "Between comments while a stream waits to begin.  [default: 15]"
    ),
    "max_stored_responses": _flag(int, "max-stored-responses", "N", "Responses kept to continue.  [default: 256]"),
    "warm_up": _flag(str, "warm-up", "auto|off|quick|full", "What is tried before /ready; auto: quick on a CPU."),
    "log_level": _flag(str, "log-level", "LEVEL", "debug, info (shows requests), warning, error.  [default: warning]"),
    "log_format": _flag(str, "log-format", "text|json", "Form of the log on stderr.  [default: text]"),
    "log_prompts": _flag(bool, "log-prompts", None, "Put prompts into the request lines of the log."),
    "otlp_traces_endpoint": _flag(str, "otlp-traces-endpoint", "URL", "Send OpenTelemetry traces here."),
    "unknown_fields": _flag(
        str, "unknown-fields", "ignore|refuse", "Fields a request has and the API has not.  [default: ignore]"
    ),
    "kimi_strict_params": _flag(
        bool, "kimi-strict-params", None, "Refuse sampling parameters that Moonshot's hosted API refuses."
    ),
    "allowed_media_domain": _flag(
        list[str], "allowed-media-domain", "HOST", "Host that images may be fetched from; may be repeated."
    ),
    "max_images": _flag(int, "max-images", "N", "Most images of a request.  [default: 64]"),
    "max_media_bytes": _flag(int, "max-media-bytes", "N", "Largest encoded image.  [default: 20971520]"),
    "media_timeout": _flag(float, "media-timeout", "SECONDS", "For fetching an image.  [default: 10]"),
    "page": _flag(str, "page", "on|off", "Serve the page at /: chat, live figures, dispatch plan.  [default: on]"),
}
"""Flags of the HTTP server by the name of their setting."""

# Places are texts here: an empty `Path` is the working directory, and what was empty could not be told any more.
ENGINE_FLAGS: dict[str, Any] = {
    "prefix_host_cache_gb": _flag(
        float,
        "prefix-host-cache-gb",
        "GB",
        "Host memory for prefixes that device memory gives up.  [default: none; 2 under a folder or store]",
    ),
    "prefix_disk_cache": _flag(str, "prefix-disk-cache", "DIR", "Folder that keeps prefixes, also over a restart."),
    "prefix_disk_cache_gb": _flag(float, "prefix-disk-cache-gb", "GB", "Most that folder may take.  [default: 100]"),
    "prefix_mooncake": _flag(
        str,
        "prefix-mooncake",
        "FILE",
        "Configuration (JSON) of a Mooncake store that keeps prefixes for several engines.",
    ),
}
"""Flags of the engine by the name of their setting: the prefix cache's external tier."""


def with_flags(flags: dict[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make `flags` parameters of a command in place of its `**more`, which then holds their values."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        *own, _ = signature.parameters.values()
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in flags.items()
        ]
        command.__annotations__ = {p.name: p.annotation for p in [*own, *more]}
        vars(command)["__signature__"] = signature.replace(parameters=[*own, *more], return_annotation=None)
        return command

    return add
