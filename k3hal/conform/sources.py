"""A hash of the sources a provider is made of, so that a report can say when they have changed."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from k3hal.dispatch.provider import Provider
from k3hal.dispatch.registry import BUILTIN

SHARED = "k3hal.dispatch.transforms"
_KERNELS = (".cpp", ".cu", ".hip", ".cc")
_HEADERS = (".h", ".hpp", ".cuh")


def source_hash(provider: Provider) -> str:
    """SHA-256 over the provider's file and every file that it imports, directly or not, of its own backend and of the
    transforms that backends share.

    Of the kernel sources in their folders those count whose name stands as a string in one of the files, and headers.
    What other backends, vendor libraries or the operator's own contract do is not part of it.
    """
    files = _python_files(provider.fn.__module__)
    text = "\n".join(path.read_text("utf-8") for path in files)
    files += sorted(kernel for folder in {path.parent for path in files} for kernel in _kernel_files(folder, text))
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _python_files(module: str) -> list[Path]:
    """The files of `module` and all it imports of its own backend, sorted by module name."""
    parts = module.split(".")
    depth = BUILTIN.count(".") + 2 if module.startswith(f"{BUILTIN}.") else 1
    root = ".".join(parts[:depth])
    found: dict[str, Path] = {}
    rest = [module]
    while rest:
        name = rest.pop()
        path = _file_of(name)
        if name in found or path is None:
            continue
        found[name] = path
        # A backend's package file names its manifest and not what a provider computes.
        rest += [n for n in _imports(path, name) if n.startswith((f"{root}.", SHARED))]
    return [found[name] for name in sorted(found)]


def _file_of(module: str) -> Path | None:
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if loaded:
        return Path(loaded)
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the name of something inside a module
        return None
    return Path(spec.origin) if spec and spec.origin else None


def _imports(path: Path, module: str) -> Iterator[str]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _kernel_files(folder: Path, text: str) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.suffix in _HEADERS or (path.suffix in _KERNELS and f'"{path.stem}"' in text):
            yield path
