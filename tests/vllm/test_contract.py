"""The plugin against vLLM's recorded APIs, and the reader and checker behind that."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3hal.errors import InputError
from k3hal.vllm.compat import SUPPORTED, Use, minor_of, refusal
from k3hal.vllm.contract import SCHEMA, Contract, Needs, load_contracts, main, needs, problems, record
from k3hal.vllm.signatures import SourceTree, Symbol, bind_problem

RECORDED = load_contracts()
OVERRIDDEN = frozenset(name for contract in RECORDED for name in contract.symbols)


def test_every_supported_version_is_recorded() -> None:
    assert {minor_of(contract.version) for contract in RECORDED} == set(SUPPORTED)


@pytest.mark.parametrize("contract", RECORDED, ids=lambda contract: contract.version)
def test_what_the_plugin_uses_is_there(contract: Contract) -> None:
    again = f"if its use is new, record it: python -m k3hal.vllm.contract FOLDER --record {contract.version}"
    assert problems(contract, needs(), OVERRIDDEN) == [], again


def _trees() -> list[Path]:
    """Folders that hold a `vllm` package: the installed one, and what VLLM_SOURCE names."""
    found = importlib.util.find_spec("vllm")
    roots = [Path(found.origin).parents[1]] if found is not None and found.origin else []
    return roots + [Path(path) for path in os.environ.get("VLLM_SOURCE", "").split(os.pathsep) if path]


def test_what_the_plugin_uses_is_in_a_real_vllm() -> None:
    trees = _trees()
    if not trees:
        pytest.skip("no vLLM is installed, and VLLM_SOURCE names no unpacked one")
    for root in trees:
        assert problems(record(root, str(root), needs()), needs(), OVERRIDDEN) == []


@pytest.mark.parametrize("use", list(needs().uses), ids=lambda use: use.symbol)
def test_a_symbol_that_moved_is_named(use: Use) -> None:
    contract = RECORDED[-1]
    without = replace(contract, symbols={k: v for k, v in contract.symbols.items() if k != use.symbol})
    assert any(use.symbol in line for line in problems(without, needs(), OVERRIDDEN))


def test_calls_and_overrides_that_no_longer_fit_are_named(tmp_path: Path) -> None:
    (tmp_path / "ours.py").write_text(
        "from vllm.base import Base, helper as h\n"
        "class Ours(Base):\n    def step(self, batch, *, last=False): ...\n    def own(self, anything): ...\n"
    )
    wanted = needs(tmp_path, [Use("vllm.base:make", 1, ("name",))])
    good = {
        "vllm.base:Base": Symbol("class", ("self",)),
        "vllm.base:helper": Symbol("function", ("x",)),
        "vllm.base:make": Symbol("function", ("kind", "*", "name=")),
        "vllm.base:Base.step": Symbol("method", ("self", "batch", "last=")),
    }
    known = frozenset(good)
    assert problems(Contract("1", good), wanted, known) == []
    cases = {
        "vllm.base:make": (Symbol("function", ("kind",)), "no parameter 'name'"),
        "vllm.base:Base.step": (Symbol("method", ("self", "batch", "last=", "extra=")), "no parameter 'extra'"),
        "vllm.base:helper": (None, "is gone"),
    }
    for name, (symbol, text) in cases.items():
        moved = {**good, name: symbol} if symbol else {k: v for k, v in good.items() if k != name}
        (line,) = problems(Contract("2", moved), wanted, known)
        assert name in line and text in line
    gone = {k: v for k, v in good.items() if k != "vllm.base:Base.step"}
    (line,) = problems(Contract("2", gone), wanted, known)
    assert "vllm.base:Base.step" in line and "overrides nothing" in line


def test_declarations_are_read_through_imports_and_bases(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .sub import A as B\n"
    )
    (package / "sub" / "__init__.py").write_text("from .deep import A, make, instance\nfrom vllm.sub import deep\n")
    (package / "sub" / "deep.py").write_text(
        "import os\nfrom typing import Generic, TypeVar\nT = TypeVar('T')\n"
        "try:\n    from os import path\nexcept ImportError:\n    path = None\n"
        "class Base(Generic[T]):\n    limit: int = 3\n"
        "    def __init__(self, a, b=1, *rest, c, d=2, **more):\n        self.found = a\n"
        "    @classmethod\n    def of(cls, x, /, y): ...\n    @property\n    def size(self): ...\n"
        "class A(Base[int]):\n    def go(self, *, late=None): ...\n"
        "async def make(p): ...\ninstance = A(1)\n"
    )
    tree = SourceTree(tmp_path)
    made = ("self", "a", "b=", "*rest", "c", "d=", "**more")
    assert tree.symbol("vllm:B") == Symbol("class", made)
    assert tree.symbol("vllm:B.of") == Symbol("classmethod", ("cls", "x", "/", "y"))
    assert tree.symbol("vllm.sub:A.go") == Symbol("method", ("self", "*", "late="))
    assert tree.symbol("vllm.sub:A.size") == Symbol("property", ("self",))
    assert tree.symbol("vllm.sub:A.limit") == tree.symbol("vllm.sub:A.found") == Symbol("attribute")
    assert tree.symbol("vllm.sub:instance.of") == tree.symbol("vllm:B.of")
    assert tree.symbol("vllm.sub:make") == Symbol("function", ("p",))
    assert tree.symbol("vllm.sub:deep") == Symbol("module")
    assert tree.symbol("vllm.sub.deep:path") == Symbol("import")
    for missing in ("vllm:C", "vllm:B.gone", "vllm.none:A", "vllm.sub:make.x"):
        assert tree.symbol(missing) is None


_NAMES = st.lists(st.sampled_from("abcd"), unique=True, max_size=4)


@given(_NAMES, st.integers(0, 4), st.booleans(), st.booleans(), st.sets(st.sampled_from("abcd")), st.data())
def test_binding_agrees_with_python(
    names: list[str], split: int, rest: bool, more: bool, defaults: set[str], data: st.DataObject
) -> None:
    positional, keyword_only = names[:split], names[split:]
    positional.sort(key=lambda name: name in defaults)
    spelled = [name + "=" * (name in defaults) for name in positional]
    if rest or keyword_only:
        spelled.append("*rest" if rest else "*")
    spelled += [name + "=" * (name in defaults) for name in keyword_only] + ["**more"] * more
    source = ", ".join(part + "0" if part.endswith("=") else part for part in spelled)
    scope: dict[str, object] = {}
    exec(f"def f({source}): ...", scope)
    count = data.draw(st.integers(0, 5))
    keywords = data.draw(
        st.lists(st.sampled_from("abcdz"), unique=True).filter(lambda k: not set(k) & set(positional[:count]))
    )
    try:
        inspect.signature(scope["f"]).bind(*range(count), **dict.fromkeys(keywords, 0))  # pyright: ignore[reportArgumentType]
        fits = True
    except TypeError:
        fits = False
    assert (bind_problem(spelled, count, keywords) is None) == fits


@pytest.mark.parametrize(
    ("version", "works"),
    [("0.32.0", True), ("0.33.1", True), ("0.32.0+cpu", True), ("0.33.0rc1", True), ("0.34.0", False), ("dev", False)],
)
def test_other_versions_are_refused_in_one_line(version: str, works: bool) -> None:
    line = refusal(version)
    assert (line is None) == works
    if line is not None:
        assert version in line and "0.32 and 0.33" in line and "\n" not in line


def test_the_command_says_what_moved_and_what_is_wrong_with_its_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 4
    assert "holds no vllm/ package" in capsys.readouterr().err
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    assert main([str(tmp_path), "--record", "0.1"]) == 4
    assert "0.1 is none of" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 1
    assert needs().uses[0].symbol in capsys.readouterr().out


@pytest.mark.parametrize("source", [b"class Platform(:\n", b"\xff\xfe", b"x = 1\x00"])
def test_sources_that_are_no_python_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: bytes
) -> None:
    for name in ("vllm", "vllm/platforms"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "vllm" / "platforms" / "interface.py").write_bytes(source)
    assert main([str(tmp_path)]) == 4
    said = capsys.readouterr().err
    assert "interface.py cannot be read: " in said and said.count("\n") == 1


def test_a_contract_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.setattr("k3hal.vllm.contract.CONTRACTS", tmp_path / "none")
    assert main([str(tmp_path), "--record", f"{SUPPORTED[0]}.0"]) == 4
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "data", [[], {"schema": "other/1"}, {"schema": SCHEMA}, {"schema": SCHEMA, "symbols": {"a": 1}}]
)
def test_a_file_that_is_no_contract_is_refused(data: object) -> None:
    with pytest.raises(InputError, match=r"x\.json is"):
        Contract.from_json(data, "x.json")


def test_importing_the_plugin_loads_neither_vllm_nor_torch() -> None:
    code = "import sys, k3hal.vllm, k3hal.vllm.compat; print(sorted({'vllm', 'torch'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_needs_are_found_in_the_sources(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("def f():\n    from vllm.a import b as c\n    import os\n")
    assert needs(tmp_path, []) == Needs((), {"vllm.a:b": "x.py"}, ())
