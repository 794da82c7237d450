"""The Ascend adapters over emulators of their libraries: right on every sample that they take, and they say why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from k3hal.debug.case import sample_case, samples_of
from k3hal.debug.check import check
from k3hal.debug.target import Target
from k3hal.dispatch.call import Call
from k3hal.dispatch.describe import describe
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.errors import BackendError, UnsupportedError
from k3hal.dispatch.operator import Sample
from k3hal.dispatch.provider import Provider
from k3hal.dispatch.registry import default_registry, get_operator

from .ascend_ops import EMULATORS
from .torch_ops import registered

TAGS = ("tiny", "edge", "adversarial", "k3")
OWN = ("torch", "host", "triton_ascend")
"""Providers that call no vendor's operator."""
ADAPTERS = [p for p in default_registry().providers if p.backend == "ascend" and p.name not in OWN]


@pytest.fixture
def libraries() -> Iterator[list[str]]:
    with registered(EMULATORS) as called:
        yield called


def _machine(name: str = "ascend_910c") -> DeviceDescription:
    return describe(name)


def _provider(op: str, name: str) -> Provider:
    return next(p for p in ADAPTERS if (p.op, p.name) == (op, name))


def _taken(provider: Provider, sample: Sample) -> bool:
    machine = _machine("ascend_950" if provider.needs.arch == ("ascend950",) else "ascend_910c")
    call = Call(provider.op, machine, sample.dtype, sample.phase, sample.dims)
    return "device" not in sample.tags and bool(provider.answer(call))


PAIRS = [
    (provider, sample)
    for provider in ADAPTERS
    for sample in samples_of(get_operator(provider.op), tags=TAGS)
    if _taken(provider, sample) and not (provider.op.startswith("moe_experts") and "k3" in sample.tags)
]
"""But for the experts of K3's sizes, which take ten seconds each."""
CASES = [pytest.param(p, sample, id=f"{p.op}-{p.name}-{sample.name}") for p, sample in PAIRS]


def _first_sample(provider: Provider) -> Sample:
    return next(sample for one, sample in PAIRS if one is provider)


@pytest.mark.parametrize(("provider", "sample"), CASES)
def test_an_adapter_gives_the_operators_answer(libraries: list[str], provider: Provider, sample: Sample) -> None:
    verdict = check(sample_case(get_operator(provider.op), sample), Target.of(provider))
    # The floors are for one rounding; between a library's kernels there are more.
    assert verdict.ok or all("times the CPU provider's" in reason for reason in verdict.reasons), verdict.reasons


def test_every_adapter_is_tried_and_calls_its_library(libraries: list[str]) -> None:
    for provider in ADAPTERS:
        before = len(libraries)
        check(sample_case(get_operator(provider.op), _first_sample(provider)), Target.of(provider))
        assert len(libraries) > before, provider.id


def _on(device: str, op: str, **dims: Any) -> Call:
    sizes = {"head_dim": 128, "heads": 12, "bounded": True, "experts": 896, "hidden": 3584, "intermediate": 384}
    sizes |= {"page_tokens": 128, "kv_dtype": "bfloat16", "activation": "situ"}
    return Call(op, describe(device), "bfloat16", "any", {**sizes, **dims})


@pytest.mark.parametrize(
    ("op", "name", "device", "dims", "reason"),
    [
        ("kda_decode", "vllm_ascend", "ascend_910b", {}, ""),
        ("kda_decode", "vllm_ascend", "ascend_950", {"bounded": False}, ""),
        ("kda_decode", "vllm_ascend", "ascend_910c", {"head_dim": 64}, "needs head_dim 128, this is 64"),
        ("kda_decode", "vllm_ascend", "ascend_910c", {"heads": 257}, "needs heads up to 256, these are 257"),
        ("kda_prefill", "vllm_ascend", "ascend_910c", {"heads": 129}, "needs heads up to 128, these are 129"),
        ("mla_decode", "sparse_flash", "ascend_910c", {"heads": 96}, ""),
        ("mla_decode", "sparse_flash", "ascend_910c", {"heads": 129}, "needs heads up to 128, these are 129"),
        ("mla_decode", "sparse_flash", "ascend_910c", {"page_tokens": 8}, "needs page_tokens a multiple of 16"),
        ("mla_decode", "sparse_flash", "ascend_910c", {"kv_dtype": "float8_e4m3fn"}, "needs kv_dtype bfloat16"),
        ("mla_decode", "sparse_flash", "ascend_910c", {"kv_lora": 256}, "needs kv_lora 512 and rope_dim 64"),
        ("mla_decode", "sparse_flash", "ascend_950", {}, "needs arch ascend910b/ascend910c, this is ascend950"),
        ("mla_decode", "fused_infer", "ascend_950", {}, ""),
        ("mla_prefill", "fused_infer", "ascend_910b", {}, ""),
        ("mla_prefill", "fused_infer", "ascend_910b", {"v_dim": 64}, "needs 192 channels of keys and 128 of values"),
        ("moe_route", "torch_npu", "ascend_910c", {"experts": 2049}, "needs experts up to 2048, these are 2049"),
        ("moe_experts", "torch_npu", "ascend_950", {"experts": 1025}, "needs experts up to 1024, these are 1025"),
        ("moe_experts", "torch_npu", "ascend_950", {"activation": "gelu"}, "needs activation silu or situ"),
        ("moe_experts_int4", "torch_npu", "ascend_910b", {"intermediate": 12}, "needs intermediate a multiple of 8"),
        ("moe_experts_mxfp4", "torch_npu_sums", "ascend_910c", {}, ""),
        ("moe_experts_mxfp4", "torch_npu_sums", "ascend_950", {}, "needs arch ascend910b/ascend910c"),
        ("moe_experts_mxfp4", "torch_npu", "ascend_950", {}, ""),
        ("moe_experts_mxfp4", "torch_npu", "ascend_950", {"experts": 1025}, "needs experts up to 1024, these are 1025"),
        ("moe_experts", "torch_npu", "h200", {}, "needs vendor ascend, this is nvidia"),
    ],
)
def test_what_an_adapter_takes_and_why_not(op: str, name: str, device: str, dims: dict[str, Any], reason: str) -> None:
    said = _provider(op, name).answer(_on(device, op, **dims))
    assert bool(said) == (not reason), said
    assert not reason or any(reason in one for one in getattr(said, "reasons", ())), said


@pytest.mark.parametrize("provider", ADAPTERS, ids=lambda p: f"{p.op}-{p.name}")
def test_a_missing_or_older_package_is_named(provider: Provider) -> None:
    call = _on("ascend_910c", provider.op)
    for package in provider.needs.packages:
        for version, reason in ((None, f"needs package {package}"), ("1.0", "installed is 1.0")):
            packages = {**call.device.packages, package: version}
            there = {name: value for name, value in packages.items() if value is not None}
            said = provider.answer(replace(call, device=replace(call.device, packages=there)))
            assert any(reason in one for one in getattr(said, "reasons", ())), said


def test_a_library_without_its_operator_is_a_reason_where_it_would_run() -> None:
    """As torch_npu is today where vllm-ascend was not built."""
    call = _on("ascend_910c", "kda_decode")
    here = replace(call, device=replace(call.device, present=True))
    said = _provider("kda_decode", "vllm_ascend").answer(here)
    assert any("recurrent_kda cannot be loaded" in one for one in getattr(said, "reasons", ())), said
    with registered(EMULATORS):
        assert _provider("kda_decode", "vllm_ascend").answer(here)


@pytest.mark.parametrize("op", ["kda_decode", "kda_prefill"])
@pytest.mark.parametrize("bound", [-6.0, 0.0])
def test_bounds_that_the_library_has_not_are_refused(libraries: list[str], op: str, bound: float) -> None:
    provider = _provider(op, "vllm_ascend")
    args = {**sample_case(get_operator(op), _first_sample(provider)).args, "lower_bound": bound}
    with pytest.raises(UnsupportedError, match="takes bounds from -5 up to 0"):
        provider.fn(**args)
    assert not libraries


def test_torch_itself_refuses_a_wrong_argument(libraries: list[str]) -> None:
    """That the emulators stand behind the recorded schemas."""
    function = next(f for f in EMULATORS if f.name == "npu_rms_norm")
    with pytest.raises((RuntimeError, TypeError, BackendError), match=r"gamma|weight"):
        function(input=torch.zeros(2, 4), weight=torch.zeros(4))


def test_twelve_heads_are_computed_as_sixteen() -> None:
    seen: list[int] = []
    watched = next(f for f in EMULATORS if f.name == "npu_sparse_flash_attention")
    attention, returns = EMULATORS[watched]

    def watching(query: torch.Tensor, **others: Any) -> Any:
        seen.append(query.shape[1])
        return attention(query=query, **others)

    sample = next(s for s in samples_of(get_operator("mla_decode"), tags=TAGS) if s.dims["heads"] == 12)
    case = sample_case(get_operator("mla_decode"), sample)
    with registered({**EMULATORS, watched: (watching, returns)}):
        out = _provider("mla_decode", "sparse_flash").fn(**case.args)
    assert set(seen) == {16} and out.shape[1] == 12
