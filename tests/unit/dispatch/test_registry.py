"""A provider that breaks its operator's contract, or a backend that is broken, is refused when it registers."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import pytest

from k3hal.dispatch import DeviceDescription, Needs, provides
from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.errors import BackendError, K3HALError, UsageError
from k3hal.dispatch.overrides import parse_overrides
from k3hal.dispatch.registry import get_operator

from .toys import CPU, Toy, backend_module, call, registry_of

pytestmark = pytest.mark.usefixtures("toys")


def _renamed(x: float, scale: float = 2.0) -> float:
    return x * scale


def _reordered(factor: float, x: float = 2.0) -> float:
    return x * factor


def _no_default(x: float, factor: float) -> float:
    return x * factor


def _other_default(x: float, factor: float = 3.0) -> float:
    return x * factor


@pytest.mark.parametrize("fn", [_renamed, _reordered, _no_default, _other_default])
def test_a_signature_other_than_the_operators_is_refused(fn: Any) -> None:
    with pytest.raises(BackendError, match=r"b\.x of toy_scale takes .*contract is \(x, factor=2.0\)"):
        registry_of(backend_module("b", Toy("toy_scale", "x", fn=fn)))


def _with(module: ModuleType, **more: Any) -> ModuleType:
    vars(module).update(more)
    return module


def _wrapped(module: ModuleType) -> ModuleType:
    inner = vars(module)["provider_0"]

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    return _with(module, provider_0=outer)


def _elsewhere(module: ModuleType) -> ModuleType:
    """A provider file that declares a function of a library, which no search through its own functions finds."""

    def library(x: float, factor: float = 2.0) -> float:
        return x * factor

    library.__module__ = "vendor_kernels"
    return _with(module, scale=provides("toy_scale", name="x")(library))


SCALE = Toy("toy_scale", "x")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (ModuleType("empty"), "empty has no BACKEND manifest"),
        (_with(ModuleType("odd"), BACKEND="cpu"), "odd has no BACKEND manifest"),
        (backend_module("a.b"), "calls itself 'a.b'"),
        (backend_module("reference"), "calls itself 'reference'"),
        (backend_module("b", SCALE, SCALE), "two providers of toy_scale are called b.x"),
        (_wrapped(backend_module("b", SCALE)), "must be the outermost decorator"),
        (_elsewhere(backend_module("b")), "provider 'x' of toy_scale is a function of vendor_kernels"),
        (backend_module("b", Toy("toy_scale", "x", needs=Needs(vendors=("amd",))), vendors=("cpu",)), "is for amd"),
        (backend_module("b", Toy("toy_scale", "x", needs=Needs(min_arch=90))), "bounds the arch of no single vendor"),
    ],
)  # fmt: skip
def test_a_broken_backend_is_refused(module: ModuleType, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        registry_of(module)


def test_a_provider_of_an_unknown_operator_is_refused_with_the_nearest() -> None:
    def fn(x: float) -> float:
        return x

    fn.__module__ = "toy_backend_b"
    module = _with(backend_module("b"), fn=provides("toy_scal", name="x")(fn))
    with pytest.raises(UsageError, match=r"unknown operator 'toy_scal' .did you mean 'toy_scale'"):
        registry_of(module)


def test_two_backends_of_one_name_are_refused_and_nothing_of_the_second_is_kept() -> None:
    registry = registry_of(backend_module("b", SCALE))
    with pytest.raises(BackendError, match="two backends are called 'b'"):
        registry.add_module(backend_module("b", Toy("toy_shift", "y")))
    assert [p.id for p in registry.providers] == ["b.x"]


def test_a_name_given_twice_in_a_module_is_one_provider() -> None:
    module = backend_module("b", SCALE)
    registry = registry_of(_with(module, again=vars(module)["provider_0"]))
    assert [p.id for p in registry.providers] == ["b.x"]


@pytest.mark.parametrize("name", ["a-b", "a.b", "", "a,b", "reference", "composed"])
def test_a_provider_name_that_cannot_be_typed_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="provider name"):
        provides("toy_scale", name=name)


def test_a_malformed_version_range_is_refused() -> None:
    with pytest.raises(ValueError, match="Invalid specifier"):
        provides("toy_scale", name="x", needs=Needs(packages={"triton": "3.9"}))


def test_a_provider_runs_on_its_backends_vendors_unless_it_narrows_them() -> None:
    narrow = Toy("toy_scale", "y", needs=Needs(vendors=("amd",), min_arch=942))
    registry = registry_of(backend_module("b", SCALE, narrow, vendors=("nvidia", "amd")))
    gpus = {
        arch: DeviceDescription(vendor, vendor, arch, number)
        for vendor, arch, number in (("nvidia", "sm_90", 90), ("amd", "gfx90a", 909), ("amd", "gfx942", 942))
    }
    wide, narrowed = registry.of("toy_scale")
    assert [bool(wide.answer(call("toy_scale", device))) for device in (CPU, *gpus.values())] == [
        False,
        True,
        True,
        True,
    ]
    assert [bool(narrowed.answer(call("toy_scale", d))) for d in gpus.values()] == [False, False, True]


def test_needs_name_everything_that_is_missing_at_once() -> None:
    device = DeviceDescription(
        "gpu", "nvidia", "sm_90", 90, packages={"flash-lib": "1.2", "odd": "not.a.version"}, features=frozenset({"fp8"})
    )
    needs = Needs(
        ("amd",), ("gfx950",), 100, 80, {"flash_lib": ">=2", "odd": ">=1", "gone": ""}, ("fp8", "tma"), ("float32",)
    )
    assert needs.unmet(call("toy_scale", device)) == (
        "needs vendor amd, this is nvidia",
        "needs arch gfx950, this is sm_90",
        "needs arch >= 100, this is sm_90",
        "needs arch <= 80, this is sm_90",
        "needs feature tma",
        "needs dtype float32, this is bfloat16",
        "needs package flash_lib>=2, installed is 1.2",
        "needs package odd>=1, installed is not.a.version",
        "needs package gone, not installed",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("toy_scale", "'toy_scale' is not GLOB=NAME"),
        ("=x", "is not GLOB=NAME"),
        ("toy_scale=", "is not GLOB=NAME"),
        ("toy_skale=x", "no operator matches 'toy_skale' .did you mean 'toy_scale'"),
        ("mla_*=x", "no operator matches 'mla_*'"),
        ("toy_scale=refrence", "no provider is called 'refrence' .did you mean 'reference'"),
        ("toy_scale=b.y", "no provider is called 'b.y' .did you mean 'b.x'"),
    ],
)
def test_a_malformed_override_names_its_source_and_the_nearest_word(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("*", r"\*")) as caught:
        parse_overrides(text, "--ops", registry_of(backend_module("b", SCALE)))
    assert str(caught.value).startswith("--ops: ")


def test_the_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_of(backend_module("b", SCALE, Toy("toy_scale", "y")))
    monkeypatch.setenv("K3HAL_OPS", "toy_*=b.y, ,toy_shift=reference")
    assert build_selector(registry=registry).decide(call("toy_scale")).provider == "b.y"
    assert build_selector("toy_scale=b.x", registry=registry).decide(call("toy_scale")).provider == "b.x"
    monkeypatch.setenv("K3HAL_OPS", "toy_scale=nobody")
    with pytest.raises(UsageError, match="K3HAL_OPS: no provider"):
        build_selector(registry=registry)
    with pytest.raises(UsageError, match="unknown fallback policy 'maybe'"):
        build_selector(fallback="maybe", registry=registry)


def test_an_operators_file_and_function_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3hal.dispatch.ops.toy_shift.OPERATOR", get_operator("toy_scale"), raising=True)
    with pytest.raises(K3HALError, match=r"toy_shift\.py defines operator 'toy_scale'"):
        get_operator("toy_shift")
