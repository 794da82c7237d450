"""The Triton MoE kernels: right under the interpreter, and compiled for every GPU they are meant for."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from k3hal.backends.triton._int4 import pack as pack_int4
from k3hal.backends.triton._mxfp4 import pack
from k3hal.dispatch.ops.moe_experts_int4 import int4_dequantize
from k3hal.errors import CheckpointError

from .interpreter import found_wrong
from .triton_compile import TARGETS, compile_for

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

EXPERTS = (
    ("tiny", "bfloat16"), ("silu", "float32"), ("loud", "float32"), ("negative_one", "bfloat16"),
    ("padding", "float32"), ("no_rows", "float32"),
)  # fmt: skip
CHECKS = [
    *(
        (f"moe_experts{f}", "triton.grouped", name, dtype, "")
        for f in ("", "_mxfp4", "_int4")
        for name, dtype in EXPERTS
    ),
    *((f"moe_experts{f}", "triton.grouped:sorted", "one_token", "float32", "") for f in ("", "_mxfp4", "_int4")),
    *((f"moe_experts{f}", "triton.grouped:narrow", "one_token", "float32", "") for f in ("", "_mxfp4", "_int4")),
    ("moe_experts_int4", "triton.grouped", "tiny", "bfloat16", "batch"),
    ("moe_experts_int4", "triton.grouped", "tiny", "bfloat16", "pad"),
    *(("moe_experts_a8w4", "triton.scaled", name, dtype, "") for name, dtype in EXPERTS),
    *(("moe_experts_a8w4", "triton.rounded", name, dtype, "") for name, dtype in EXPERTS[:3]),
    ("moe_experts_a8w4", "triton.scaled", "tiny", "bfloat16", "batch"),
    ("moe_experts_a8w4", "triton.scaled", "tiny", "bfloat16", "pad"),
    ("moe_experts_mxfp4", "triton.grouped", "tiny", "bfloat16", "batch"),
    ("moe_experts_mxfp4", "triton.grouped", "tiny", "bfloat16", "pad"),
    *(
        ("moe_route", "triton.fused", name, "float32", "")
        for name in ("plain", "biased", "ties", "all_equal", "saturated", "small_scores", "all_zero", "every_expert")
    ),
    *(("situ_and_mul", "triton.fused", name, "float32", "") for name in ("strided", "saturated", "other_betas")),
    *(("silu_and_mul", "triton.fused", name, "float32", "") for name in ("strided", "large")),
    ("situ_and_mul", "triton.fused", "odd", "bfloat16", ""),
    *(("mx_dequantize", "triton.grouped", "every_code", dtype, "") for dtype in ("float32", "bfloat16")),
    ("mx_dequantize", "triton.grouped", "smallest", "bfloat16", ""),
    *(
        ("mx_quantize", "triton.grouped", name, "float32", "")
        for name in ("halves", "zero_groups", "not_finite", "wide", "tiny_numbers", "huge_numbers")
    ),
    ("mx_quantize", "triton.grouped", "halves", "bfloat16", ""),
]


@needs_triton
def test_all_is_right_under_the_interpreter() -> None:
    assert found_wrong(CHECKS, "triton_moe_special.py", ["sorted", "blocks", "tall", "passes", "rounded", "int4"]) == []


def test_packing_refuses_scales_it_could_not_hold() -> None:
    codes, scales = torch.zeros(1, 16, 16, dtype=torch.uint8), torch.full((1, 16, 1), 144, dtype=torch.uint8)
    words, factors = pack(codes, scales)
    assert (words.shape, factors.shape) == ((1, 1, 1, 16, 16), (1, 1, 1, 16))
    assert set(factors.view(torch.uint8)[..., ::4].flatten().tolist()) == {254}
    with pytest.raises(CheckpointError, match="scale byte is 255, above 144"):
        pack(codes, torch.full((1, 16, 1), 255, dtype=torch.uint8))


def test_packing_keeps_every_int4_and_its_scale() -> None:
    """Of two experts of 16 rows and 160 columns, which is more than one block and less than two."""
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (2, 16, 80), dtype=torch.uint8, generator=g)
    scales = torch.rand(2, 16, 5, generator=g).bfloat16()
    words, factors = pack_int4(codes, scales)
    assert (words.shape, factors.shape, factors.dtype) == ((2, 1, 2, 16, 16), (2, 1, 2, 16, 4), torch.bfloat16)
    wanted = int4_dequantize(codes, scales)
    for column in range(160):
        block, j, c, h = column // 128, column % 128 // 32, column % 32 // 2, column % 2
        code = words[:, 0, block, :, c] >> 16 * h + 4 * j & 15
        assert torch.equal((code - 8) * factors[:, 0, block, :, j].float(), wanted[..., column])
    assert not factors[:, 0, 1, :, 1:].any()


GATE_UP = {
    **dict.fromkeys(("x", "hidden"), "*bf16"), **dict.fromkeys(("ids", "experts", "rows", "w", "scales"), "*i32"),
    **dict.fromkeys(("x_stride", "ids_stride"), "i32"), **dict.fromkeys(("beta", "linear_beta"), "fp32"),
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
def test_the_first_gemm_decodes_codes_where_it_multiplies_them(target: str) -> None:
    from k3hal.backends.triton._experts import PACKED
    from k3hal.backends.triton._triton import kernels

    gate_up, nvidia = kernels("experts").gemm.gate_up, target.startswith("sm")
    fixed = {
        "TOP_K": 16,
        "K": 3584,
        "INNER": 384,
        "FORMAT": "mxfp4",
        "SITU": True,
        "ROUND": False,
        "PTX": nvidia,
        "BK": 128,
    }
    matrix = {"sm_90": "wgmma", "sm_100": "tcgen05"}.get(target, "v_mfma_f32")
    for height in (16, 64):
        shape = PACKED.shapes(height)[0]
        constants = {**fixed, "DIRECT": height == 16, "BT": height, "BM": shape.rows}
        made = compile_for(gate_up, target, GATE_UP, constants, warps=shape.warps)
        assert made.spills == 0
        assert made.shared <= 64 << 10 or target != "gfx942"
        wanted = ("mul.rn.bf16x2", matrix) if nvidia else (matrix,)
        assert [word for word in wanted if word not in made.text] == []


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
def test_int4_is_decoded_where_it_is_multiplied(target: str) -> None:
    from k3hal.backends.triton._triton import kernels
    from k3hal.backends.triton.moe_experts_int4 import CUT

    nvidia = target.startswith("sm")
    fixed = {"TOP_K": 16, "K": 3584, "INNER": 384, "FORMAT": "int4", "SITU": True, "ROUND": False, "PTX": nvidia}
    for height in (16, CUT.tallest):
        shape = CUT.shapes(height)[0]
        constants = {**fixed, "DIRECT": height == 16, "BT": height, "BM": shape.rows, "BK": 128}
        types = {**GATE_UP, "scales": "*bf16"}
        made = compile_for(kernels("experts").gemm.gate_up, target, types, constants, warps=shape.warps)
        assert made.spills == 0 and made.shared <= 64 << 10
        matrix = {"sm_90": "wgmma", "sm_100": "tcgen05"}.get(target, "v_mfma_f32")
        wanted = ("sub.rn.bf16x2", matrix) if nvidia else (matrix,)
        assert [word for word in wanted if word not in made.text] == []


@needs_triton
@pytest.mark.parametrize(("target", "instruction"), [("gfx950", "v_mfma_scale_f32"), ("sm_100", ".block_scale")])
def test_two_formats_are_multiplied_by_one_instruction(target: str, instruction: str) -> None:
    from k3hal.backends.triton._triton import kernels
    from k3hal.backends.triton.moe_experts_a8w4_scaled import CUT

    types = {
        **dict.fromkeys(("ids", "experts", "rows"), "*i32"), **dict.fromkeys(("ids_stride", "weights_stride"), "i32"),
        **dict.fromkeys(("hidden_scales", "w", "w_scales"), "*u8"), "hidden": "*fp8e4nv",
        **dict.fromkeys(("weights", "out"), "*fp32"),
    }  # fmt: skip
    fixed = {"TOP_K": 16, "K": 384, "WIDTH": 3584}
    for height in (16, 64):
        shape = CUT.shapes(height)[1]
        constants = {**fixed, "DIRECT": height == 16, "BT": height, "BM": shape.rows, "BK": shape.depth}
        made = compile_for(kernels("scaled_experts").gemm.down, target, types, constants, warps=shape.warps)
        assert made.spills == 0 and instruction in made.text


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
def test_routing_and_sorting_compile(target: str) -> None:
    from k3hal.backends.triton._triton import kernels

    types = {**dict.fromkeys(("logits", "bias", "weights"), "*fp32"), "ids": "*i32", "scale": "fp32",
             **dict.fromkeys(("logits_stride", "experts"), "i32")}  # fmt: skip
    constants = {"TOP_K": 16, "SLOTS": 16, "RENORMALIZE": True, "BLOCK": 1024}
    made = compile_for(kernels("moe_route")._route, target, types, constants, warps=1)
    # One warp needs no memory that other warps see. On NVIDIA a thread has up to 104 bytes of stack, as measured.
    assert made.spills <= 104 and made.shared == 0
    tiling = kernels("experts").tiling
    types = {**dict.fromkeys(("ids", "counts", "experts", "rows"), "*i32"),
             **dict.fromkeys(("stride", "choices", "tiles"), "i32")}  # fmt: skip
    few = {"TOP_K": 16, "BT": 16, "BLOCK": 1024}
    assert compile_for(tiling.tiles_of_few, target, types, few, warps=4).spills == 0
    many = {"EXPERTS": 896, "EXPERTS_BLOCK": 1024, "TOP_K": 16, "BT": 64, "BLOCK": 2048}
    assert compile_for(tiling.tiles_of_many, target, types, many, warps=4).spills == 0


@needs_triton
@pytest.mark.parametrize(
    ("arch", "triton", "tallest"),
    [
        ("sm_100", "3.8.0", 64), ("sm_103", "3.6.0", 64), ("sm_100", "3.9.0", 128), ("sm_90", "3.6.0", 128),
        ("sm_120", "3.7.1", 128), ("gfx950", "3.7.1", 128), ("", "3.7.1", 128),
    ],
)  # fmt: skip
def test_no_tile_is_taller_than_compiles(arch: str, triton: str, tallest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of taller ones Triton made kernels that do nothing."""
    from k3hal.backends.triton import moe_experts_mxfp4 as experts
    from k3hal.backends.triton.kernels import programs

    launched: list[Any] = []

    class Launched:
        @staticmethod
        def sum_of_experts(*args: Any, **_: Any) -> Any:
            launched.append(args[-1])

    monkeypatch.setattr(programs, "arch", lambda _: arch)
    monkeypatch.setattr(experts, "INSTALLED", {"triton": triton})
    monkeypatch.setattr(experts, "kernels", lambda _: Launched)
    x = torch.empty(0)
    experts._cut(experts.PACKED)(x, x, x, x, x, x, x, "situ", 1.0, 1.0)
    assert [cut.tallest for cut in launched] == [tallest]
