"""Known faults are fences: a call on a machine that has one is a No, and `op explain` says which."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from typer.testing import CliRunner

from k3hal.cli.app import app
from k3hal.cli.op_explain import _lines
from k3hal.dispatch import Call, DeviceDescription, Fault, No, provides
from k3hal.dispatch.describe import describe, described_ids
from k3hal.dispatch.explain import explain
from k3hal.dispatch.provider import ATTRIBUTE, Provider
from k3hal.dispatch.registry import default_registry, get_operator
from k3hal.dispatch.select import Selector
from k3hal.errors import UsageError

URL = "https://example.org/issues/1"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "faults.md"
FENCED = [(provider, fault) for provider in default_registry().providers for fault in provider.faults]


def _release(wanted: str) -> str:
    """A release that is in a range, one of those it names or the one just before."""
    named = [Version(spec.version) for spec in SpecifierSet(wanted)] or [Version("1.0")]
    near = [str(v) for v in named] + [f"{v.major}.{max(v.minor - 1, 0)}.99" for v in named]
    return next(v for v in near if SpecifierSet(wanted).contains(v, prereleases=True))


def _machines(provider: Provider, fault: Fault) -> Iterator[DeviceDescription]:
    """Machines of the provider's vendor that may have the fault: those that are described, and one of a later arch."""
    packages = {name: _release(wanted) for name, wanted in fault.packages.items()}
    vendor = provider.needs.vendors[0]
    described = [d for d in map(describe, described_ids()) if d.vendor == vendor]
    for arch, number in {(d.arch, d.arch_number) for d in described} | {(arch, 0) for arch in fault.arch}:
        yield DeviceDescription("pretended", vendor, arch, number, packages=packages)
    yield DeviceDescription("pretended", vendor, "later", 10_000, packages=packages)


def _concerned(provider: Provider, fault: Fault) -> Iterator[Call]:
    samples = list(get_operator(provider.op).samples())
    for machine in _machines(provider, fault):
        for sample in samples:
            dims = {**sample.dims, **{name: values[0] for name, values in fault.dims.items()}}
            call = Call(provider.op, machine, sample.dtype, "any", dims)
            if fault.concerns(call):
                yield call


@pytest.mark.parametrize(("provider", "fault"), FENCED, ids=lambda one: getattr(one, "id", getattr(one, "url", "")))
def test_explain_names_each_known_fault(provider: Provider, fault: Fault) -> None:
    call = next(_concerned(provider, fault), None)
    assert call is not None, "it concerns no call that the operator's samples make"
    lines = list(_lines(explain(call, Selector(default_registry(), (), "warn"))))
    (line,) = (line for line in lines if line.strip().startswith(f"{provider.id} "))
    assert " No  " in line and fault.url in line and fault.what in line


@pytest.mark.parametrize(("provider", "fault"), FENCED, ids=lambda one: getattr(one, "id", getattr(one, "url", "")))
def test_a_provider_with_a_known_fault_is_never_taken(provider: Provider, fault: Fault) -> None:
    for call in _concerned(provider, fault):
        assert isinstance(provider.answer(call), No)


def test_the_page_lists_every_fence_and_no_other() -> None:
    """Both ways: a fence that a provider no longer has is one that the page still promises."""
    section = PAGE.read_text("utf-8").partition("\n## Fenced\n")[2].partition("\n## ")[0]
    listed = set()
    for row in re.findall(r"^\| \[.*$", section, re.MULTILINE):
        report, *_, providers = row.strip("| ").split(" | ")
        url = re.search(r"\((https://[^)\s]+)\)", report)
        assert url, row
        before_ops = providers.partition(" of ")[0]
        listed |= {(url[1], name) for name in re.findall(r"`([^`]+)`", before_ops)}
    assert {(fault.url, provider.id) for provider, fault in FENCED} == listed


CONCERNED = Call(
    "silu_and_mul",
    DeviceDescription("x", "nvidia", "sm_90", 90, packages={"lib": "0.7.4"}),
    "bfloat16",
    "any",
    {"n": 12},
)


@pytest.mark.parametrize(
    ("given", "concerned"),
    [
        ({"packages": {"Lib": ">=0.7,<0.8"}}, True),
        ({"packages": {"lib": "<0.7.4"}}, False),
        ({"packages": {"lib": "", "other": ""}}, False),
        ({"arch": ("sm_90", "sm_100")}, True),
        ({"arch": ("sm_100",)}, False),
        ({"dims": {"n": (6, 12)}}, True),
        ({"dims": {"n": (24,)}}, False),
        ({"dims": {"absent": (12,)}}, False),
        ({"when": lambda call: call.dtype == "bfloat16"}, True),
        ({"when": lambda call: call.dtype == "float32", "arch": ("sm_90",)}, False),
    ],
)
def test_what_a_fault_concerns(given: dict[str, Any], concerned: bool) -> None:
    assert Fault(URL, "is wrong", **given).concerns(CONCERNED) == concerned


def test_a_version_that_is_none_has_the_faults_of_all_releases() -> None:
    machine = DeviceDescription("x", "nvidia", "sm_90", packages={"lib": "1ce47ea"})
    call = Call("silu_and_mul", machine, "bfloat16")
    assert Fault(URL, "is wrong", packages={"lib": ""}).concerns(call)
    assert not Fault(URL, "is wrong", packages={"lib": ">=1"}).concerns(call)


def test_faults_stand_beside_all_other_reasons() -> None:
    def silu_and_mul(x: Any) -> Any:
        return x

    fault = Fault(URL, "is wrong", arch=("sm_90",))
    provides("silu_and_mul", name="toy", supports=lambda call: No("too wide"), faults=(fault,))(silu_and_mul)
    (provider,) = getattr(silu_and_mul, ATTRIBUTE)
    reason = f"known fault: is wrong ({URL})"
    assert provider.answer(CONCERNED) == No(reason)
    assert provider.every_reason(CONCERNED) == (reason, "too wide")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"url": "http://example.org", "arch": ("x",)}, "not an https URL"),
        ({}, "concerns every call"),
        ({"packages": {"lib": "new"}}, "Invalid specifier"),
    ],
)
def test_a_malformed_fault_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Fault(**{"url": URL, "what": "is wrong", **given})


def test_explain_pretends_a_release() -> None:
    words = ["op", "explain", "mla_decode", "--device", "b200", "--shape", "heads=12"]
    fault = "https://github.com/flashinfer-ai/flashinfer/issues/3130"
    assert fault not in CliRunner().invoke(app, words).output
    said = CliRunner().invoke(app, [*words, "--with", "FlashInfer_Python==0.6.8"])
    assert said.output.count(fault) == 2 and "installed is 0.6.8; known fault" in said.output


@pytest.mark.parametrize("text", ["lib", "lib==", "lib==new", "==1.0", "lib>=1"])
def test_a_release_that_is_none_is_refused(text: str) -> None:
    words = ["op", "explain", "mla_decode", "--device", "b200", "--with", text]
    error = CliRunner().invoke(app, words, standalone_mode=False).exception
    assert isinstance(error, UsageError) and "like --with flashinfer-python==0.7.4" in str(error)


@pytest.mark.parametrize("text", ["amd-aitr==0.1.10", "aiter==0.1.10"])
def test_a_package_that_changes_no_answer_is_refused(text: str) -> None:
    words = ["op", "explain", "mla_decode", "--device", "mi355x", "--with", text]
    error = CliRunner().invoke(app, words, standalone_mode=False).exception
    assert (
        isinstance(error, UsageError) and "no provider asks for a package" in str(error) and "amd-aiter" in str(error)
    )
