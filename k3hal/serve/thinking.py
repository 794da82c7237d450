"""Whether and how much the model thinks, from the several spellings clients use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k3hal.errors import RequestError

TEMPLATE_FIELDS = ("thinking", "enable_thinking", "thinking_effort", "preserve_thinking")
"""What `chat_template_kwargs` may hold."""

_TYPES = {"enabled": True, "adaptive": True, "disabled": False}


@dataclass(frozen=True, slots=True)
class ThinkingDefaults:
    """What the served model accepts, and what holds when a request says nothing."""

    enabled: bool = True
    effort: str | None = "max"
    efforts: tuple[str, ...] = ("low", "high", "max")


@dataclass(frozen=True, slots=True)
class Thinking:
    """`effort` None renders no effort note."""

    enabled: bool
    effort: str | None


def read_thinking(body: Mapping[str, Any], defaults: ThinkingDefaults) -> Thinking:
    """Resolve every spelling: `thinking` and `thinking_effort`, then template arguments, then `reasoning_effort`.

    An explicit `"thinking_effort": null` means no note; an absent one means the default. Every spelling that is there
    must be of its type; the first one's value counts. Earlier thinking is always part of the prompt, so a request to
    leave it out is refused.
    """
    template = _mapping(body, "chat_template_kwargs")
    switch = body.get("thinking")
    detail: Mapping[str, Any] = switch if isinstance(switch, Mapping) else {}
    alias = body.get("reasoning_effort")
    _check_preserved(detail, template)
    enabled = _first_bool(
        ("thinking", _switch(detail) if isinstance(switch, Mapping) else switch),
        ("chat_template_kwargs.thinking", template.get("thinking")),
        ("enable_thinking", body.get("enable_thinking")),
        ("chat_template_kwargs.enable_thinking", template.get("enable_thinking")),
        ("reasoning_effort", False if alias == "none" else None),
    )
    return Thinking(
        enabled=defaults.enabled if enabled is None else enabled,
        effort=_effort(body, detail, template, alias, defaults),
    )


def _effort(
    body: Mapping[str, Any],
    detail: Mapping[str, Any],
    template: Mapping[str, Any],
    alias: Any,
    defaults: ThinkingDefaults,
) -> str | None:
    for name, value in (
        ("thinking.effort", detail.get("effort")),
        ("thinking_effort", body.get("thinking_effort")),
        ("chat_template_kwargs.thinking_effort", template.get("thinking_effort")),
        ("reasoning_effort", alias),
    ):
        if not isinstance(value, (str, type(None))):
            raise RequestError(f"{name} must be one of {', '.join(defaults.efforts)}, got {value!r:.100}", param=name)
    if detail.get("effort") is not None:
        return _checked("thinking.effort", detail["effort"], defaults)
    for name, source in (("thinking_effort", body), ("chat_template_kwargs.thinking_effort", template)):
        if "thinking_effort" in source:
            value = source["thinking_effort"]
            return None if value is None else _checked(name, value, defaults)
    if alias is not None and alias != "none":
        return _checked("reasoning_effort", alias, defaults)
    return defaults.effort


def _checked(name: str, value: object, defaults: ThinkingDefaults) -> str:
    if not isinstance(value, str) or value not in defaults.efforts:
        raise RequestError(f"{name} must be one of {', '.join(defaults.efforts)}, got {value!r:.100}", param=name)
    return value


def _check_preserved(detail: Mapping[str, Any], template: Mapping[str, Any]) -> None:
    hint = "leave reasoning_content out of the messages whose thinking should not be seen"
    if detail.get("keep") not in (None, "all"):
        raise RequestError(
            f'thinking.keep must be "all", got {detail["keep"]!r:.100}', hint=hint, param="thinking.keep"
        )
    name, value = "chat_template_kwargs.preserve_thinking", template.get("preserve_thinking")
    if value is not None and value is not True:
        raise RequestError(f"{name} must be true, got {value!r:.100}", hint=hint, param=name)


def _switch(detail: Mapping[str, Any]) -> bool | None:
    kind = detail.get("type")
    if kind is None:
        return None
    if not isinstance(kind, str) or kind not in _TYPES:
        raise RequestError(
            f"thinking.type must be one of {', '.join(_TYPES)}, got {kind!r:.100}", param="thinking.type"
        )
    return _TYPES[kind]


def _first_bool(*candidates: tuple[str, object]) -> bool | None:
    """The first that is given; all that are must be true or false."""
    given = [value for value in map(_checked_bool, candidates) if value is not None]
    return given[0] if given else None


def _checked_bool(candidate: tuple[str, object]) -> bool | None:
    name, value = candidate
    if not isinstance(value, (bool, type(None))):
        raise RequestError(f"{name} must be true or false, got {value!r:.100}", param=name)
    return value


def _mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be an object, got {value!r:.100}", param=name)
    return value
