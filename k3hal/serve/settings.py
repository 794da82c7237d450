"""The settings of `k3hal serve`, over those every verb shares."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from k3hal.serve.keys import Limits
from k3hal.serve.media.rules import Domain, MediaRules
from k3hal.serve.state import ServerConfig, WarmUp
from k3hal.settings import Settings


class ServeSettings(Settings):
    """Field names are the flags' names; a `--config` file uses the same."""

    model: str | None = None
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    api_key: list[str] | None = None
    served_model_name: list[str] | None = None
    engine: str | None = None
    max_queue: NonNegativeInt | None = None
    prefix_cache_policy: str | None = None
    prefix_match_unit: PositiveInt | None = None
    prefix_cache_retention_interval: PositiveInt | None = None
    prefix_host_cache_gb: PositiveFloat | None = None
    prefix_disk_cache: str | None = None
    prefix_disk_cache_gb: PositiveFloat | None = None
    prefix_mooncake: str | None = None
    metrics_compat: Literal["on", "off"] = "on"
    drain_delay: NonNegativeFloat = 0.0
    drain_timeout: NonNegativeFloat = 30.0
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    kimi_strict_params: bool = False
    api_key_file: Path | None = None
    requests_per_minute: PositiveInt | None = None
    max_concurrent_requests: PositiveInt | None = None
    cors_origin: list[str] | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_ca_certs: Path | None = None
    max_body_bytes: PositiveInt = 64 * 1024 * 1024
    body_timeout: PositiveFloat = 60.0
    request_timeout: PositiveFloat | None = None
    write_timeout: PositiveFloat = 60.0
    idle_timeout: PositiveFloat = 5.0
    stream_ping: PositiveFloat = 15.0
    max_stored_responses: NonNegativeInt = 256
    warm_up: Literal["auto", "off", "quick", "full"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    log_format: Literal["text", "json"] = "text"
    log_prompts: bool = False
    otlp_traces_endpoint: str | None = None
    page: Literal["on", "off"] = "on"
    allowed_media_domain: list[str] | None = None
    max_images: PositiveInt = 64
    max_media_bytes: PositiveInt = 20 * 1024 * 1024
    media_timeout: PositiveFloat = 10.0

    @field_validator("api_key", "served_model_name", "cors_origin", "allowed_media_domain", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        """A single string in a file stands for a list of one; an empty key would let everybody in."""
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list | tuple) and not all(values):
            raise ValueError("must not be empty")
        return values or None

    @field_validator("allowed_media_domain")
    @classmethod
    def _domains(cls, value: list[str] | None) -> list[str] | None:
        for entry in value or ():
            Domain.parse(entry)
        return value

    @field_validator("metrics_compat", "page", mode="before")
    @classmethod
    def _yaml_switch(cls, value: Any) -> Any:
        """YAML reads a bare on or off as a boolean."""
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value

    @field_validator("warm_up", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        return "off" if value is False else value

    def server_config(
        self, name: str, generation_defaults: Mapping[str, Any], device: str, plan: Mapping[str, Any] | None = None
    ) -> ServerConfig:
        """How the server behaves; `name` is the checkpoint's, `plan` the dispatch plan's JSON where a model runs."""
        same = ("drain_delay", "drain_timeout", "kimi_strict_params", "api_key_file", "max_body_bytes", "body_timeout",
                "log_prompts", "request_timeout", "write_timeout", "idle_timeout", "max_stored_responses")  # fmt: skip
        return ServerConfig(
            model_names=tuple(self.served_model_name or [name]),
            api_keys=tuple(self.api_key or []),
            limits=Limits(self.requests_per_minute, self.max_concurrent_requests),
            cors_origins=tuple(self.cors_origin or []),
            generation_defaults=generation_defaults,
            metrics_compat=self.metrics_compat == "on",
            refuse_unknown_fields=self.unknown_fields == "refuse",
            keep_alive=self.stream_ping,
            warm_up=self._warm_up(device),
            media=MediaRules(
                tuple(map(Domain.parse, self.allowed_media_domain or ())),
                max_bytes=self.max_media_bytes,
                max_images=self.max_images,
                max_total_bytes=max(self.max_media_bytes, self.max_body_bytes),
                timeout=self.media_timeout,
            ),
            page=self.page == "on",
            plan=plan,
            **{field: getattr(self, field) for field in same},
        )

    def _warm_up(self, device: str) -> WarmUp:
        """A replay answers request k with line k: a warm-up request would take the first line."""
        if self.engine is not None or self.warm_up == "off":
            return "off"
        return ("quick" if device == "cpu" else "full") if self.warm_up == "auto" else self.warm_up

    def engine_options(self) -> dict[str, Any]:
        own = [name for name in ServeSettings.model_fields if name.startswith("prefix_")]
        # On a CPU the largest steps would take minutes and show nothing: its memory is not counted.
        warm_up = "auto" if self.warm_up in ("auto", "full") else "off"
        options = {name: getattr(self, name) for name in ("max_queue", *own)}
        return super().engine_options() | options | {"warm_up": warm_up}
