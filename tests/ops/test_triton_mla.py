"""Triton's MLA kernels: right under the interpreter, compiled for every GPU they are meant for, bounded scratch."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import Any

import pytest
import torch
from packaging.version import Version

from k3hal.backends.triton import mla_decode
from k3hal.dispatch.call import Call
from k3hal.dispatch.device import DeviceDescription

from .interpreter import found_wrong
from .triton_compile import TARGETS, compile_for

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

F32, BF16, BOTH = "float32", "bfloat16", ("float32", "bfloat16")
CHECKS = [
    *(("mla_decode", "triton", name, F32, "") for name in ("page_edges", "empty_rows", "strided", "hot")),
    *(("mla_decode", "triton", name, BF16, "") for name in ("three", "all_empty", "fp8", "k3_6_heads")),
    *(("mla_decode", f"triton:{name}", "fp8", BF16, "") for name in ("rows64", "upright", "loaded_twice")),
    *(("mla_decode", "triton:upright", name, BF16, "") for name in ("three", "in_order_strided")),
    *(("mla_decode", "triton", "three", BF16, name) for name in ("batch", "pad", "decode")),
    ("mla_decode", "triton", "unequal", F32, ""),  # Two chunks.
    *(("mla_cache_insert", "triton", name, F32, "") for name in ("padding", "all_padding", "strided", "fp8_strided")),
    *(("mla_cache_insert", "triton:rows1", name, BF16, "") for name in ("scattered", "fp8")),
    *(("mla_prefill", "triton", name, F32, "") for name in ("one_token", "two", "nothing", "strided")),
    *(("mla_prefill", "triton", name, BF16, "") for name in ("padding", "fp8")),
    *(("mla_prefill", "triton", "two", F32, name) for name in ("split", "batch", "pad", "decode")),
    *(("sigmoid_gate", "triton", name, kind, "") for name in ("odd", "no_rows", "row_strided") for kind in BOTH),
    *(("head_linear", "triton", name, kind, "") for name in ("one_head", "no_rows", "strided") for kind in BOTH),
    ("head_linear", "triton", "rows", BF16, "batch"),
]


def test_all_is_right_under_the_interpreter() -> None:
    assert found_wrong(CHECKS) == []


def _pointers(of: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{of}")


def _integers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


DECODE: dict[str, str] = {
    **_pointers("bf16", "q", "cache", "out"), **_pointers("i32", "table", "seq_lens"),
    **_pointers("fp32", "partial", "lse"), "scale": "fp32",
    **_integers("q_row", "q_head", "page_stride", "table_row", "count", "max_splits"),
}  # fmt: skip
K3 = {"HEADS": 12, "RANK": 512, "ROPE": 64, "PAGE": 128,
      "BLOCK_BATCH": 64, "BLOCK_H": 16, "BLOCK_R": 512, "BLOCK_P": 64}  # fmt: skip
MOST_SHARED = {"sm_90": 227 << 10, "sm_100": 227 << 10, "gfx950": 160 << 10, "gfx942": 64 << 10}


@pytest.mark.parametrize("target", TARGETS)
def test_decoding_compiles_without_spills_and_reads_ahead(target: str) -> None:
    from k3hal.backends.triton._triton import kernels

    stages = 1 if target == "gfx942" else 3
    tile = {"ROWS": 32, "CHUNK": 512, "SPLITS": 256, "STAGES": stages, "TWICE": False}
    made = compile_for(kernels("mla_decode")._attend, target, DECODE, {**K3, **tile}, warps=4)
    assert made.spills == 0
    # Two programs share a multiprocessor of NVIDIA's, and each has two tiles on their way.
    if target.startswith("sm"):
        assert "cp.async" in made.text
        assert 2 * 32 * 576 * 2 <= made.shared <= MOST_SHARED[target] // 2
    assert made.shared <= MOST_SHARED[target]


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_decoding_for_many_heads_fits_nvidia(target: str) -> None:
    if target == "sm_100" and Version(version("triton")) < Version("3.9"):
        pytest.skip("older Tritons give this kernel more shared memory than a multiprocessor of sm_100 has")
    from k3hal.backends.triton._triton import kernels

    tile = {"HEADS": 96, "BLOCK_H": 64, "ROWS": 64, "CHUNK": 1024, "SPLITS": 128, "STAGES": 2}
    made = compile_for(kernels("mla_decode")._attend_upright, target, DECODE, {**K3, **tile}, warps=8)
    # As measured: the bytes of stack a thread has; 32 by Triton 3.6 on sm_90.
    assert made.spills <= {"sm_90": 280, "sm_100": 408}[target]
    assert made.shared <= MOST_SHARED[target]
    assert {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}[target] in made.text


def test_many_heads_on_blackwell_take_a_tiling_that_fits_with_an_older_triton() -> None:
    def tactics(arch: str, triton: str) -> set[str]:
        device = DeviceDescription("other", "nvidia", arch, int(arch[3:]), packages={"triton": triton})
        return set(mla_decode._tactics(Call("mla_decode", device, "bfloat16", dims={"heads": 96})))

    assert {"upright", "rows64"} <= tactics("sm_100", "3.9.0") & tactics("sm_90", "3.6.0")
    for arch, triton in (("sm_100", "3.8.1"), ("sm_103", "3.6.0")):
        assert tactics(arch, triton) == tactics("sm_90", "3.6.0") - {"upright"}


@pytest.mark.parametrize(
    ("arch", "triton", "heads"), [("sm_100", "3.8.1", 32), ("sm_100", "3.9.0", 64), ("sm_90", "3.6.0", 32)]
)
def test_the_default_tiling_of_many_heads_fits(
    arch: str, triton: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3hal.backends.triton.kernels import programs

    monkeypatch.setattr(programs, "arch", lambda _: arch)
    monkeypatch.setattr(programs, "shared_memory", lambda _: MOST_SHARED[arch])
    monkeypatch.setattr(mla_decode, "INSTALLED", {"triton": triton})
    q, cache = torch.empty(1, 96, 576, dtype=torch.bfloat16), torch.empty(1, 128, 576, dtype=torch.bfloat16)
    assert mla_decode._default(q, cache)[-1] == heads


@pytest.mark.parametrize("target", TARGETS)
def test_prefill_compiles_to_matrix_instructions(target: str) -> None:
    from k3hal.backends.triton._triton import kernels

    types: dict[str, str] = {
        **_pointers("bf16", "q", "keys", "ropes", "values", "rest", "out"),
        **_pointers("i32", "cu_seqlens", "context_lens"),
        **_pointers("fp32", "state", "state_total", "state_top"), "scale": "fp32",
        **_integers("q_row", "q_head", "key_head", "value_head", "count", "tokens", "begin", "window"),
    }  # fmt: skip
    queries, keys, warps, stages = (128, 64, 8, 3) if target.startswith("sm") else (64, 32, 4, 2)
    constants: dict[str, Any] = {
        "HEADS": 12, "NOPE": 128, "ROPE": 64, "VALUE": 128, "FIRST": True, "EXACT": 64, "BLOCK_BATCH": 8,
        "BLOCK_D": 128, "BLOCK_P": 64, "BLOCK_V": 128, "QUERIES": queries, "KEYS": keys, "STAGES": stages,
    }  # fmt: skip
    made = compile_for(kernels("mla_prefill")._attend, target, types, constants, warps=warps)
    # As measured with Triton 3.7: the bytes of stack a thread has on sm_100; none elsewhere.
    assert made.spills <= (48 if target == "sm_100" else 0)
    assert made.shared <= MOST_SHARED[target]
    wanted = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}.get(target, "v_mfma")
    assert wanted in made.text


def test_windows_of_prefill_take_no_more_than_their_scratch() -> None:
    from k3hal.backends.triton._triton import kernels

    rows = kernels("mla_prefill").window_rows
    assert rows(positions=1000, row_bytes=64, scratch=1 << 20) == 1024  # All, in whole blocks.
    assert rows(positions=1 << 20, row_bytes=6272, scratch=1 << 20) == 128
    assert rows(positions=1 << 20, row_bytes=6272, scratch=1 << 30) * 6272 <= 1 << 30
    assert rows(positions=1 << 20, row_bytes=1 << 20, scratch=1 << 10) == 128  # Never less than a block.


def test_decoding_from_fp8_reads_ahead_on_hopper_when_loaded_twice() -> None:
    from k3hal.backends.triton._triton import kernels

    types = {**DECODE, "cache": "*fp8e4nv"}
    tile = {"ROWS": 32, "CHUNK": 512, "SPLITS": 256, "STAGES": 3}
    once, twice = (
        compile_for(kernels("mla_decode")._attend, "sm_90", types, {**K3, **tile, "TWICE": how}, warps=4)
        for how in (False, True)
    )
    tiles_ahead = 2 * 2 * 32 * 512
    assert twice.shared >= tiles_ahead
    assert twice.text.count("cp.async.c") > 10 * once.text.count("cp.async.c")
