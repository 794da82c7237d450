"""Checks of `response_format` and `structured_outputs`: the form an answer is asked for in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from k3hal.errors import RequestError

_FIELD = "structured_outputs"
_KINDS = ("json", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The form of a response.

    `kind` is text, json_object or json_schema of `response_format`, which are also put to the model as a note, or
    json, regex, choice or grammar of `structured_outputs`, which are not. `value` is the schema, the pattern, the texts
    or the grammar. `strict` is None where the request does not say. `param` names the field.
    """

    kind: str = "text"
    value: Any = None
    strict: bool | None = None
    param: str = "response_format"

    @property
    def noted_schema(self) -> Mapping[str, Any] | None:
        """The schema that the model is told."""
        return self.value if self.kind == "json_schema" else None


def read_format(body: Mapping[str, Any]) -> ResponseFormat:
    """The requested form of the answer, under either name. Raises `RequestError`."""
    asked, structured = _response_format(body.get("response_format")), body.get(_FIELD)
    if structured is None:
        return asked
    if asked.kind != "text":
        raise RequestError(f"give either response_format or {_FIELD}", param=_FIELD)
    return _structured(structured)


def _response_format(value: object) -> ResponseFormat:
    if value is None:
        return ResponseFormat()
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or kind not in ("text", "json_object", "json_schema"):
        raise RequestError(
            f"response_format.type must be text, json_object or json_schema, got {kind!r:.100}", param="response_format"
        )
    if kind != "json_schema":
        return ResponseFormat(kind)
    given = value.get("json_schema")
    strict = given.get("strict") if isinstance(given, Mapping) else None
    return ResponseFormat(kind, _schema(given), strict, "response_format.json_schema.schema")


def _schema(value: object) -> Mapping[str, Any]:
    param = "response_format.json_schema"
    if not isinstance(value, Mapping):
        raise RequestError(f"{param} must be an object", param=param)
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise RequestError(f"{param}.name must be a non-empty string", param=f"{param}.name")
    if not isinstance(value.get("strict"), (bool, type(None))):
        raise RequestError(
            f"{param}.strict must be true or false, got {value['strict']!r:.100}", param=f"{param}.strict"
        )
    schema = value.get("schema", value.get("json_schema"))
    if not isinstance(schema, Mapping):
        raise RequestError(f"{param}.schema must be an object", param=f"{param}.schema")
    return schema


def _structured(value: object) -> ResponseFormat:
    """One of vLLM's ways to constrain an answer."""
    if not isinstance(value, Mapping):
        raise RequestError(f"{_FIELD} must be an object", param=_FIELD)
    given = [name for name, asked in value.items() if asked is not None]
    if len(given) != 1 or given[0] not in _KINDS:
        raise RequestError(f"{_FIELD} must hold one of {', '.join(_KINDS)}, got {given!r:.100}", param=_FIELD)
    (kind,) = given
    asked, param = value[kind], f"{_FIELD}.{kind}"
    if kind == "json" and isinstance(asked, str):
        try:
            asked = json.loads(asked)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{param} is not JSON: {error}", param=param) from None
    expected = {"json": Mapping, "choice": list}.get(kind, str)
    texts = kind != "choice" or (isinstance(asked, list) and asked and all(isinstance(one, str) for one in asked))
    if not isinstance(asked, expected) or not texts:
        form = {"json": "a schema", "choice": "a list of texts"}.get(kind, "a text")
        raise RequestError(f"{param} must be {form}", param=param)
    return ResponseFormat(kind, asked, param=param)
