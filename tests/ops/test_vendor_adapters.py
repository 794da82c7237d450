"""Adapters of vendor libraries: they give the operator's answer from what the library's documentation says it does, and
say why not."""

from __future__ import annotations

import importlib.util
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
from k3hal.dispatch.errors import BackendError, UnsupportedError
from k3hal.dispatch.library import lacks, loaded
from k3hal.dispatch.operator import Sample
from k3hal.dispatch.ops import mla_decode
from k3hal.dispatch.ops._paged import MlaShape
from k3hal.dispatch.provider import Provider
from k3hal.dispatch.registry import default_registry, get_operator

from .vendor_fakes import FAKES, installed

ADAPTERS = {
    ("kda_recurrent", "fla"), ("kda_chunk", "fla"), ("kda_prefill", "flash_kda"), ("mla_decode", "flash_mla"),
    ("mla_decode", "flashinfer"), ("mla_decode", "flashinfer_cute"), ("moe_experts", "deep_gemm"),
    ("moe_experts_mxfp4", "triton_kernels"),
    ("mla_prefill", "flashinfer"), ("mla_prefill", "flashinfer_ragged"), ("kda_decode", "flashinfer"),
    ("kda_prefill", "flashinfer"), ("moe_experts", "flashinfer"), ("moe_experts_mxfp4", "flashinfer"),
}  # fmt: skip
PACKAGES = {
    "fla-core": "0.6.0", "triton": "3.6.0", "flash-kda": "0.1.0", "cuda": "13.0", "flash-mla": "1.0.0",
    "flashinfer-python": "0.7.2.post1", "nvidia-cutlass-dsl": "4.8.0", "sgl-deep-gemm": "0.1.7",
    "triton-kernels": "1.0.0",
}  # fmt: skip


def _provider(op: str, name: str) -> Provider:
    return next(p for p in default_registry().of(op) if p.id == f"nvidia.{name}")


def _taken(op: str, sample: Sample) -> bool:
    """bf16 samples that no adapter says No to but for their sizes."""
    bounded = op != "kda_prefill" or bool(sample.dims.get("bounded"))
    kind = op == "mla_prefill" or sample.dims.get("kv_dtype", "bfloat16") == "bfloat16"
    return sample.dtype == "bfloat16" and bounded and kind


CASES = [
    pytest.param(op, name, sample, id=f"{op}-{name}-{sample.name}")
    for op, name in sorted(ADAPTERS)
    for sample in samples_of(get_operator(op), tags=("tiny", "edge", "adversarial"))
    if _taken(op, sample)
]


@pytest.fixture
def libraries() -> Iterator[list[dict[str, Any]]]:
    with installed(FAKES) as calls:
        yield calls


@pytest.mark.parametrize(("op", "name", "sample"), CASES)
def test_an_adapter_gives_the_operators_answer(libraries: list[Any], op: str, name: str, sample: Sample) -> None:
    case = sample_case(get_operator(op), sample)
    verdict = check(case, Target.of(_provider(op, name)))
    # The floors are for one rounding; between a library's kernels there are more.
    assert verdict.ok or all("times the CPU provider's" in reason for reason in verdict.reasons), verdict.reasons
    assert libraries or not any(case.args[n].numel() for n in ("ids", "q") if n in case.args), "it was not called"


def _on(device: str, op: str, **dims: Any) -> Call:
    machine = replace(describe(device), packages=PACKAGES)
    sizes = {"head_dim": 128, "heads": 12, "bounded": True, "hidden": 3584, "intermediate": 384, "page_tokens": 64}
    return Call(op, machine, "bfloat16", "any", {**sizes, "kv_dtype": "bfloat16", "activation": "situ", **dims})


def _home(op: str, name: str) -> str:
    """A machine that the adapter is for."""
    only_hopper = name == "flashinfer_ragged" or op.startswith("moe")
    return "b200" if name.startswith("flashinfer") and not only_hopper else "h200"


@pytest.mark.parametrize(
    ("op", "name", "device", "dims", "reason"),
    [
        ("kda_chunk", "fla", "h200", {}, ""),
        ("kda_chunk", "fla", "h200", {"head_dim": 96}, "needs head_dim a power of two up to 256, this is 96"),
        ("kda_prefill", "flash_kda", "h200", {}, ""),
        ("kda_prefill", "flash_kda", "h200", {"head_dim": 64}, "needs head_dim 128, this is 64"),
        ("kda_prefill", "flash_kda", "h200", {"bounded": False}, "needs a bounded gate"),
        ("mla_decode", "flash_mla", "h200", {}, ""),
        ("mla_decode", "flash_mla", "b200", {}, "needs arch sm_90, this is sm_100"),
        ("mla_decode", "flash_mla", "h200", {"page_tokens": 128}, ""),
        ("mla_decode", "flash_mla", "h200", {"page_tokens": 32}, "needs page_tokens 64 or a multiple, this is 32"),
        ("mla_decode", "flash_mla", "h200", {"kv_dtype": "float8_e4m3fn"}, "needs kv_dtype bfloat16"),
        ("mla_decode", "flash_mla", "h200", {"kv_lora": 256}, "needs kv_lora 512 and rope_dim 64"),
        ("mla_decode", "flashinfer", "b200", {}, ""),
        ("mla_decode", "flashinfer", "b200", {"heads": 96}, "needs heads a multiple of 64, these are 96"),
        ("mla_decode", "flashinfer", "b200", {"kv_dtype": "float8_e4m3fn"}, "needs kv_dtype bfloat16"),
        ("mla_decode", "flashinfer", "b200", {"page_tokens": 128}, ""),
        ("mla_decode", "flashinfer_cute", "b200", {"page_tokens": 128, "heads": 96}, ""),
        ("mla_decode", "flashinfer_cute", "b200", {"heads": 144}, "needs heads up to 128, these are 144"),
        ("mla_decode", "flashinfer_cute", "b200", {"page_tokens": 256}, "needs page_tokens 128 or 64 or 32 or 16"),
        ("mla_decode", "flashinfer", "h200", {}, "needs arch sm_100/sm_103, this is sm_90"),
        ("mla_prefill", "flashinfer", "gb300", {"page_tokens": 128}, ""),
        ("mla_prefill", "flashinfer", "b200", {"kv_dtype": "float8_e4m3fn"}, ""),
        ("mla_prefill", "flashinfer", "b200", {"v_dim": 64}, "needs v_dim 128, this is 64"),
        ("mla_prefill", "flashinfer", "b200", {"kv_dtype": "float32"}, "needs kv_dtype bfloat16 or float8_e4m3fn"),
        ("mla_prefill", "flashinfer", "h200", {}, "needs arch sm_100/sm_103, this is sm_90"),
        ("mla_prefill", "flashinfer_ragged", "h200", {}, ""),
        ("mla_prefill", "flashinfer_ragged", "b200", {}, "needs arch sm_90, this is sm_100"),
        ("kda_decode", "flashinfer", "b200", {"bounded": False}, ""),
        ("kda_decode", "flashinfer", "b200", {"heads": 6}, "needs heads 8/12/24/32/48/96, these are 6"),
        ("kda_decode", "flashinfer", "b200", {"conv_width": 3}, "needs conv_width 4, this is 3"),
        ("kda_prefill", "flashinfer", "b200", {"heads": 6}, ""),
        ("kda_prefill", "flashinfer", "b200", {"bounded": False}, "needs a bounded gate"),
        ("kda_prefill", "flashinfer", "h200", {}, "needs arch sm_100/sm_103, this is sm_90"),
        ("moe_experts_mxfp4", "flashinfer", "h200", {}, ""),
        ("moe_experts_mxfp4", "flashinfer", "h200", {"activation": "silu"}, ""),
        ("moe_experts_mxfp4", "flashinfer", "h200", {"activation": "gelu"}, "needs activation silu or situ"),
        ("moe_experts_mxfp4", "flashinfer", "h200", {"intermediate": 192}, "needs intermediate a multiple of 128"),
        ("moe_experts_mxfp4", "flashinfer", "b200", {}, "needs arch sm_90, this is sm_100"),
        ("moe_experts", "flashinfer", "b200", {"intermediate": 192}, ""),
        ("moe_experts", "deep_gemm", "h200", {}, ""),
        ("moe_experts", "deep_gemm", "h200", {"intermediate": 96}, "needs intermediate a multiple of 64, this is 96"),
        ("moe_experts_mxfp4", "triton_kernels", "h200", {}, ""),
    ],
)
def test_what_an_adapter_takes_and_why_not(op: str, name: str, device: str, dims: dict[str, Any], reason: str) -> None:
    said = _provider(op, name).answer(_on(device, op, **dims))
    assert bool(said) == (not reason), said
    assert not reason or any(reason in one for one in getattr(said, "reasons", ())), said


@pytest.mark.parametrize(("name", "parts"), [("flash_mla", 2), ("flashinfer", 2), ("flashinfer_cute", 1)])
def test_pages_larger_than_a_librarys_are_taken_apart(libraries: list[Any], name: str, parts: int) -> None:
    """As they lie in an arena, where every page has rows of other layers too."""
    shape = MlaShape(heads=2, page_tokens=128, kv_dtype="bfloat16")
    args = mla_decode.inputs(torch.Generator().manual_seed(1), shape, "bfloat16", [300, 0, 128, 1])
    arena = torch.full((args["kv_cache"].shape[0], 3, 128, shape.entry), torch.nan, dtype=torch.bfloat16)
    arena[:, 1] = args["kv_cache"]
    given = {**args, "kv_cache": arena[:, 1]}
    assert torch.equal(_provider("mla_decode", name).fn(**given), mla_decode.mla_decode(**args))
    assert (
        next(c[n] for c in libraries for n in ("block_table", "block_tables") if n in c).shape[1]
        == parts * args["page_table"].shape[1]
    )


@pytest.mark.parametrize("name", ["flash_mla", "flashinfer"])
def test_pages_that_cannot_be_taken_apart_are_refused(libraries: list[Any], name: str) -> None:
    shape = MlaShape(heads=2, page_tokens=128, kv_dtype="bfloat16")
    args = mla_decode.inputs(torch.Generator().manual_seed(1), shape, "bfloat16", [3], strided=True)
    with pytest.raises(UnsupportedError, match="are no whole number of pages of 64"):
        _provider("mla_decode", name).fn(**args)
    assert all("block_table" not in c and "block_tables" not in c for c in libraries)


@pytest.mark.parametrize(
    ("own", "torch_version", "reason"),
    [
        ("0.1.7", "2.13.0+cu130", ""),
        ("0.1.5.post1", "2.11.0", ""),
        ("0.1.7", "2.11.0+cu130", "sgl-deep-gemm 0.1.7 is built for torch 2.13, this is 2.11"),
        ("0.1.6", "2.11.0", "sgl-deep-gemm 0.1.6 is built for no torch known here"),
        ("0.2.3.post2", "2.14.1", ""),
        ("0.2.3.post2", "2.13.0", "sgl-deep-gemm 0.2.3.post2 is built for torch 2.14, this is 2.13"),
        ("0.2.5", "2.14.1", "sgl-deep-gemm 0.2.5 is built for no torch known here"),
    ],
)
def test_a_wheel_built_for_another_torch_is_refused(own: str, torch_version: str, reason: str) -> None:
    call = _on("h200", "moe_experts")
    machine = replace(call.device, packages={"sgl-deep-gemm": own, "torch": torch_version})
    said = _provider("moe_experts", "deep_gemm").answer(replace(call, device=machine))
    assert bool(said) == (not reason)
    assert not reason or reason in getattr(said, "reasons", ())


@pytest.mark.parametrize(("op", "name"), sorted(ADAPTERS))
def test_a_missing_or_foreign_package_is_named(op: str, name: str) -> None:
    provider, call = _provider(op, name), _on(_home(op, name), op)
    package = next(iter(provider.needs.packages))
    without = replace(call, device=replace(call.device, packages={}))
    assert any(f"needs package {package}" in reason for reason in getattr(provider.answer(without), "reasons", ()))
    if provider.needs.packages[package]:
        old = replace(call, device=replace(call.device, packages={**PACKAGES, package: "0.1.0"}))
        assert any("installed is 0.1.0" in reason for reason in getattr(provider.answer(old), "reasons", ()))


def test_a_library_that_does_not_load_is_a_reason_where_it_would_run() -> None:
    call = _on("h200", "kda_chunk")
    here = replace(call, device=replace(call.device, present=True))
    loaded.cache_clear()
    said = _provider("kda_chunk", "fla").answer(here)
    if importlib.util.find_spec("fla") is None:
        assert any("cannot be loaded: ModuleNotFoundError" in reason for reason in getattr(said, "reasons", ()))
    with installed(FAKES):
        assert _provider("kda_chunk", "fla").answer(here)


def test_a_signature_that_has_moved_on_is_refused_with_what_it_lacks() -> None:
    def chunk_kda(q: Any, k: Any, transpose_state_layout: bool = False) -> None:
        """As in an older release."""

    function = next(f for f in FAKES if f.name == "chunk_kda")
    assert "state_v_first" in lacks(function, chunk_kda)
    (record,) = function.records
    older = replace(function, records=(replace(record, parameters=record.parameters[:2]),))
    refusal = r"fla\.ops\.kda\.chunk\.chunk_kda has no v, .*fla-core 0\.6\.0 has"
    with installed({older: lambda **_: None}), pytest.raises(BackendError, match=refusal):
        function(q=1)


@pytest.mark.parametrize(
    ("name", "bound", "refusal"),
    [
        ("flash_kda", -6.0, "takes bounds from -5 on"),
        ("flashinfer", -6.0, "takes bounds from -5 up to 0"),
        ("flashinfer", 0.0, "takes bounds from -5 up to 0"),
    ],
)
def test_kda_prefill_refuses_bounds_below_a_librarys_own(
    libraries: list[Any], name: str, bound: float, refusal: str
) -> None:
    sample = next(s for s in samples_of(get_operator("kda_prefill"), dtypes=("bfloat16",)))
    args = {**sample_case(get_operator("kda_prefill"), sample).args, "lower_bound": bound}
    with pytest.raises(UnsupportedError, match=refusal):
        _provider("kda_prefill", name).fn(**args)
    assert not libraries
