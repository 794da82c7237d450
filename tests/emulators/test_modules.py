"""What stands in for a vendor's library goes when it is not needed, and takes nothing else with it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ..ops.vendor_fakes import FAKES, installed
from .aiter_ops import EMULATORS as AITER
from .aiter_ops import emulated
from .ascend_ops import EMULATORS as ASCEND
from .torch_ops import registered

STAND_INS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], set[str]]] = {
    "fakes": (lambda: installed(FAKES), {function.module for function in FAKES}),
    "aiter": (emulated, {function.module for function in AITER}),
    "ascend": (lambda: registered(ASCEND), {function.load for function in ASCEND if function.load}),
}


@pytest.mark.parametrize("name", STAND_INS)
def test_only_the_stand_ins_are_taken_away(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of torch that is imported meanwhile stays: imported twice, it registers its operators twice."""
    (tmp_path / "imported_meanwhile.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    enter, modules = STAND_INS[name]
    assert modules and not modules & set(sys.modules)
    try:
        with enter():
            assert modules <= set(sys.modules)
            first = __import__("imported_meanwhile")
        assert sys.modules.get("imported_meanwhile") is first
    finally:
        sys.modules.pop("imported_meanwhile", None)
    assert not modules & set(sys.modules)


def test_an_installed_library_gets_its_own_functions_back(monkeypatch: pytest.MonkeyPatch) -> None:
    (module, name), *_ = {(f.module, f.name) for f in AITER if "." not in f.name}
    library, own = ModuleType(module), SimpleNamespace()
    setattr(library, name, own)
    monkeypatch.setitem(sys.modules, module, library)
    with emulated():
        assert getattr(library, name) is not own
    assert sys.modules[module] is library and getattr(library, name) is own
