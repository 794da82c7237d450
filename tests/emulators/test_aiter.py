"""The AITER adapters over emulators of the library: right on every sample that they take, and they say why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from k3hal.debug.case import sample_case, samples_of
from k3hal.debug.check import check
from k3hal.debug.invariants import check_invariant, invariants_of
from k3hal.debug.target import Target
from k3hal.dispatch.call import Call
from k3hal.dispatch.describe import describe
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.errors import BackendError, UnsupportedError
from k3hal.dispatch.operator import Sample
from k3hal.dispatch.ops import mla_decode
from k3hal.dispatch.ops._paged import K3_TP8
from k3hal.dispatch.provider import Provider
from k3hal.dispatch.registry import default_registry, get_operator

from .aiter_ops import emulated, shuffle_scale_a16w4, shuffle_weight_a16w4

TAGS = ("tiny", "edge", "adversarial", "k3")
ADAPTERS = [p for p in default_registry().providers if p.backend == "amd" and p.name == "aiter"]
SWITCHES = (
    "VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MLA", "VLLM_ROCM_USE_AITER_MOE", "VLLM_ROCM_USE_AITER_MOE_SITUV2",
    "AITER_SITUV2_A8W4", "AITER_SITUV2_A4W4", "VLLM_ROCM_USE_AITER_RMSNORM", "VLLM_ROCM_USE_AITER_MHA",
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def library() -> Iterator[list[str]]:
    with emulated() as called:
        yield called


def _machine(name: str = "mi355x") -> DeviceDescription:
    return describe(name)


def _provider(op: str) -> Provider:
    return next(p for p in ADAPTERS if p.op == op)


def _takes(provider: Provider, sample: Sample) -> bool:
    """On a machine of the two whose kernels no fault is known of."""
    call = Call(
        provider.op,
        _machine("mi300x" if provider.op == "mla_decode" else "mi355x"),
        sample.dtype,
        sample.phase,
        sample.dims,
    )
    return "device" not in sample.tags and bool(provider.answer(call))


PAIRS = [
    (provider, sample)
    for provider in ADAPTERS
    for sample in samples_of(get_operator(provider.op), tags=TAGS)
    if _takes(provider, sample) and (provider.op, sample.name) != ("moe_experts_mxfp4", "k3_tp16_32_experts")
]
CASES = [pytest.param(p, sample, id=f"{p.op}-{sample.name}-{sample.dtype}") for p, sample in PAIRS]


def test_what_is_emulated() -> None:
    assert {p.op for p in ADAPTERS} == {
        "kda_decode", "kda_prefill", "mla_decode", "mla_prefill", "moe_experts_mxfp4", "rms_norm",
    }  # fmt: skip
    assert {p.op for p, _ in PAIRS} == {p.op for p in ADAPTERS}


@pytest.mark.parametrize(("provider", "sample"), CASES)
def test_an_adapter_gives_the_operators_answer(library: list[str], provider: Provider, sample: Sample) -> None:
    case = sample_case(get_operator(provider.op), sample)
    verdict = check(case, Target.of(provider))
    # The floors are for one rounding; between a library's kernels there are more.
    assert verdict.ok or all("times the CPU provider's" in reason for reason in verdict.reasons), verdict.reasons
    rows = next(value for value in case.args.values() if isinstance(value, torch.Tensor)).shape[0]
    assert library or not rows, "it was not called"


@pytest.mark.parametrize("provider", ADAPTERS, ids=lambda p: p.op)
def test_an_adapter_keeps_the_invariants(library: list[str], provider: Provider) -> None:
    operator = get_operator(provider.op)
    samples = [s for p, s in PAIRS if p is provider and "k3" not in s.tags] or [s for p, s in PAIRS if p is provider]
    kept = 0
    for name in invariants_of(operator):
        if name == "far":  # of more memory than a CPU should take for it
            continue
        for sample in samples[:2]:
            verdict = check_invariant(name, sample_case(operator, sample), Target.of(provider))
            assert verdict is None or verdict.ok, (name, sample.name, verdict.reasons)
            kept += verdict is not None
    assert kept


def test_heads_are_padded_to_what_the_kernels_take_and_pages_taken_apart(library: list[str]) -> None:
    for heads, page_tokens in ((6, 64), (12, 128), (24, 64), (96, 16)):
        shape = replace(K3_TP8, heads=heads, page_tokens=page_tokens)
        args = mla_decode.inputs(torch.Generator().manual_seed(heads), shape, "bfloat16", [130, 0, 1])
        arena = torch.full((args["kv_cache"].shape[0], 3, page_tokens, shape.entry), torch.nan, dtype=torch.bfloat16)
        arena[:, 1] = args["kv_cache"]
        made = _provider("mla_decode").fn(**{**args, "kv_cache": arena[:, 1]})
        assert made.shape == (3, heads, 512) and not made[1].any()
        torch.testing.assert_close(made, mla_decode.mla_decode(**args), rtol=0.02, atol=0.02)


def test_pages_that_cannot_be_taken_apart_are_refused(library: list[str]) -> None:
    args = mla_decode.inputs(torch.Generator().manual_seed(1), K3_TP8, "bfloat16", [3])
    pages = args["kv_cache"]
    wide = torch.zeros(pages.shape[0], pages.stride(0) + 8, dtype=pages.dtype)
    odd = wide.as_strided(pages.shape, (wide.stride(0), *pages.stride()[1:]))
    with pytest.raises(UnsupportedError, match="are no whole number of pages of 1"):
        _provider("mla_decode").fn(**{**args, "kv_cache": odd})
    assert "mla_decode_fwd" not in library


def test_layouts_move_every_byte_once() -> None:
    codes = torch.arange(2 * 32 * 128).view(2, 32, 128)
    laid = shuffle_weight_a16w4(src=codes, NLane=16, gate_up=False)
    assert laid.shape == codes.shape and torch.equal(laid.flatten().sort().values, codes.flatten())
    # The first 16 bytes of the first row, then those of the second.
    assert laid.flatten()[:32].tolist() == [*range(16), *range(128, 144)]
    scales = torch.arange(2 * 32 * 12).view(64, 12)
    folded = shuffle_scale_a16w4(src=scales, experts_cnt=2, gate_up=False)
    assert folded.shape == (64, 16)
    # A lane's two columns, four apart, of two rows, 16 apart.
    assert folded.flatten()[:4].tolist() == [0, 16 * 12, 4, 16 * 12 + 4]


def _on(machine: str, op: str, dtype: str = "bfloat16", **dims: Any) -> Call:
    sizes = {"head_dim": 128, "heads": 12, "bounded": True, "experts": 896, "hidden": 3584, "intermediate": 384}
    sizes |= {"kv_dtype": "bfloat16", "activation": "situ", "page_tokens": 128, "dim": 7168}
    return Call(op, _machine(machine), dtype, "any", {**sizes, **dims})


@pytest.mark.parametrize(
    ("op", "machine", "dims", "reason"),
    [
        ("mla_decode", "mi300x", {}, ""),
        ("mla_decode", "mi355x", {"heads": 48}, ""),
        ("mla_decode", "mi355x", {}, "https://github.com/ROCm/aiter/issues/5765"),
        ("mla_prefill", "mi300x", {}, "https://github.com/ROCm/aiter/issues/2229"),
        ("mla_decode", "mi300x", {"heads": 96}, ""),
        ("mla_decode", "mi300x", {"heads": 144}, "needs heads up to 128, these are 144"),
        ("mla_decode", "mi300x", {"kv_dtype": "float8_e4m3fn"}, "needs kv_dtype bfloat16, this is float8_e4m3fn"),
        ("mla_decode", "mi300x", {"kv_dtype": "float8_e4m3fn"}, "https://github.com/vllm-project/vllm/issues/51232"),
        ("mla_decode", "mi300x", {"kv_lora": 256}, "needs kv_lora 512 and rope_dim 64"),
        ("mla_prefill", "mi355x", {"kv_dtype": "float8_e4m3fn"}, ""),
        ("mla_prefill", "mi355x", {"v_dim": 64}, "needs v_dim 128, this is 64"),
        ("kda_decode", "mi355x", {"bounded": False}, ""),
        ("kda_decode", "mi300x", {}, "needs arch gfx950, this is gfx942"),
        ("kda_decode", "mi355x", {"head_dim": 64}, "needs head_dim 128, this is 64"),
        ("kda_prefill", "mi355x", {}, ""),
        ("kda_prefill", "mi355x", {"bounded": False}, "needs a bounded gate"),
        ("kda_prefill", "mi355x", {"conv_width": 3}, "needs conv_width 4, this is 3"),
        ("moe_experts_mxfp4", "mi355x", {}, ""),
        ("moe_experts_mxfp4", "mi300x", {}, ""),
        ("moe_experts_mxfp4", "mi355x", {"intermediate": 192}, "needs intermediate a multiple of 128, this is 192"),
        ("moe_experts_mxfp4", "mi355x", {"activation": "silu"}, "needs activation situ, this is silu"),
        ("rms_norm", "mi300x", {}, ""),
        ("rms_norm", "h200", {}, "needs vendor amd, this is nvidia"),
    ],
)
def test_what_an_adapter_takes_and_why_not(op: str, machine: str, dims: dict[str, Any], reason: str) -> None:
    call = _on(machine, op, **dims)
    assert bool(_provider(op).answer(call)) == (not reason), _provider(op).answer(call)
    said = _provider(op).every_reason(call)
    assert not reason or any(reason in one for one in said), said


@pytest.mark.parametrize(
    ("op", "name", "value", "said"),
    [
        ("mla_decode", "VLLM_ROCM_USE_AITER", "0", "VLLM_ROCM_USE_AITER is 0 in the environment"),
        ("mla_decode", "VLLM_ROCM_USE_AITER", "False", "VLLM_ROCM_USE_AITER is False in the environment"),
        ("mla_decode", "VLLM_ROCM_USE_AITER_MLA", "0", "VLLM_ROCM_USE_AITER_MLA is 0 in the environment"),
        ("mla_decode", "VLLM_ROCM_USE_AITER_MOE", "0", ""),
        ("rms_norm", "VLLM_ROCM_USE_AITER_RMSNORM", "0", "VLLM_ROCM_USE_AITER_RMSNORM is 0 in the environment"),
        ("moe_experts_mxfp4", "AITER_SITUV2_A8W4", "1", "AITER_SITUV2_A8W4 is 1 in the environment"),
        ("moe_experts_mxfp4", "AITER_SITUV2_A8W4", "0", ""),
        ("moe_experts_mxfp4", "VLLM_ROCM_USE_AITER_MOE_SITUV2", "a4w4", "VLLM_ROCM_USE_AITER_MOE_SITUV2 is a4w4"),
        ("moe_experts_mxfp4", "VLLM_ROCM_USE_AITER_MOE_SITUV2", "a16w4", ""),
    ],
)
def test_switches_that_users_set_are_followed_and_shown(
    monkeypatch: pytest.MonkeyPatch, op: str, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    answer = _provider(op).answer(_on("mi300x", op))
    assert bool(answer) == (not said)
    assert not said or any(said in reason for reason in getattr(answer, "reasons", ()))


def test_a_switch_that_allows_is_shown_with_the_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "1")
    answer = _provider("mla_decode").answer(_on("mi300x", "mla_decode"))
    assert getattr(answer, "note", "") == "VLLM_ROCM_USE_AITER=1"


@pytest.mark.parametrize("provider", ADAPTERS, ids=lambda p: p.op)
def test_a_missing_or_older_package_is_named(provider: Provider) -> None:
    call = _on("mi355x", provider.op)
    without = replace(call, device=replace(call.device, packages={}))
    assert any("needs package amd-aiter" in r for r in getattr(provider.answer(without), "reasons", ()))
    older = {**call.device.packages, "amd-aiter": "0.1.9.post1"}
    said = provider.answer(replace(call, device=replace(call.device, packages=older)))
    assert any("installed is 0.1.9.post1" in r for r in getattr(said, "reasons", ()))


def test_a_library_that_does_not_load_is_a_reason_where_it_would_run() -> None:
    call = _on("mi300x", "mla_decode")
    here = replace(call, device=replace(call.device, present=True))
    with emulated():
        assert _provider("mla_decode").answer(here)
    said = _provider("mla_decode").answer(here)
    assert any("cannot be loaded: ModuleNotFoundError" in reason for reason in getattr(said, "reasons", ()))
    args = mla_decode.inputs(torch.Generator().manual_seed(1), K3_TP8, "bfloat16", [3])
    with pytest.raises(BackendError, match=r"aiter\.mla\.mla_decode_fwd cannot be loaded"):
        _provider("mla_decode").fn(**args)


@pytest.mark.parametrize("bound", [-6.0, 0.0])
def test_bounds_that_the_chunked_kernels_do_not_take_are_refused(library: list[str], bound: float) -> None:
    sample = next(s for p, s in PAIRS if p.op == "kda_prefill")
    args = {**sample_case(get_operator("kda_prefill"), sample).args, "lower_bound": bound}
    with pytest.raises(UnsupportedError, match=r"takes bounds from -5\.5 up to 0"):
        _provider("kda_prefill").fn(**args)
    assert not library
