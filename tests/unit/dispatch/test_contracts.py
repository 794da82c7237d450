"""Recorded contracts: the files are well-formed, and every call that an adapter makes binds to them (E1)."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from keyword import iskeyword
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from k3hal.conform.contracts.write import library_text
from k3hal.dispatch.call import Call, No
from k3hal.dispatch.contracts import (
    Library,
    Parameter,
    Record,
    contract_files,
    entries_of,
    parse_library,
    parse_parameters,
    read_library,
)
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.errors import BackendError
from k3hal.dispatch.library import Function, loaded, recorded, unbound, usable
from k3hal.dispatch.provider import Provider
from k3hal.dispatch.registry import default_registry

NVIDIA = "k3hal.backends.nvidia"


def _modules() -> Iterator[ModuleType]:
    for name in sorted({p.fn.__module__ for p in default_registry().providers}):
        yield importlib.import_module(name)


def _functions(module: ModuleType) -> dict[str, Function]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Function)}


FUNCTIONS = [(m.__name__, name) for m in _modules() for name in _functions(m)]
HOMES = sorted({m.__name__.rpartition(".")[0] for m in _modules()})
FILES = [(home, library) for home in HOMES for library in contract_files(home)]


@pytest.mark.parametrize(("home", "library"), FILES)
def test_a_contract_file_is_written_as_the_tool_writes_it(home: str, library: str) -> None:
    """So that refreshing one shows drift and nothing else."""
    found = read_library(home, library)
    assert contract_files(home)[library].read_text("utf-8") == library_text(found)


@pytest.mark.parametrize(("home", "library"), FILES)
def test_every_recorded_function_is_called_by_an_adapter(home: str, library: str) -> None:
    called = {
        f"{f.module}:{f.name}"
        for m in _modules()
        if m.__name__.startswith(f"{home}.")
        for f in _functions(m).values()
        if f.records[0].package == read_library(home, library).package
    }
    assert {f"{r.module}:{r.name}" for r in read_library(home, library).records} == called


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_an_adapter_passes_what_it_says(module: str, name: str) -> None:
    """Every call by keywords, and the union of them is what the function is said to be passed."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    calls = [
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == name
    ]
    assert calls, "it is never called"
    assert not any(call.args for call in calls), "an argument is passed by position"
    passed = {keyword.arg for call in calls for keyword in call.keywords}
    assert passed == set(_functions(sys.modules[module])[name].passes)


def _bound_versions() -> Iterator[Any]:
    for provider in default_registry().providers:
        functions = _functions(sys.modules[provider.fn.__module__])
        records = {record for function in functions.values() for record in function.records}
        for package, wanted in provider.needs.packages.items():
            versions = {r.read_in for r in records if canonicalize_name(r.package) == canonicalize_name(package)}
            for version in sorted(versions):
                if not SpecifierSet(wanted) or SpecifierSet(wanted).contains(version, prereleases=True):
                    yield pytest.param(provider, package, version, id=f"{provider.op}-{provider.id}-{version}")


@pytest.mark.parametrize(("provider", "package", "version"), list(_bound_versions()))
def test_a_call_binds_in_every_release_that_a_provider_takes(provider: Provider, package: str, version: str) -> None:
    vendor = next(iter(provider.needs.vendors), "cpu")
    arch = next(iter(provider.needs.arch), "any")
    machine = DeviceDescription("there", vendor, arch, provider.needs.min_arch or 0, packages={package: version})
    call = Call(provider.op, machine, next(iter(provider.needs.dtypes), "bfloat16"), "any", {})
    assert not [reason for reason in provider.every_reason(call) if "does not bind" in reason]


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_a_call_binds_to_the_latest_record(module: str, name: str) -> None:
    function = _functions(sys.modules[module])[name]
    assert function.records[-1].refuses(function.passes) == ""


def test_a_release_that_takes_other_arguments_is_a_reason() -> None:
    decode = recorded(
        f"{NVIDIA}.other",
        "flashinfer-python",
        "flashinfer.kda_decode:fused_kda_decode",
        ("x", "weight", "backend"),
    )
    assert "0.7.4 does not bind: missing a required argument: 'conv_state'" in unbound(
        decode, {"flashinfer-python": "0.7.4"}
    )
    required = [p.name for p in decode.records[0].parameters if p.default is None]
    decode = replace(decode, passes=(*required, "backend"))
    assert "0.6.18 does not bind: got an unexpected keyword" in unbound(decode, {"flashinfer-python": "0.6.18"})
    assert unbound(decode, {"flashinfer-python": "0.7.4"}) == ""
    assert unbound(decode, {"flashinfer-python": "0.9"}) == unbound(decode, {}) == ""
    machine = DeviceDescription("there", "nvidia", "sm_100", packages={"flashinfer-python": "0.6.18"})
    said = usable(Call("kda_decode", machine, "bfloat16"), (decode,), "another reason")
    assert isinstance(said, No) and len(said.reasons) == 2


def test_functions_of_torchs_operators_are_found_by_their_schemas() -> None:
    record = Record("torch.ops.aten", "relu", parse_parameters(["self: Tensor"], "here"), "torch", "", "2", "https://x")
    relu = Function("torch.ops.aten", "relu", (record,), ("self",), "torch")
    fn, problem = loaded(relu)
    assert fn is not None and not problem
    other = replace(relu, passes=("self", "slope"))
    assert loaded(other)[1] == "torch.ops.aten.relu has no slope, which torch 2 has"
    missing = replace(relu, name="no_such_operator")
    assert "cannot be loaded: AttributeError" in loaded(missing)[1]


HEAD = 'schema = "k3hal.contracts/1"\npackage = "p"\nversions = ""\nread_in = "1"\nsource = "https://x"\n'
ONE = '[[function]]\nname = "m:f"\nparameters = ["a"]\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("= 1", "not TOML"),
        (ONE, "'schema' is missing"),
        ('schema = "k3hal.contracts/2"\npackage = "p"\n' + ONE, "not 'k3hal.contracts/1'"),
        (HEAD + "function = 3\n", "functions are not written as"),
        (HEAD + "function = [3]\n", "3 is not a table"),
        (HEAD + "x = 1\n" + ONE, "unknown key 'x'"),
        (HEAD + "note = 1\n" + ONE, "note is 1, not a string"),
        (HEAD.replace('versions = ""', 'versions = "new"') + ONE, "Invalid specifier"),
        (HEAD.replace("https", "http") + ONE, "not an https URL"),
        (HEAD.replace('read_in = "1"\n', "") + ONE, "'read_in' is missing"),
        (HEAD + ONE.replace("m:f", "m.f"), "a name is written module:function"),
        (HEAD + ONE.replace('["a"]', '"a"'), "parameters are not a list"),
        (HEAD + ONE.replace('"a"', '"a b"'), "'a b' is not a parameter"),
        (HEAD + ONE.replace('"a"', "3"), "3 is not a parameter"),
        (HEAD + ONE.replace('"a"', '"a", "a"'), "duplicate parameter name"),
        (HEAD + ONE.replace('"a"', '"**a", "b"'), "wrong parameter order"),
        (HEAD + ONE + ONE, "is recorded twice for ''"),
    ],
)
def test_a_malformed_contract_file_is_refused(text: str, problem: str) -> None:
    with pytest.raises(BackendError, match=r"^here: ") as error:
        parse_library(text, "here")
    assert problem in str(error.value)


def test_what_is_not_recorded_is_refused_with_the_nearest() -> None:
    with pytest.raises(BackendError, match=r"did you mean 'fla\.ops\.kda\.chunk:chunk_kda'"):
        recorded(f"{NVIDIA}.fla", "fla-core", "fla.ops.kda.chunk:chunk_kd", ())
    with pytest.raises(BackendError, match=r"has no contract file fla_core\.toml .*fla-core"):
        recorded(f"{NVIDIA}.fla", "fla_core", "fla.ops.kda.chunk:chunk_kda", ())


NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True).filter(lambda name: not iskeyword(name))
TYPES = st.sampled_from(["", "Tensor", "Tensor(a!)", "int[]?", "float", "str?"])
DEFAULTS = st.sampled_from([None, "None", "'a=b'", "-1.0", "f(x=1)", "{'a': 1}", '"\\n"'])
_Kind = inspect._ParameterKind


@st.composite
def signatures(draw: st.DrawFn) -> tuple[Parameter, ...]:
    names = draw(st.lists(NAMES, max_size=8, unique=True))
    kinds = sorted(draw(st.lists(st.sampled_from(list(_Kind)), min_size=len(names), max_size=len(names))))
    out, seen = [], set()
    for name, kind in zip(names, kinds, strict=True):
        once = kind in (_Kind.VAR_POSITIONAL, _Kind.VAR_KEYWORD)
        if once and kind in seen:
            continue
        seen.add(kind)
        out.append(Parameter(name, kind, draw(TYPES), None if once else draw(DEFAULTS)))
    return tuple(out)


@given(signatures())
def test_parameters_are_read_back_as_they_were_written(parameters: tuple[Parameter, ...]) -> None:
    assert parse_parameters(entries_of(parameters), "here") == parameters


@given(st.lists(st.tuples(NAMES, signatures(), st.sampled_from(["", ">=1,<2", "==3"])), min_size=1, max_size=4))
def test_a_file_is_read_back_as_it_was_written(rows: list[Any]) -> None:
    records = {
        (name, versions): Record("m", name, parameters, "p", versions, "1", "https://x", 'a "note"\n')
        for name, parameters, versions in rows
    }
    library = Library("p", "loaded.first", tuple(records.values()), "of all")
    assert parse_library(library_text(library), "here") == library
