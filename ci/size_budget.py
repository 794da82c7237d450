"""Keeps files and functions small: over 300 lines a file is reported, over 500 it fails, as does a function over 60.

Kernels (`backends/*/kernels/`) are exempt: splitting one helps nobody.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREES = ("k3hal", "dispatch", "backends", "model", "tests", "ci")
SOFT_FILE_LINES = 300
HARD_FILE_LINES = 500
FUNCTION_LINES = 60


def python_files() -> Iterator[Path]:
    """Every Python file under the budget, the symlinks of `ci/typing` left out."""
    for tree in TREES:
        for path in sorted((ROOT / tree).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            if parts[:2] != ("ci", "typing") and not (parts[0] == "backends" and "kernels" in parts):
                yield path


def long_functions(source: str) -> Iterator[tuple[str, int]]:
    """Name and length of each function over the budget, its decorators not counted."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield node.name, length


def main() -> int:
    failed = False
    for path in python_files():
        source = path.read_text(encoding="utf-8")
        name, lines = path.relative_to(ROOT), len(source.splitlines())
        if lines > HARD_FILE_LINES:
            print(f"{name}: {lines} lines, at most {HARD_FILE_LINES}")
            failed = True
        elif lines > SOFT_FILE_LINES:
            print(f"{name}: {lines} lines, over the soft budget of {SOFT_FILE_LINES}")
        for function, length in long_functions(source):
            print(f"{name}: {function}() has {length} lines, at most {FUNCTION_LINES}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
