"""Signatures of Python functions, read from their source without running it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator

from k3hal.conform.contracts.source import Source
from k3hal.dispatch.contracts import Parameter
from k3hal.errors import InputError

_HOPS = 8
"""How many imports are followed from where a function is named to where it is defined."""
Kind = inspect._ParameterKind
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def python_parameters(source: Source, module: str, name: str) -> tuple[Parameter, ...] | None:
    """The parameters of `module:name` (`Class` and `Class.method` too); None where its source is not there.

    Imports are followed within the source. Of several definitions the last one that is no overload counts.
    """
    owner, _, last = name.rpartition(".")
    found = _definition(source, module, owner or last, _HOPS)
    if found is None:
        return None
    if owner:
        if not isinstance(found, ast.ClassDef):
            return None
        found = _last(node for node in found.body if isinstance(node, Definition) and node.name == last)
    if isinstance(found, ast.ClassDef):
        return _of_class(found)
    return _of_function(found) if found else None


def _definition(source: Source, module: str, name: str, hops: int) -> Definition | None:
    path = source.module(module)
    if path is None or hops == 0:
        return None
    statements = list(_statements(_parsed(source, path).body))
    found = _last(node for node in statements if isinstance(node, Definition) and node.name == name)
    if found:
        return found
    package = module if path.endswith("/__init__.py") else module.rpartition(".")[0]
    for node in reversed(statements):
        if isinstance(node, ast.ImportFrom):
            home = _imported_module(node, package)
            for alias in node.names:
                if (alias.asname or alias.name) == name or alias.name == "*":
                    wanted = name if alias.name == "*" else alias.name
                    if home != module and (found := _definition(source, home, wanted, hops - 1)):
                        return found
    return None


def _parsed(source: Source, path: str) -> ast.Module:
    try:
        return ast.parse(source.text(path))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise InputError(f"{source.where}: {path} is no Python: {error}") from error


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """A module's statements, those under `if` and `try` too."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, name, ()))
        for handler in getattr(node, "handlers", ()):
            yield from _statements(handler.body)


def _imported_module(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    base = ".".join(parts[: len(parts) - (node.level - 1)])
    return f"{base}.{node.module}" if node.module else base


def _last(found: Iterable[Definition]) -> Definition | None:
    """The last definition that is no `typing.overload`."""
    out = None
    for node in found:
        if not any(ast.unparse(d).rpartition(".")[2] == "overload" for d in node.decorator_list):
            out = node
    return out


def _of_class(node: ast.ClassDef) -> tuple[Parameter, ...]:
    """The constructor's parameters, or the fields of a dataclass or named tuple."""
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            return _of_function(one)[1:]
    fields = (n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name))
    return tuple(_parameter(ast.unparse(n.target), Kind.POSITIONAL_OR_KEYWORD, n.value) for n in fields)


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[Parameter, ...]:
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(args.defaults)), *args.defaults]
    out = []
    for i, (arg, default) in enumerate(zip(plain, defaults, strict=True)):
        kind = Kind.POSITIONAL_ONLY if i < len(args.posonlyargs) else Kind.POSITIONAL_OR_KEYWORD
        out.append(_parameter(arg.arg, kind, default))
    if args.vararg:
        out.append(Parameter(args.vararg.arg, Kind.VAR_POSITIONAL))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        out.append(_parameter(arg.arg, Kind.KEYWORD_ONLY, default))
    if args.kwarg:
        out.append(Parameter(args.kwarg.arg, Kind.VAR_KEYWORD))
    return tuple(out)


def _parameter(name: str, kind: Kind, default: ast.expr | None) -> Parameter:
    return Parameter(name, kind, "", None if default is None else ast.unparse(default))
