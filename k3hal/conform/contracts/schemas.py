"""Schemas of torch's operators, read from texts: registrations in C++, lists of schemas, or an installed package."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

from k3hal.conform.contracts.source import Source
from k3hal.dispatch.contracts import Parameter
from k3hal.dispatch.library import OPS
from k3hal.errors import InputError

Kind = inspect._ParameterKind
_JOINED = re.compile(r'"\s*\n\s*"')
"""Between two literals of C++ that are one string."""
_OPEN, _CLOSE = "([{", ")]}"


def schema_parameters(source: Source, module: str, name: str, load: str) -> tuple[Parameter, ...] | None:
    """The parameters of an operator of `torch.ops.NAMESPACE`; None where the source does not register it.

    An installed package says it itself: `load` is imported for that. Raises `InputError` where that fails.
    """
    namespace = module.removeprefix(OPS)
    if source.package:
        return _registered(namespace, name, load)
    for path in source.paths:
        text = source.text(path)
        if f"{name}(" not in text and f"{name}." not in text:
            continue
        for arguments in _schemas(_JOINED.sub("", text).replace('\\"', '"'), namespace, name):
            return parse_schema(arguments, f"{source.where}: {path}: {name}")
    return None


def _registered(namespace: str, name: str, load: str) -> tuple[Parameter, ...] | None:
    import torch

    try:
        if load:
            importlib.import_module(load)
    except Exception as error:
        raise InputError(f"{load} cannot be imported: {error}") from error
    found = torch._C._jit_get_schemas_for_operator(f"{namespace}::{name}")
    if not found:
        return None
    schema = min(found, key=lambda one: one.overload_name)
    text = next(_schemas(f"{schema}", namespace, name))
    return parse_schema(text, f"{namespace}::{name}")


def _schemas(text: str, namespace: str, name: str) -> Iterator[str]:
    """What stands between the parentheses of every `name(...) -> ...`."""
    for found in re.finditer(rf"(?<![\w.])(?:{re.escape(namespace)}::)?{re.escape(name)}(?:\.\w+)?\(", text):
        depth, start = 1, found.end()
        for end in range(start, len(text)):
            depth += (text[end] in _OPEN) - (text[end] in _CLOSE)
            if depth == 0:
                if re.match(r"\s*->", text[end + 1 :]):
                    yield text[start:end]
                break


def parse_schema(arguments: str, where: str) -> tuple[Parameter, ...]:
    """Parameters from a schema's arguments, `Tensor x, Tensor(a!) state, *, int[]? lengths=None, float eps=1e-6`."""
    out, kind = [], Kind.POSITIONAL_OR_KEYWORD
    for part in _parts(arguments):
        if part == "*":
            kind = Kind.KEYWORD_ONLY
            continue
        declared, equals, default = part.partition("=")
        type_, _, name = declared.strip().rpartition(" ")
        if not type_ or not name.isidentifier():
            raise InputError(f"{where}: {part!r} is no argument of a schema")
        out.append(Parameter(name, kind, " ".join(type_.split()), default.strip() if equals else None))
    return tuple(out)


def _parts(arguments: str) -> Iterator[str]:
    """What commas divide that stand in no brackets."""
    depth, start = 0, 0
    for at, sign in enumerate(arguments):
        depth += (sign in _OPEN) - (sign in _CLOSE)
        if sign == "," and depth == 0:
            yield arguments[start:at].strip()
            start = at + 1
    if last := arguments[start:].strip():
        yield last
