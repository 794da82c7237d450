"""The CUDA kernels of routed experts: their source, compiled for a CPU, computes what the operator says."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from k3hal.backends.nvidia.cuda import experts, library, packing
from k3hal.backends.nvidia.cuda.experts import Limits
from k3hal.dispatch.ops.moe_experts_mxfp4 import moe_experts_mxfp4
from k3hal.dispatch.ops.mx_dequantize import random_codes
from k3hal.errors import CheckpointError, UnsupportedError

EMULATOR = Path(__file__).parents[1] / "cuda"


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kernels' launches, each block run on this CPU before the next."""
    tool = shutil.which("g++")
    if tool is None:
        pytest.skip("g++ is not installed")
    made = tmp_path_factory.mktemp("cuda") / "experts.so"
    source = ["-x", "c++", "-I", str(EMULATOR), str(library.SOURCES / "experts.cu")]
    subprocess.run([tool, "-O1", "-std=c++20", "-shared", "-fPIC", "-w", *source, "-o", str(made)], check=True)
    loaded = ctypes.CDLL(str(made))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_launcher", cache(lambda name: getattr(loaded, name)))
        yield


def layer(tokens: int, count: int, top_k: int, hidden: int, inner: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs with absent choices and a padding row of NaN; weights as they are stored, and packed."""
    g = torch.Generator().manual_seed(tokens)
    w13 = random_codes(g, count, 2 * inner, hidden, low=119, high=123)
    w2 = random_codes(g, count, hidden, inner, low=119, high=123)
    x = torch.randn(tokens, hidden, generator=g).bfloat16()
    ids = torch.rand(tokens, count, generator=g).argsort(dim=-1)[:, :top_k].int()
    ids[torch.rand(ids.shape, generator=g) < 0.15] = -1
    ids[-1] = -1
    x[-1] = torch.nan
    inputs = {"x": x, "ids": ids, "weights": torch.rand(tokens, top_k, generator=g)}
    names = ("w13", "w13_scale", "w2", "w2_scale")
    stored = dict(zip(names, (*w13, *w2), strict=True))
    return inputs | stored, inputs | dict(zip(names, (*packing.pack(*w13), *packing.pack(*w2)), strict=True))


DIRECT, EIGHT, SIXTEEN = Limits(direct=9), Limits(direct=0, eight=1e3, few=1e3), Limits(direct=0, eight=0, few=1e3)
TALL = Limits(direct=0, few=0)


@pytest.mark.parametrize(
    ("limits", "tokens", "count", "top_k", "hidden", "inner", "activation"),
    [
        (DIRECT, 3, 6, 5, 128, 384, "situ"),
        (DIRECT, 5, 3, 2, 160, 96, "silu"),
        (EIGHT, 9, 4, 3, 640, 384, "situ"),
        (EIGHT, 17, 4, 2, 160, 608, "silu"),
        (SIXTEEN, 40, 4, 2, 160, 608, "situ"),
        (SIXTEEN, 9, 4, 3, 64, 1056, "situ"),
        (replace(SIXTEEN, half=1), 25, 4, 3, 640, 384, "situ"),
        (TALL, 40, 4, 2, 384, 192, "situ"),
        (TALL, 130, 2, 2, 256, 640, "silu"),
        (TALL, 90, 3, 2, 640, 64, "situ"),
    ],
)
def test_every_path_computes_the_operator(
    emulated: None, limits: Limits, tokens: int, count: int, top_k: int, hidden: int, inner: int, activation: str
) -> None:
    stored, packed = layer(tokens, count, top_k, hidden, inner)
    betas = (4.0, 25.0) if activation == "situ" else (0.0, 0.0)
    got = experts.sum_of_experts(**packed, betas=betas, limits=limits).float()
    wanted = moe_experts_mxfp4(**stored | {"x": stored["x"].float()}, activation=activation, beta=4.0, linear_beta=25.0)
    assert float((got - wanted).norm() / wanted.norm()) < 0.004
    assert not got[-1].any()


def test_tokens_are_taken_so_many_at_a_time(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _, packed = layer(7, 4, 2, 64, 32)
    whole = experts.sum_of_experts(**packed, betas=(4.0, 25.0), limits=DIRECT)
    monkeypatch.setattr(experts, "MOST", 3)
    assert torch.equal(experts.sum_of_experts(**packed, betas=(4.0, 25.0), limits=DIRECT), whole)


def test_rows_of_any_place_and_stride_are_taken(emulated: None) -> None:
    _, packed = layer(5, 4, 2, 64, 32)
    whole = experts.sum_of_experts(**packed, betas=(4.0, 25.0), limits=EIGHT)
    apart = torch.full((5, 73), torch.nan, dtype=torch.bfloat16)[:, 3:67]
    apart.copy_(packed["x"])
    ids = torch.cat([packed["ids"], torch.full_like(packed["ids"], 3)], dim=1)[:, :2]
    strided = packed | {"x": apart, "ids": ids}
    assert torch.equal(experts.sum_of_experts(**strided, betas=(4.0, 25.0), limits=EIGHT), whole)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": torch.zeros(5, 3, dtype=torch.int32)},
        {"ids": torch.zeros(5, 2)},
        {"ids": torch.zeros(2, 5, dtype=torch.int32).T},
        {"x": torch.zeros(5, 80, dtype=torch.bfloat16)},
        {"x": torch.zeros(4, 64, dtype=torch.bfloat16)},
        {"w13_scale": torch.zeros(4, 4, 1, 8, dtype=torch.int32)},
        {"w2": torch.zeros(4, 4, 1, 16, 32, dtype=torch.int32)[..., ::2]},
    ],
)
def test_tensors_that_kernels_would_overrun_are_refused(wrong: dict[str, Any]) -> None:
    _, packed = layer(5, 4, 2, 64, 32)
    with pytest.raises(UnsupportedError, match="cannot take tensors of shapes"):
        experts.sum_of_experts(**packed | wrong, betas=(4.0, 25.0), limits=DIRECT)


def test_every_code_has_its_place_in_a_word() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(1, 1, 4)
    words, _ = packing.pack(codes, torch.zeros(1, 16, 4, dtype=torch.uint8))
    assert words.shape == (1, 1, 1, 16, 16) and words.unique().numel() > 200
    bits = [place for low in packing._FIELDS for place in (*low, *((bit + 16) % 32 for bit in low))]
    assert sorted(bits) == list(range(32))


def test_packing_refuses_scales_it_could_not_hold() -> None:
    codes, scales = torch.zeros(1, 16, 16, dtype=torch.uint8), torch.full((1, 16, 1), 144, dtype=torch.uint8)
    assert set(packing.pack(codes, scales)[1].view(torch.uint8)[..., ::4].flatten().tolist()) == {254}
    with pytest.raises(CheckpointError, match="scale byte is 255, above 144"):
        packing.pack(codes, torch.full((1, 16, 1), 255, dtype=torch.uint8))


@pytest.mark.parametrize("tokens", [50, 2100])
def test_choices_are_sorted_into_even_tiles(emulated: None, tokens: int) -> None:
    g = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, 1030, generator=g)[:, :9].argsort(dim=-1)[:, :5].int()
    ids[torch.rand(ids.shape, generator=g) < 0.1] = -1
    ids[0, 0] = 1029
    blank = torch.zeros(1030, 4, 1, 16, 16)
    made = experts.Layer(torch.zeros(tokens, 32), ids, torch.zeros(ids.shape), blank, blank, blank, blank, (0.0, 0.0))
    made._sort(16)
    most, table = made.most, made.table
    count = int(table[3 * most + ids.numel()])
    expert, start, length = (table[i * most : i * most + count].tolist() for i in range(3))
    rows = table[3 * most :].tolist()
    found: dict[int, list[int]] = {}
    for e, first, size in zip(expert, start, length, strict=True):
        assert 0 < size <= 16
        found.setdefault(e, []).extend(rows[first : first + size])
    wanted = {e: (ids.flatten() == e).nonzero().flatten().tolist() for e in sorted({*ids.flatten().tolist()} - {-1})}
    assert list(found) == list(wanted)
    assert {e: sorted(held) for e, held in found.items()} == wanted
