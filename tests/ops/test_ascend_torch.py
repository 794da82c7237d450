"""The Ascend backend's providers made of torch's own operators: right on every sample, without a value on the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from k3hal.backends import _kda_chunks
from k3hal.backends.ascend import _plain, experts, mla_decode, mla_prefill
from k3hal.debug.case import sample_case, samples_of
from k3hal.debug.check import check
from k3hal.debug.target import Target
from k3hal.dispatch.describe import describe
from k3hal.dispatch.operator import Sample
from k3hal.dispatch.ops._mx_rounding import mxfp8_rounded
from k3hal.dispatch.provider import Provider
from k3hal.dispatch.registry import default_registry, get_operator, operator_names

TAGS = ("tiny", "edge", "adversarial")
PLAIN = ("torch", "host")
"""Names of the providers that call nothing but torch."""


def _provider(op: str) -> Provider:
    return next(p for p in default_registry().of(op) if p.backend == "ascend" and p.name in PLAIN)


OPERATORS = [
    op for op in operator_names() if any(p.backend == "ascend" and p.name in PLAIN for p in default_registry().of(op))
]
CASES = [
    pytest.param(op, sample, id=f"{op}-{sample.name}-{sample.dtype}")
    for op in OPERATORS
    for sample in samples_of(get_operator(op), tags=TAGS)
]


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_a_provider_gives_the_operators_answer(op: str, sample: Sample) -> None:
    verdict = check(sample_case(get_operator(op), sample), Target.of(_provider(op)))
    assert verdict.ok, verdict.reasons


EXPERTS = ("moe_experts", "moe_experts_a8w4", "moe_experts_mxfp4", "moe_experts_int4")


@pytest.mark.parametrize("op", ["mla_decode", "mla_prefill", *EXPERTS])
def test_small_scratch_changes_no_answer(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """Cached rows in many blocks, and the choices of few tokens at a time."""
    for module in (mla_decode, mla_prefill, experts):
        monkeypatch.setattr(module, "SCRATCH_BYTES", 1)
    for sample in samples_of(get_operator(op), tags=TAGS):
        verdict = check(sample_case(get_operator(op), sample), Target.of(_provider(op)))
        assert verdict.ok, (sample.name, verdict.reasons)


def test_many_choices_go_expert_by_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "FEW", 0)
    for op in EXPERTS:
        for sample in samples_of(get_operator(op), tags=TAGS):
            verdict = check(sample_case(get_operator(op), sample), Target.of(_provider(op)))
            assert verdict.ok, (op, sample.name, verdict.reasons)


@pytest.mark.parametrize("op", [op for op in OPERATORS if _provider(op).graph_safe])
def test_what_may_be_captured_reads_no_value(op: str) -> None:
    """On tensors without values: what a graph holds can depend on shapes alone."""
    operator, provider = get_operator(op), _provider(op)
    ran = 0
    for sample in samples_of(operator, tags=TAGS):
        args = dict(sample_case(operator, sample).args)
        if provider.prepare:
            args |= provider.prepare(**{name: args[name] for name in operator.weights})
        with FakeTensorMode() as mode:
            provider.fn(**{n: mode.from_tensor(a) if isinstance(a, Tensor) else a for n, a in args.items()})
        ran += 1
    assert ran


def test_the_check_for_values_finds_one_that_is_read() -> None:
    sample = next(iter(samples_of(get_operator("kda_chunk"), tags=TAGS)))
    args = sample_case(get_operator("kda_chunk"), sample).args
    with FakeTensorMode() as mode, pytest.raises(Exception, match=r"aten\._local_scalar_dense|data-dependent"):
        _provider("kda_chunk").fn(**{n: mode.from_tensor(a) if isinstance(a, Tensor) else a for n, a in args.items()})


@pytest.mark.parametrize("chunk", [1, 2, 16, 64])
@pytest.mark.parametrize("alike", [False, True])
def test_the_inverse_by_blocks_is_substitution(chunk: int, alike: bool) -> None:
    """Keys that are all alike make products whose powers would overflow any sum of them."""
    generator = torch.Generator().manual_seed(chunk)
    lower = torch.rand(3, chunk, chunk, generator=generator, dtype=torch.float64)
    lower = torch.full_like(lower, 0.99) if alike else lower
    eye = torch.eye(chunk, dtype=torch.float64)
    wanted = torch.linalg.inv(lower.tril(-1) + eye)
    assert torch.allclose(_kda_chunks.inverted(lower.float()).double(), wanted, atol=1e-5)


def test_a_cache_row_of_padding_alone_keeps_the_first_row() -> None:
    cache = torch.arange(2 * 4 * 6, dtype=torch.float32).view(2, 4, 6)
    before, nothing = cache.clone(), torch.full((3, 4), torch.nan)
    _provider("mla_cache_insert").fn(nothing, nothing[:, :2], cache, torch.full((3,), -1))
    assert torch.equal(cache, before)


def test_scales_are_decoded_to_the_last_bit() -> None:
    """All 256 of them, fp32's smallest numbers too."""
    scales = torch.arange(256, dtype=torch.uint8).view(-1, 1)
    codes = torch.full((256, 16), 0x71, dtype=torch.uint8)
    wanted = get_operator("mx_dequantize").reference(codes, scales, torch.float32)
    assert torch.equal(experts.mxfp4_decoded(codes, scales).view(torch.int32)[:255], wanted.view(torch.int32)[:255])
    assert bool(experts.mxfp4_decoded(codes, scales)[255].isnan().all())


def test_every_provider_is_for_ascend_alone() -> None:
    call_on = {device: describe(device).vendor for device in ("ascend_910b", "ascend_950", "h200", "mi355x")}
    for op in OPERATORS:
        assert _provider(op).needs.vendors == ("ascend",)
    assert call_on["ascend_950"] == "ascend" and _plain.PRIORITY < 30


def test_rounding_to_mxfp8_by_fp32_is_the_operators() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=g) * torch.exp2(torch.randint(-140, 127, (64, 1), generator=g).float())
    x[0], x[1], x[2, 5], x[3, 40] = torch.arange(-32, 32) / 16, 0.0, torch.nan, torch.inf
    assert torch.equal(experts.mxfp8_rounded(x).nan_to_num(7.0), mxfp8_rounded(x).nan_to_num(7.0))
