"""The settings of `k3hal serve`, over those every verb shares."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator

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
    metrics_compat: Literal["on", "off"] = "on"
    drain_timeout: NonNegativeFloat = 30.0
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    kimi_strict_params: bool = False
    page: Literal["on", "off"] = "on"

    @field_validator("api_key", "served_model_name", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        """A single string in a file stands for a list of one; an empty key would let everybody in."""
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list) and not all(values):
            raise ValueError("must not be empty")
        return values or None

    @field_validator("metrics_compat", "page", mode="before")
    @classmethod
    def _yaml_switch(cls, value: Any) -> Any:
        """YAML reads a bare on or off as a boolean."""
        return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value

    def engine_options(self) -> dict[str, Any]:
        own = ("max_queue", "prefix_cache_policy", "prefix_match_unit", "prefix_cache_retention_interval")
        return super().engine_options() | {name: getattr(self, name) for name in own}
