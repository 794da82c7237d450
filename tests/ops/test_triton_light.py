"""The small Triton kernels: right under the interpreter, and compiled for every GPU they are meant for."""

from __future__ import annotations

import importlib.util

import pytest

from .interpreter import found_wrong
from .triton_compile import TARGETS, compile_for

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

BOTH = ("float32", "bfloat16")
MIXED = ("add", "first_layer", "reset_and_store", "no_norm", "no_rows", "faint")
CHECKS = [
    *(
        ("attn_res_mix", f"triton{t}", name, dtype, "")
        for t in ("", ":streamed8x2")
        for name in MIXED
        for dtype in BOTH
    ),
    *(("attn_res_mix", "triton", "block_end", dtype, "batch") for dtype in BOTH),
    *(("copy_pages", "triton", name, "bfloat16", "") for name in ("chain", "swap", "fan_out", "strided", "none")),
    *(("embed", "triton", name, dtype, "") for name in ("repeats", "negative_ids", "no_rows") for dtype in BOTH),
    *(("step_metadata", "triton", name, "bfloat16", "") for name in ("mixed", "empty", "nothing", "large_pages")),
    *(
        ("sample", "triton", name, "float32", "")
        for name in ("greedy_ties", "plain", "last_kept", "mixed", "no_rows", "one_token")
    ),
    *(
        ("verify_draft", "triton", f"{name}_{method}", "float32", "")
        for name in ("tiny", "greedy", "greedy_one_hot", "equal", "disjoint", "ragged")
        for method in ("standard", "block")
    ),
]


def test_all_is_right_under_the_interpreter() -> None:
    assert found_wrong(CHECKS, "triton_light_special.py", ["scratch"]) == []


def _pointers(of: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, f"*{of}")


def _integers(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


MIX: dict[str, str] = {
    **_pointers("bf16", "prefix", "delta", "blocks", "out_weight", "out"), "key_weight": "*fp32", "eps": "fp32",
    "out_eps": "fp32", **_integers("prefix_stride", "delta_stride", "block_stride", "row_stride", "dim", "count"),
}  # fmt: skip
MIX_FLAGS = {"RESET": False, "ADD": True, "STORE": True, "NORM": True, "BLOCK": 8192}


@pytest.mark.parametrize("target", TARGETS)
def test_attention_residuals_of_k3_fit_a_gpu(target: str) -> None:
    from k3hal.backends.triton._triton import kernels

    mix = kernels("attn_res_mix")
    made = compile_for(mix._streamed, target, MIX, {**MIX_FLAGS, "STAGES": 3}, warps=8)
    assert made.spills == 0
    # On NVIDIA two of the three sources on their way wait in shared memory.
    assert made.shared < 48 << 10
    if target.startswith("sm"):
        assert "cp.async" in made.text
        assert made.shared >= 2 * 7168 * 2
    held = compile_for(mix._held, target, {**MIX, "zero": "i32"}, {**MIX_FLAGS, "COUNT": 8}, warps=mix.HELD_WARPS)
    assert held.shared < 1 << 12 and held.spills == 0


@pytest.mark.parametrize("target", TARGETS)
def test_page_copies_compile_to_reads_a_barrier_and_wide_writes(target: str) -> None:
    from k3hal.backends.triton._triton import kernels

    types = {**_pointers("i64", "source", "target", "src", "dst"),
             **_integers("source_stride", "target_stride", "count", "words")}  # fmt: skip
    constants = {"BY_SRC": True, "BY_DST": True, "PAGES": 32, "BLOCK": 64}
    text = compile_for(kernels("copy_pages")._copy, target, types, constants, warps=2).text
    nvidia, amd = ("bar.sync", "ld.global", "st.global"), ("s_barrier", "load_dwordx", "store_dwordx")
    barrier, read, write = nvidia if target.startswith("sm") else amd
    assert text.index(read) < text.index(barrier) < text.index(write)
    assert text.rindex(read) < text.rindex(barrier) < text.index(write)


@pytest.mark.parametrize("target", TARGETS)
def test_lookups_compile(target: str) -> None:
    from k3hal.backends.triton._triton import kernels

    types = {"ids": "*i64", **_pointers("bf16", "weight", "out"), **_integers("id_stride", "weight_stride", "dim")}
    assert compile_for(kernels("embed")._embed, target, types, {"BLOCK": 2048}, warps=8).spills == 0
    names = ("context_stride", "new_stride", "table_stride", "entry_stride", "count", "num_tokens")
    tables = _pointers("i32", "context_lens", "new_lens", "page_table", "cu_seqlens", "seq_lens")
    types = {**tables, **_pointers("i64", "positions", "kv_rows"), **_integers(*names)}
    constants = {"PAGE_TOKENS": 128, "COUNT": 64, "BLOCK": 512}
    assert compile_for(kernels("step_metadata")._step_metadata, target, types, constants, warps=4).spills == 0


@pytest.mark.parametrize("target", TARGETS)
def test_sampling_from_the_vocabulary_of_k3_compiles(target: str) -> None:
    from k3hal.backends.triton._triton import kernels

    sample = kernels("sample")
    types = {
        **_pointers("fp32", "logits", "temperatures", "min_p", "top_p", "tops", "lows"),
        **_pointers("i32", "top_k", "bests", "counts", "keys", "ids"), **_pointers("fp64", "uniform", "masses"),
        "out": "*i64", **_integers("row_stride", "vocab", "blocks"),
    }  # fmt: skip
    sizes = {"BLOCK": sample.BLOCK, "BLOCKS": 64, "BINS": sample.BINS}
    weigh = compile_for(sample._weigh, target, types, {**sizes, "LANES": sample.LANES}, warps=8)
    sizes |= {"BLOCK": sample.LISTED, "WIDTH": 33, "LANES": sample.LANES}
    choose = compile_for(sample._choose, target, types, sizes, warps=8)
    # Here the compiler knows no divisor of a stride, as it does where the kernel is launched and nothing is spilled.
    assert weigh.spills == 0 and choose.spills <= (16 if target == "sm_100" else 0)


@pytest.mark.parametrize("target", TARGETS)
def test_verifying_drafts_in_the_vocabulary_of_k3_compiles(target: str) -> None:
    from k3hal.backends.triton._triton import kernels

    verify = kernels("verify_draft")
    names = ("ids_stride", "draft_stride", "draft_step", "target_stride", "target_step", "vocab", "blocks")
    types = {"ids": "*i64", **_pointers("fp32", "draft", "target"), "sums": "*fp64", **_integers(*names)}
    sizes = {"Q": 7, "PADDED": 8, "GREEDY": False, "BLOCK": verify.BLOCK}
    assert compile_for(verify._residuals, target, types, sizes, warps=8).spills == 0
    types |= {**_pointers("fp64", "uniform", "lefts", "totals"), "uniform_stride": "i32"}
    sizes |= {"BY_BLOCK": True, "BLOCKS": 64}
    assert compile_for(verify._rest, target, types, sizes, warps=8).spills == 0
    types |= _pointers("i64", "accepted", "following")
    assert compile_for(verify._draw, target, types, sizes, warps=8).spills == 0
