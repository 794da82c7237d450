"""The public names are listed, and the lists are true."""

from __future__ import annotations

import importlib

import pytest

from k3hal import errors
from k3hal.dispatch import errors as defined


@pytest.mark.parametrize("module", ["k3hal", "k3hal.cli", "k3hal.dispatch", "k3hal.errors"])
def test_listed_names_exist_once(module: str) -> None:
    names = importlib.import_module(module).__all__
    assert [name for name in names if not hasattr(importlib.import_module(module), name)] == []
    assert len(set(names)) == len(names)


def test_every_error_class_is_public() -> None:
    classes = {n for n, v in vars(defined).items() if isinstance(v, type) and issubclass(v, defined.K3HALError)}
    assert set(errors.__all__) == classes


def test_every_error_has_its_own_code_and_a_documented_exit_code() -> None:
    classes = [getattr(errors, name) for name in errors.__all__]
    assert {c.exit_code for c in classes} <= {2, 3, 4}
    assert len({c.code for c in classes}) == len(classes)
