"""`conform contracts`: signatures are read from folders, archives, texts and packages, and drift is shown."""

from __future__ import annotations

import json
import sys
import tarfile
import zipfile
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

import k3hal.cli.conform_contracts as verb
from k3hal.cli.app import app
from k3hal.conform.contracts.drift import compare, refreshed
from k3hal.conform.contracts.python import python_parameters
from k3hal.conform.contracts.schemas import parse_schema, schema_parameters
from k3hal.conform.contracts.source import opened
from k3hal.dispatch.contracts import entries_of, parse_library
from k3hal.dispatch.provider import Provider
from k3hal.dispatch.registry import Registry
from k3hal.errors import InputError, UsageError

KERNELS = '''
from typing import overload
from dataclasses import dataclass
try:
    from lib._compiled import fast
except ImportError:
    fast = None

@overload
def run(x): ...

@traced(name="run")
def run(x, /, y=1e-6, *rest, mode: str = "a,b=(c", scale=None, **options):
    """Docstring."""

if True:
    def guarded(a, b=((1, 2), [3])): ...

@dataclass
class Config:
    """Fields."""
    size: int
    name: str = "n"

class Wrapper:
    def __init__(self, buffer, kind="NHD"): ...
    async def plan(self, indptr, *, causal=False): ...
'''
FILES = {
    "lib/__init__.py": "from .ops import run as launch\nfrom lib.ops.kernels import *\n",
    "lib/ops/__init__.py": "from .kernels import run\n",
    "lib/ops/kernels.py": KERNELS,
    "lib/ops/loop.py": "from lib.ops.loop import f\nfrom .other import f\n",
    "lib/ops/other.py": "from .loop import f\n",
    "csrc/binding.cpp": """
        ops.def("decode(Tensor q, Tensor(a!) state, "
                "int[]? lengths=None, *, float[2] range=[0, 1], "
                "ScalarType? kind=None) -> (Tensor, Tensor[])");
        ops.def("other_decode(Tensor q) -> Tensor");
    """,
}
WRITTEN = """schema = "k3hal.contracts/1"
package = "lib"
versions = ">=1,<2"
read_in = "1.0"
source = "https://example.org/lib"

[[function]]
name = "lib.ops.kernels:run"
parameters = ["x", "/", "y=1e-06", "*rest", "mode='a,b=(c'", "scale=None", "**options"]

[[function]]
name = "torch.ops.lib:decode"
parameters = [
    "q: Tensor", "state: Tensor(a!)", "lengths: int[]?=None", "*", "range: float[2]=[0, 1]", "kind: ScalarType?=None",
]
"""


@pytest.fixture(params=["folder", "wheel", "sdist"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(_packed(tmp_path, request.param, FILES))


def _packed(tmp_path: Path, kind: str, files: dict[str, str]) -> Path:
    folder = tmp_path / "lib-1.5"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "logo.png").write_bytes(b"\xff\xd8")
    if kind == "folder":
        return folder
    if kind == "wheel":
        with zipfile.ZipFile(tmp_path / "lib-1.5-py3-none-any.whl", "w") as archive:
            for file in folder.rglob("*.*"):
                archive.write(file, file.relative_to(folder))
            archive.writestr("lib-1.5.dist-info/METADATA", "Name: lib\nVersion: 1.5\n\nVersion: 9\n")
        return tmp_path / "lib-1.5-py3-none-any.whl"
    (folder / "PKG-INFO").write_text("Name: lib\nVersion: 1.5\n")
    with tarfile.open(tmp_path / "lib-1.5.tar.gz", "w:gz") as archive:
        archive.add(folder, "lib-1.5")
    return tmp_path / "lib-1.5.tar.gz"


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("lib.ops.kernels:run", "x / y=1e-06 *rest mode='a,b=(c' scale=None **options"),
        ("lib.ops:run", "x / y=1e-06 *rest mode='a,b=(c' scale=None **options"),
        ("lib:launch", "x / y=1e-06 *rest mode='a,b=(c' scale=None **options"),
        ("lib:guarded", "a b=((1,2),[3])"),
        ("lib.ops.kernels:Config", "size name='n'"),
        ("lib.ops.kernels:Wrapper", "buffer kind='NHD'"),
        ("lib.ops.kernels:Wrapper.plan", "self indptr * causal=False"),
        ("lib.ops.kernels:fast", None),
        ("lib.ops.kernels:run.plan", None),
        ("lib.ops.kernels:Wrapper.stop", None),
        ("lib.ops.loop:f", None),
        ("lib.absent:f", None),
    ],
)
def test_functions_are_found_where_they_are_defined(source: str, name: str, entries: str | None) -> None:
    module, _, function = name.partition(":")
    with opened(source) as files:
        found = python_parameters(files, module, function)
        assert files.version == ("" if Path(source).is_dir() else "1.5")
    shown = None if found is None else " ".join(entry.replace(", ", ",") for entry in entries_of(found))
    assert shown == entries


def test_schemas_are_found_in_registrations(source: str) -> None:
    with opened(source) as files:
        found = schema_parameters(files, "torch.ops.lib", "decode", "")
        assert schema_parameters(files, "torch.ops.lib", "absent", "") is None
    assert found is not None
    assert entries_of(found) == [
        "q: Tensor", "state: Tensor(a!)", "lengths: int[]?=None", "*", "range: float[2]=[0, 1]",
        "kind: ScalarType?=None",
    ]  # fmt: skip


def test_schemas_are_found_in_a_list(tmp_path: Path) -> None:
    file = tmp_path / "schemas.txt"
    file.write_text("npu::relu(Tensor x) -> Tensor\nnpu::relu.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)\n")
    with opened(str(file)) as files:
        found = schema_parameters(files, "torch.ops.npu", "relu", "")
        assert found and entries_of(found) == ["x: Tensor"]


def test_schemas_of_what_is_installed_are_torchs() -> None:
    with opened("torch") as files:
        found = schema_parameters(files, "torch.ops.aten", "addmm", "torch")
        assert found and entries_of(found)[:3] == ["self: Tensor", "mat1: Tensor", "mat2: Tensor"]
        assert schema_parameters(files, "torch.ops.aten", "absent", "") is None
        with pytest.raises(InputError, match="no_such_module cannot be imported"):
            schema_parameters(files, "torch.ops.aten", "addmm", "no_such_module")


@pytest.mark.parametrize("arguments", ["Tensor", "Tensor 3", "Tensor x, int[", "=3"])
def test_what_is_no_schema_is_refused(arguments: str) -> None:
    with pytest.raises(InputError, match=r"here: .* is no argument of a schema"):
        parse_schema(arguments, "here")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("lib.whl", b"PK\x03\x04 cut off", "is no archive and no text"),
        ("lib.bin", b"\x00", "is no archive and no text"),
        ("lib.tar.gz", b"\x1f\x8b\x08\x00 cut", "cannot be read: Compressed file ended"),
    ],
)
def test_a_broken_source_is_refused(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=problem), opened(str(tmp_path / name)):
        pass


@pytest.mark.parametrize(("at", "changed"), [("data", b"\xff" * 40), ("method", b"\x63"), ("flags", b"\x01")])
def test_a_wheel_that_is_damaged_or_locked_is_refused_with_its_file(tmp_path: Path, at: str, changed: bytes) -> None:
    path = tmp_path / "lib.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("lib.py", KERNELS)
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")
    for start in {"data": [60], "method": [8, entry + 10], "flags": [6, entry + 8]}[at]:
        content[start : start + len(changed)] = changed
    path.write_bytes(content)
    with opened(str(path)) as files, pytest.raises(InputError, match=r"lib\.whl: lib\.py cannot be read: "):
        python_parameters(files, "lib", "run")


def test_a_damaged_source_archive_is_refused(tmp_path: Path) -> None:
    folder, path = _packed(tmp_path, "folder", FILES), tmp_path / "lib.tar.xz"
    (folder / "noise.bin").write_bytes(Random(0).randbytes(1 << 16))
    with tarfile.open(path, "w:xz") as archive:
        archive.add(folder / "noise.bin", "noise.bin")
        archive.add(folder / "lib", "lib")
    damaged = bytearray(path.read_bytes())
    damaged[60_000:65_000] = b"\xff" * 5000
    path.write_bytes(damaged)
    with pytest.raises(InputError, match=r"lib\.tar\.xz cannot be read: "), opened(str(path)):
        pass


def test_a_source_that_is_no_python_is_refused_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "lib.py").write_text("def run(:\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    with opened(str(tmp_path)) as files:
        with pytest.raises(InputError, match=r"lib\.py is no Python: invalid syntax"):
            python_parameters(files, "lib", "run")
        with pytest.raises(InputError, match=r"latin\.py is not UTF-8"):
            python_parameters(files, "latin", "run")
    with pytest.raises(UsageError, match="is no path and no installed package"), opened("no-such-package"):
        pass


def test_a_source_may_name_its_encoding(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_bytes("# -*- coding: latin-1 -*-\ndef run(a, b=1): '\xe9'\n".encode("latin-1"))
    (tmp_path / "unknown.py").write_bytes(b"# -*- coding: no-such -*-\ndef run(a): ...\n")
    with opened(str(tmp_path)) as files:
        assert [one.name for one in python_parameters(files, "named", "run") or ()] == ["a", "b"]
        with pytest.raises(InputError, match=r"unknown\.py is not UTF-8: unknown encoding"):
            python_parameters(files, "unknown", "run")


def test_drift_is_told_apart(tmp_path: Path) -> None:
    text = WRITTEN + "".join(
        f'\n[[function]]\nname = "{name}"\nparameters = []\n'
        for name in ("lib.ops.kernels:gone", "lib.ops.kernels:fast", "lib.absent:f")
    )
    library = parse_library(text, "here")
    changed = {**FILES, "lib/ops/kernels.py": KERNELS.replace("scale=None", "new").replace("y=1e-6", "y=2")}
    with opened(str(_packed(tmp_path, "wheel", changed))) as files:
        found = list(compare(library, files, "1.5"))
        later = list(compare(library, files, "2.0"))
        assert [one.status for one in later] == ["not recorded", "not recorded", "missing", "unread", "unread"]
        assert later[0].changes == ("no record is of 2.0", "scale=None is gone", "new is new", "y=1e-06 is now y=2")
        assert later[1].changes == ("no record is of 2.0", "it is as recorded of >=1,<2")
        added = refreshed(library, later, "2.0", "").of("lib.ops.kernels:run")
        assert [(one.versions, one.read_in) for one in added] == [(">=1,<2", "1.0"), ("==2.0", "2.0")]
        assert added[0] == library.records[0] and added[1].parameters == later[0].now
    assert [one.status for one in found] == ["drifted", "same", "missing", "unread", "unread"]
    assert found[0].changes == ("scale=None is gone", "new is new", "y=1e-06 is now y=2")


def _run(*words: str) -> Any:
    return CliRunner().invoke(app, ["conform", "contracts", *words], standalone_mode=False)


@pytest.fixture
def contract_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "lib.toml"
    file.write_text(WRITTEN)
    monkeypatch.setattr(verb, "_files", lambda: {"acme/lib": file})
    return file


def test_the_verb_compares_and_refreshes(contract_file: Path, tmp_path: Path) -> None:
    changed = {**FILES, "lib/ops/kernels.py": KERNELS.replace("scale=None", "scale=None, new=1")}
    wheel = str(_packed(tmp_path, "wheel", changed))
    first = _run("--from", wheel)
    assert first.return_value == 1 and "drifted        lib.ops.kernels:run" in first.output
    assert "new=1 is new" in first.output and contract_file.read_text() == WRITTEN
    url = "https://example.org/lib/tree/v1.5"
    assert _run("--from", wheel, "--refresh", "--url", url).return_value == 1
    written = contract_file.read_text()
    assert all(part in written for part in ('"new=1"', 'read_in = "1.5"', f'source = "{url}"'))
    again = _run("--from", wheel, "--json")
    said = json.loads(again.output)
    assert again.return_value == 0 and said["schema"] == "k3hal.conform_contracts/1"
    (library,) = said["libraries"]
    assert (library["version"], {one["status"] for one in library["functions"]}) == ("1.5", {"same"})


def test_the_verb_without_a_source_says_what_is_recorded(contract_file: Path) -> None:
    said = _run()
    assert said.return_value == 2 and said.output == "acme/lib: lib is not installed; recorded functions: 2\n"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--library", "acme/libb"], "no contract file 'acme/libb' (did you mean 'acme/lib'?)"),
        (["--from", "no-such-package"], "is no path and no installed package"),
        (["--url", "https://example.org"], "--url is 'https://example.org' (an https address, and with --refresh)"),
        (["--refresh", "--url", "lib"], "--url is 'lib'"),
    ],
)
def test_the_verb_refuses(contract_file: Path, words: list[str], problem: str) -> None:
    error = _run(*words).exception
    assert isinstance(error, UsageError) and problem in str(error)


def test_a_backend_of_one_module_has_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    one = ModuleType("one_module")
    one.__package__ = ""
    monkeypatch.setitem(sys.modules, "one_module", one)

    def scaled() -> None: ...

    scaled.__module__ = "one_module"
    registry = Registry(providers=[Provider("silu_and_mul", "one", scaled, backend="one")])
    monkeypatch.setattr("k3hal.dispatch.registry.default_registry", lambda: registry)
    assert verb._files() == {}


def test_the_files_of_the_backends_are_found() -> None:
    assert {"nvidia/fla-core", "nvidia/flashinfer-python"} <= set(verb._files())
    with pytest.raises(UsageError, match="--from and --refresh are for one library"):
        verb.contracts(source="torch")


def test_quotation_marks_inside_a_literal_of_c_are_not_escaped(tmp_path: Path) -> None:
    (tmp_path / "binding.cpp").write_text('ops.def("spread(Tensor x, str layout=\\"TND\\") -> Tensor");', "utf-8")
    with opened(str(tmp_path)) as files:
        found = schema_parameters(files, "torch.ops.own", "spread", "")
    assert found is not None and entries_of(found) == ["x: Tensor", 'layout: str="TND"']
