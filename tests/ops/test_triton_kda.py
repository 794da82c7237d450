"""KDA's Triton kernels: right under the interpreter, and compiled for the GPUs they are for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

ROOT = Path(__file__).parents[2]
CASES = {
    "kda_decode": ("null_slots", "head_dim_128", "unbounded"),
    "kda_prefill": ("null_slot", "empty_sequences"),
    "kda_chunk": ("null_slot", "empty_sequences"),
    "kda_recurrent": ("null_slots",),
    "kda_verify": ("null_slots",),
    "kda_commit": ("null_slots",),
    "kda_gate": ("unbounded_strong",),
    "causal_conv1d": ("null_slot", "empty_sequences"),
    "gated_rms_norm": ("odd",),
}
_COMPILE = """
import sys

from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from k3hal.backends.triton.kernels.kda_decode import _kda_decode
from k3hal.backends.triton.kernels._chunk_operands import chunk_operands
from k3hal.backends.triton.kernels._chunk_scan import chunk_scan
from k3hal.backends.triton.kernels._chunk_sweep import chunk_sweep, join_segments


def shared(kernel, narrow, wide, floats, constants, warps, half=""):
    kinds = {name: "i32" for name in kernel.arg_names} | {"slots": "*i32", "starts": "*i32", "known": "*u8"}
    kinds |= dict.fromkeys(narrow.split(), "*bf16") | dict.fromkeys(wide.split(), "*fp32")
    kinds |= dict.fromkeys(half.split(), "*fp16")
    kinds |= dict.fromkeys(floats.split(), "fp32") | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return compile(source, target=target, options={"num_warps": warps}).metadata.shared


name, arch, warp = sys.argv[1:]
target = GPUTarget(name, int(arch) if arch.isdigit() else arch, int(warp))
decode = {"BOUNDED": True, "WIDTH": 4, "WINDOW": 4, "DIM": 128, "HINT": "evict_first"}
print(shared(
    _kda_decode, "qkv raw_gate beta_logits out_gate conv_state out", "taps rate dt_bias norm state",
    "lower_bound eps", decode, 4,
))
scan = {
    "FUSED": True, "NORM": False, "WIDTH": 4, "WINDOW": 4, "DIM": 128, "CHUNK": 32, "COLUMNS": 32, "WIDE": "split",
    "READ": "rounded", "STAGES": 2 if name == "cuda" else 1,
}
print(shared(
    chunk_scan, "w q n_ m qkv conv_state out_gate", "u keep state norm out", "eps", scan, 4,
))
operands = {"WIDTH": 4, "DIM": 128, "CHUNK": 32, "BASE": 16, "WIDE": "tf32" if name == "cuda" else "split"}
print(shared(
    chunk_operands, "qkv raw_gate beta_logits conv_state", "taps rate dt_bias keep_out size_out", "lower_bound",
    operands, 4, "w_out u_out q_out n_out m_out",
))
sweep = {
    "READ": True, "SPLIT": True, "WIDTH": 4, "WINDOW": 4, "DIM": 128, "CHUNK": 32, "STAGES": scan["STAGES"],
}
print(shared(
    chunk_sweep, "qkv conv_state out_gate out", "keep sizes state begins carry norm", "eps", sweep, 8, "w u q n_ m",
))
exact = "tf32x3" if name == "cuda" else "ieee"
print(shared(join_segments, "", "state carry begins", "", {"DIM": 128, "ROWS": 16, "EXACT": exact}, 4))
"""


def _run(*arguments: str, interpret: bool) -> str:
    env = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-P", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("op", CASES)
def test_the_interpreter_gives_what_the_contract_says(op: str, tmp_path: Path) -> None:
    samples = [word for name in CASES[op] for word in ("--sample", name)]
    where = ["--provider", "triton", "--device", "cpu", "--save", str(tmp_path), "--json"]
    verdicts: list[dict[str, Any]] = json.loads(
        _run("-m", "k3hal.cli", "op", "compare", op, *samples, *where, interpret=True)
    )["results"]
    assert len(verdicts) == 2 * len(CASES[op])
    assert {v["status"] for v in verdicts} == {"Pass"}


@pytest.mark.parametrize(
    ("target", "most_shared"),
    [
        (("cuda", "90", "32"), 227 << 10),
        (("cuda", "100", "32"), 227 << 10),
        (("hip", "gfx942", "64"), 64 << 10),
        (("hip", "gfx950", "64"), 160 << 10),
    ],
)
def test_kernels_compile_into_the_shared_memory_there_is(target: tuple[str, str, str], most_shared: int) -> None:
    sizes = [int(line) for line in _run("-c", _COMPILE, *target, interpret=False).split()]
    assert len(sizes) == 5
    assert max(sizes) <= most_shared


_ONES = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from k3hal.backends.triton.kernels._chunk_operands import chunk_operands
from k3hal.backends.triton.kernels._chunk_products import chunk_products
from k3hal.backends.triton.kernels._chunk_scan import chunk_scan, gated_norm
from k3hal.backends.triton.kernels._chunk_sweep import chunk_sweep, join_segments
from k3hal.backends.triton.kernels.kda_chunk import Tiles
from k3hal.backends.triton.kernels.kda_decode import _kda_decode
from k3hal.backends.triton.kernels.kda_parts import _convolve, _gate, _move, _step
from k3hal.backends.triton.kernels.kda_verify import _commit, _verify

FLOATS = {"lower_bound", "eps"}
SHORT = {"slots": "*i32", "starts": "*i32", "known": "*u8", "accepted": "*i32"}
NARROW = {"qkv", "q", "conv_state", "w_out", "q_out", "n_out", "m_out", "w", "n_", "m", "out_gate", "x", "history"}
HALF = {"w_out", "u_out", "q_out", "n_out", "m_out", "w", "u", "q", "n_", "m"}
ONES = {"count", "tokens", "heads", "places", "total", "channels", "segments", "length", "drafts"}


def made_for(kernel, constants, half=()):
    integers = {name for name in kernel.arg_names if name in ONES or name.endswith(("stride", "step"))}
    constants = constants | dict.fromkeys(integers, 1)
    kinds = {name: "fp32" if name in FLOATS else "*bf16" if name in NARROW else "*fp32" for name in kernel.arg_names}
    kinds |= dict.fromkeys(half, "*fp16") | SHORT | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds[name] for name in kernel.arg_names}
    options = {"num_warps": 8, "enable_fp_fusion": True}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


conv = {"WIDTH": 4, "BLOCK": 32}
tiles = {"FUSED": True, "WIDTH": 4, "DIM": 32, "CHUNK": Tiles().chunk}
scan = {"NORM": True, "WINDOW": 4, "COLUMNS": 32, "WIDE": "split", "READ": "rounded", "STAGES": 2}
sweep = {"WIDTH": 4, "WINDOW": 4, "DIM": 32, "CHUNK": 32, "STAGES": 2}
made = [
    made_for(chunk_products, tiles | {"BOUNDED": True, "PART": 32, "BASE": 16, "NARROW": "half", "WIDE": "split"}),
    made_for(chunk_scan, tiles | scan),
    made_for(chunk_operands, {"WIDTH": 4, "DIM": 32, "CHUNK": 32, "BASE": 16, "WIDE": "tf32"}, HALF),
    made_for(chunk_sweep, sweep | {"READ": True, "SPLIT": True}, HALF),
    made_for(chunk_sweep, sweep | {"READ": False, "SPLIT": True}, HALF),
    made_for(join_segments, {"DIM": 32, "ROWS": 16, "EXACT": "tf32x3"}),
    made_for(gated_norm, {"LIVE_ONLY": True, "DIM": 32, "PADDED": 32, "ROWS": 16}),
    made_for(_kda_decode, {"BOUNDED": True, "WIDTH": 4, "WINDOW": 4, "DIM": 32, "HINT": "evict_first"}),
    made_for(_verify, {"BOUNDED": True, "WIDTH": 4, "DIM": 32}),
    made_for(_commit, {"BOUNDED": True, "WIDTH": 4, "WINDOW": 4, "DIM": 32, "ROWS": 32}),
    made_for(_gate, {"BOUNDED": True, "DIM": 32, "PADDED": 32}),
    made_for(_convolve, conv | {"ROWS": 16}),
    made_for(_move, conv | {"WINDOW": 4}),
    made_for(_step, {"DIM": 32, "ROWS": 32}),
]
print(len(made), "warp_group_dot" in made[0]["ttgir"])
"""


def test_kernels_compile_where_every_count_is_one_and_the_products_hold_no_wgmma() -> None:
    """Triton makes constants of integers that are 1; the interpreter does not. Of wgmma see `kernels/kda_chunk.py`."""
    assert _run("-c", _ONES, interpret=False).split() == ["14", "False"]
