"""The CPU kernels' own promises: packed layouts, rows independent of their batch, accuracy, a missing compiler."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from k3hal.backends.cpu.linear_native import product
from k3hal.backends.cpu.moe_route_native import moe_route
from k3hal.backends.cpu.native.experts import gated, pack_experts, sum_of_experts
from k3hal.backends.cpu.native.library import library, supported
from k3hal.backends.cpu.native.packing import LANES, Packed, pack_mxfp4
from k3hal.dispatch.call import Call, No
from k3hal.dispatch.errors import InputError, UnsupportedError
from k3hal.dispatch.ops.mx_dequantize import mx_dequantize, random_codes
from k3hal.dispatch.probe import probe

CALL = Call("linear", probe("cpu"), "float32", "any", {})
compiled = pytest.mark.skipif(not supported(CALL), reason=f"CPU kernels: {supported(CALL)}")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _unpacked(packed: Packed) -> tuple[Tensor, Tensor]:
    """Codes and scales as `mx_dequantize` takes them, and nothing but zeros in the padding rows."""
    assert packed.scales is not None
    codes = packed.data.transpose(-2, -3).flatten(-2).flatten(-3, -2)  # [..., blocks * 32, D / 2]
    scales = packed.scales.transpose(-1, -2).flatten(-3, -2)
    assert not codes[..., packed.rows :, :].any()
    assert not scales[..., packed.rows :, :].any()
    return codes[..., : packed.rows, :], scales[..., : packed.rows, :]


@pytest.mark.parametrize("shape", [(3, 64), (32, 32), (2, 40, 512), (2, 3, 33, 96)])
def test_mxfp4_packing_keeps_every_code_and_scale(shape: tuple[int, ...]) -> None:
    codes, scales = random_codes(torch.Generator().manual_seed(0), *shape, low=0, high=256)
    packed = pack_mxfp4(codes, scales)
    assert packed.data.shape[-4] == -(-shape[-2] // LANES)
    back_codes, back_scales = _unpacked(packed)
    assert torch.equal(back_codes, codes)
    assert torch.equal(back_scales, scales)


@compiled
@pytest.mark.parametrize("scale", [0, 1, 127, 250, 254, 255])
def test_kernel_decodes_every_byte_exactly(scale: int) -> None:
    """A one-hot row picks one channel; infinities and NaN spread over their row of weights in both."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(40, 1)
    scales = torch.full((40, 16), 120, dtype=torch.uint8)
    scales[::3] = scale
    x = torch.eye(512)
    golden = x @ mx_dequantize(codes, scales, torch.float32).T
    torch.testing.assert_close(product(x, pack_mxfp4(codes, scales)), golden, rtol=0, atol=0, equal_nan=True)


def _stacks(kind: str, experts: int, width: int, inner: int) -> tuple[Packed, Packed]:
    g = torch.Generator().manual_seed(1)
    shapes = ((experts, 2 * inner, width), (experts, width, inner))
    if kind == "mxfp4":
        first, second = (pack_experts(*random_codes(g, *shape, low=119, high=123)) for shape in shapes)
        return first, second
    first, second = (
        pack_experts((torch.randn(*shape, generator=g) * shape[-1] ** -0.5).to(getattr(torch, kind)), None)
        for shape in shapes
    )
    return first, second


@compiled
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "mxfp4"])
@pytest.mark.parametrize("inner", [32, 96])
def test_experts_row_is_the_same_alone_and_in_any_batch(kind: str, inner: int, threads: int) -> None:
    g = torch.Generator().manual_seed(2)
    x, weights = torch.randn(17, 64, generator=g), torch.rand(17, 3, generator=g)
    ids = torch.rand(17, 4, generator=g).argsort(dim=-1)[:, :3].int()
    stacks, act = _stacks(kind, 4, 64, inner), ("situ", 4.0, 25.0)
    together = sum_of_experts(x, ids, weights, *stacks, *act)
    assert together.std() > 0.01
    for t in range(17):
        row = slice(t, t + 1)
        assert torch.equal(sum_of_experts(x[row], ids[row], weights[row], *stacks, *act), together[row])
    swapped = sum_of_experts(x, ids.flip(-1), weights.flip(-1), *stacks, *act)
    assert torch.equal(swapped, together), f"the order of choices matters with {threads} threads"


@compiled
def test_experts_in_several_calls_equal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(3)
    x, weights = torch.randn(9, 64, generator=g), torch.rand(9, 2, generator=g)
    ids = torch.rand(9, 4, generator=g).argsort(dim=-1)[:, :2].int()
    stacks = _stacks("bfloat16", 4, 64, 32)
    whole = sum_of_experts(x, ids, weights, *stacks, "silu", 1.0, 1.0)
    monkeypatch.setattr("k3hal.backends.cpu.native.experts.MAX_SCRATCH", 4 * 2 * 64)
    assert torch.equal(sum_of_experts(x, ids, weights, *stacks, "silu", 1.0, 1.0), whole)


@compiled
def test_route_row_is_the_same_alone_and_in_a_batch_and_nan_chooses_valid_ids() -> None:
    g = torch.Generator().manual_seed(4)
    logits, bias = torch.randn(600, 40, generator=g), torch.randn(40, generator=g)
    logits[5] = torch.nan
    weights, ids = moe_route(logits, bias, 7, True, 2.5)
    for t in (0, 17, 599):
        alone_weights, alone_ids = moe_route(logits[t : t + 1], bias, 7, True, 2.5)
        assert torch.equal(alone_ids[0], ids[t])
        assert torch.equal(alone_weights[0], weights[t])
    assert ids[5].tolist() == list(range(7))


@compiled
def test_activations_are_accurate_everywhere() -> None:
    sweep = torch.linspace(-110, 110, 20_001)
    extremes = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 0.625, -0.625, 3e38, -3e38, torch.inf, torch.nan])
    z = torch.cat([sweep, sweep / 100, extremes])
    one, hundred = torch.ones_like(z), torch.full_like(z, 100.0)
    silu = gated(torch.stack([z, one], dim=1), "silu", 1.0, 1.0)[:, 0]
    exact = z.double() * torch.sigmoid(z.double())
    torch.testing.assert_close(silu.double(), exact.float().double(), rtol=5e-7, atol=1e-35, equal_nan=True)
    tanh = gated(torch.stack([hundred, z], dim=1), "situ", 1.0, 1.0)[:, 0]
    torch.testing.assert_close(tanh.double(), torch.tanh(z.double()), rtol=5e-7, atol=0, equal_nan=True)


@pytest.mark.parametrize(("tool", "says"), [("/bin/false", "cannot compile"), ("no-such-compiler", "no C++ compiler")])
def test_without_a_working_compiler_one_line_says_so(
    tool: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", tool)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UnsupportedError, match=says.replace("+", r"\+")) as caught:
        library.__wrapped__("experts")
    assert "\n" not in str(caught.value)
    if tool == "no-such-compiler":
        assert not supported(CALL)


def test_without_a_cache_folder_one_line_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    wanted = r"the cache folder .*/file/k3hal/native cannot be used: Not a directory \(set XDG_CACHE_HOME"
    said = supported(CALL)
    assert isinstance(said, No) and any(re.match(wanted, reason) for reason in said.reasons)
    monkeypatch.setattr("k3hal.backends.cpu.native.library.compiler", lambda: "/bin/true")
    with pytest.raises(InputError, match=wanted):
        library.__wrapped__("experts")
