"""What a vLLM source tree declares, read without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from k3hal.errors import InputError

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DECORATED = {"classmethod": "classmethod", "staticmethod": "staticmethod", "property": "property"}


class Symbol(NamedTuple):
    """One declaration. `parameters` are spelled `name`, `name=` (has a default), `*name`, `**name`, and `*` or `/`
    alone for the marks; None where the source does not say (an attribute, a class whose constructor is elsewhere).
    """

    kind: str
    parameters: tuple[str, ...] | None = None


class _Found(NamedTuple):
    node: ast.AST
    module: _Module


class SourceTree:
    """The package below `root` (the folder that holds `vllm/`), parsed as far as it is asked about."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, _Module | None] = {}

    def symbol(self, name: str) -> Symbol | None:
        """The declaration behind `module:Name` or `module:Class.member`; None where there is none."""
        module_name, _, path = name.partition(":")
        outer, _, member = path.partition(".")
        found = self.find(module_name, outer)
        if found is None:
            return None
        if not member:
            return self._described(found)
        inner = self._member(found, member)
        return None if inner is None else self._described(inner, in_class=True)

    def module(self, name: str) -> _Module | None:
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def find(self, module_name: str, name: str) -> _Found | None:
        """Where `name` of a module is declared, imports followed as far as they stay in the package."""
        module = self.module(module_name)
        if module is None:
            return None
        node = module.names.get(name)
        source, original = module.source_of(node, name)
        if node is None or (source, original) == (module_name, name):
            submodule = self.module(f"{module_name}.{name}")
            return None if submodule is None else _Found(submodule.tree, submodule)
        if not source or source.split(".")[0] != module_name.split(".")[0]:
            return _Found(node, module)
        return self.find(source, original)

    def _parse(self, name: str) -> _Module | None:
        base = self._root.joinpath(*name.split("."))
        for file, package in ((base / "__init__.py", name), (base.with_suffix(".py"), name.rpartition(".")[0])):
            if file.is_file():
                return _Module(_parsed(file), package)
        return None

    def _member(self, owner: _Found, name: str) -> _Found | None:
        """A member of a class, of its bases if it has none itself; depth first, as single inheritance resolves.

        Of a name that is assigned an instance, `x = Class(...)`, that class's.
        """
        if isinstance(owner.node, (ast.Assign, ast.AnnAssign)) and isinstance(owner.node.value, ast.Call):
            made = self._base(owner.node.value.func, owner.module)
            return None if made is None else self._member(made, name)
        if not isinstance(owner.node, ast.ClassDef):
            return None
        node = _class_names(owner.node).get(name)
        if node is not None:
            return _Found(node, owner.module)
        for base in owner.node.bases:
            found = self._base(base, owner.module)
            inherited = None if found is None else self._member(found, name)
            if inherited is not None:
                return inherited
        return None

    def _base(self, base: ast.expr, module: _Module) -> _Found | None:
        if isinstance(base, ast.Subscript):
            base = base.value
        if not isinstance(base, ast.Name) or base.id not in module.names:
            return None
        node = module.names[base.id]
        source, original = module.source_of(node, base.id)
        return self.find(source, original) if source else _Found(node, module)

    def _described(self, found: _Found, *, in_class: bool = False) -> Symbol:
        node = found.node
        if isinstance(node, _FUNCTIONS):
            kind = next((_DECORATED[name] for name in _decorators(node) if name in _DECORATED), "")
            return Symbol(kind or ("method" if in_class else "function"), parameters_of(node.args))
        if isinstance(node, ast.ClassDef):
            made = self._member(found, "__init__")
            init = made.node if made is not None else None
            return Symbol("class", parameters_of(init.args) if isinstance(init, _FUNCTIONS) else None)
        if isinstance(node, ast.Module):
            return Symbol("module")
        return Symbol("import" if isinstance(node, (ast.Import, ast.ImportFrom)) else "attribute")


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), str(file))
    except (OSError, SyntaxError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        hint = "newer syntax than this Python's? Use the Python that the vLLM is for"
        raise InputError(f"{file} cannot be read: {why}", hint=hint) from None


class _Module:
    def __init__(self, tree: ast.Module, package: str) -> None:
        self.tree = tree
        self._package = package

    @cached_property
    def names(self) -> dict[str, ast.AST]:
        """Top-level names, those under `if` and `try` included; of several the first declaration that says most."""
        names: dict[str, ast.AST] = {}
        for node in _flat(self.tree.body):
            for name in _bound(node):
                if name not in names or (isinstance(node, ast.ClassDef) and not isinstance(names[name], ast.ClassDef)):
                    names[name] = node
        return names

    def source_of(self, node: ast.AST | None, name: str) -> tuple[str, str]:
        """The module that `name` is imported from and its name there; empty for what is not imported so."""
        if not isinstance(node, ast.ImportFrom):
            return "", ""
        return self._absolute(node), next(a.name for a in node.names if (a.asname or a.name) == name)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self._package.split(".")
        base = parts[: len(parts) - node.level + 1]
        return ".".join([*base, node.module] if node.module else base)


def parameters_of(args: ast.arguments) -> tuple[str, ...]:
    """A signature in `Symbol`'s spelling."""
    positional = [*args.posonlyargs, *args.args]
    first_default = len(positional) - len(args.defaults)
    spelled = [a.arg + ("=" if i >= first_default else "") for i, a in enumerate(positional)]
    if args.posonlyargs:
        spelled.insert(len(args.posonlyargs), "/")
    if args.vararg:
        spelled.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        spelled.append("*")
    spelled += [a.arg + ("" if d is None else "=") for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        spelled.append(f"**{args.kwarg.arg}")
    return tuple(spelled)


def bind_problem(parameters: Sequence[str], positional: int, keywords: Sequence[str]) -> str | None:
    """Why a call with so many positional arguments and these keywords does not fit, `self` not counted; else None."""
    names, required, keyword_only = [], set[str](), False
    any_positional = any_keyword = False
    for spelled in parameters:
        if spelled.startswith("**"):
            any_keyword = True
        elif spelled.startswith("*"):
            any_positional, keyword_only = len(spelled) > 1, True
        elif spelled != "/":
            name = spelled.removesuffix("=")
            if not spelled.endswith("="):
                required.add(name)
            if not keyword_only:
                names.append(name)
            elif name in keywords:
                required.discard(name)
    known = {spelled.removesuffix("=") for spelled in parameters}
    if positional > len(names) and not any_positional:
        return f"it takes {len(names)} positional arguments, not {positional}"
    for keyword in keywords:
        if keyword not in known and not any_keyword:
            return f"it has no parameter {keyword!r}"
    missing = required - set(names[:positional]) - set(keywords)
    return f"it needs {', '.join(sorted(missing))}" if missing else None


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        for field in ("body", "orelse", "handlers", "finalbody"):
            inner = getattr(node, field, None)
            if isinstance(node, (ast.If, ast.Try, ast.With)) and inner:
                for item in inner:
                    yield from _flat(item.body if isinstance(item, ast.ExceptHandler) else [item])


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.AnnAssign):
        yield from _targets([node.target])
    elif isinstance(node, ast.Assign):
        yield from _targets(node.targets)


def _targets(targets: Sequence[ast.expr]) -> Iterator[str]:
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id
        elif isinstance(target, ast.Tuple):
            yield from _targets(target.elts)


def _class_names(node: ast.ClassDef) -> dict[str, ast.AST]:
    """Members of a class body, and what its methods assign to `self`."""
    names: dict[str, ast.AST] = {}
    for item in _flat(node.body):
        names.update((name, item) for name in _bound(item))
    for method in node.body:
        if not isinstance(method, _FUNCTIONS):
            continue
        for item in ast.walk(method):
            targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", None)]
            for target in targets:
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                ):
                    names.setdefault(target.attr, item)
    return names


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call):
            decorator = decorator.func
        if isinstance(decorator, ast.Name):
            yield decorator.id
        elif isinstance(decorator, ast.Attribute):
            yield decorator.attr
