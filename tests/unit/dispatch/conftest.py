"""The toy operators as the registry's only ones, and where the checkout is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .toys import HEAD, OPERATOR_TEMPLATE, TOYS


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The registry sees the toy operators, and only these, while a module's tests run."""
    folder = tmp_path_factory.mktemp("toy_ops")
    for name, (text, more) in TOYS.items():
        (folder / f"{name}.py").write_text(HEAD + text + OPERATOR_TEMPLATE.format(fn=name, more=more))
    package = importlib.import_module("k3hal.dispatch.ops")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package, "__path__", [str(folder)])
        importlib.invalidate_caches()
        yield
    for name in TOYS:
        sys.modules.pop(f"k3hal.dispatch.ops.{name}", None)
        vars(package).pop(name, None)


@pytest.fixture(scope="session")
def repo() -> Path:
    return Path(__file__).resolve().parents[3]
