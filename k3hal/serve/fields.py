"""Which fields of a body have an effect, which have none, and which are refused because ignoring them would mislead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel

from k3hal.errors import RequestError
from k3hal.serve.request_info import RequestInfo, field_names
from k3hal.serve.thinking import TEMPLATE_FIELDS

INERT = frozenset(
    (
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "verbosity", "prediction", "modalities", "add_special_tokens",
        "spaces_between_special_tokens",
    )
)  # fmt: skip
"""Fields of the APIs that say nothing about the answer's meaning; known, so never reported."""

_TEMPLATE = "chat_template_kwargs"

_REFUSED = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "the served model writes text",
    "web_search_options": "there are no built-in tools",
    "bad_words": "use logit_bias",
    "allowed_token_ids": "use logit_bias",
    "logits_processors": "use logit_bias",
    "prompt_logprobs": "only logprobs of the answer are reported",
    "use_beam_search": "use n",
    "thinking_token_budget": "use thinking_effort or max_tokens",
    "kv_transfer_params": "there is no transfer of caches",
    "response_format": "chats have it; responses have text.format, messages output_config.format",
    "structured_outputs": "chats have it",
    "guided_json": "use structured_outputs of a chat",
    "guided_regex": "use structured_outputs of a chat",
    "guided_choice": "use structured_outputs of a chat",
    "guided_grammar": "use structured_outputs of a chat",
}


def check_fields(kind: type[BaseModel], body: Mapping[str, Any], info: RequestInfo, *, refuse_unknown: bool) -> None:
    """Refuse fields that are known and not supported; report unknown ones in `info`, or refuse them too.

    A `kind` names fields that are read elsewhere in its `RENDERED`. Null is the same as absent.
    """
    known = {*kind.model_fields, *getattr(kind, "RENDERED", ()), *INERT}
    for name, instead in _REFUSED.items():
        if name in body and body[name] is not None and name not in known:
            raise RequestError(f"{name} is not supported", hint=instead, param=name)
    unknown = [name for name, value in body.items() if value is not None and name not in known]
    template = body.get(_TEMPLATE)
    if _TEMPLATE in known and isinstance(template, Mapping):
        unknown += [f"{_TEMPLATE}.{name}" for name in template if name not in TEMPLATE_FIELDS]
    if unknown and refuse_unknown:
        raise RequestError(f"unknown field {field_names(unknown)[0]}", param=unknown[0][:100])
    info.ignored = tuple(unknown)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a field that the request has under another name: `names` maps those that are read to its own."""
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        read = _read_as(names, param)
        if read is None:
            raise
        message = error.message.replace(read, names[read], 1)
        raise RequestError(message, hint=error.hint, param=own_name(names, param)) from None


def own_name(names: Mapping[str, str], param: str) -> str:
    """What a request calls the field that is read as `param`."""
    read = _read_as(names, param)
    return param if read is None else names[read] + param[len(read) :]


def _read_as(names: Mapping[str, str], param: str) -> str | None:
    """The longest of `names` that `param` is, or is a part of."""
    found = [read for read in names if param == read or param.startswith((f"{read}.", f"{read}["))]
    return max(found, key=len, default=None)
