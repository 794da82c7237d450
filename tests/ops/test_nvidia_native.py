"""Hopper kernels in CUDA C++: who may use them, and that they compile where there is NVRTC."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from k3hal.backends.nvidia import attn_res_mix, mla_decode
from k3hal.backends.nvidia.native import library, tensor_map
from k3hal.dispatch.call import Call, No
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.errors import UnsupportedError
from k3hal.dispatch.provider import ATTRIBUTE

K3 = {"heads": 12, "kv_lora": 512, "rope_dim": 64, "page_tokens": 128, "kv_dtype": "bfloat16"}
compiles = pytest.mark.skipif(library._compiler() is None, reason="there is no NVRTC here")


def _reasons(answer: object) -> str:
    return " ".join(answer.reasons) if isinstance(answer, No) else ""


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"heads": 97}, "at most 96 heads, this has 97"),
        ({"heads": 24, "kv_dtype": "float8_e4m3fn"}, "at most 16 heads, this has 24"),
        ({"kv_lora": 256}, "kv_lora 512"),
        ({"page_tokens": 48}, "multiple of 64 tokens, this has 48"),
        ({"kv_dtype": "float32"}, "this is float32"),
    ],
)
def test_decoding_says_what_it_is_not_made_for(changed: dict[str, int | str], reason: str) -> None:
    device = DeviceDescription("other", "nvidia", "sm_100")
    found = _reasons(mla_decode._supports(Call("mla_decode", device, "bfloat16", dims={**K3, **changed})))
    assert reason in found
    assert "needs sm_90, this is sm_100" in found
    assert reason not in _reasons(mla_decode._supports(Call("mla_decode", device, "bfloat16", dims=K3)))
    assert hasattr(mla_decode.mla_decode, ATTRIBUTE)


def test_residuals_say_what_they_are_not_made_for() -> None:
    device = DeviceDescription("other", "nvidia", "sm_90")
    narrow = Call("attn_res_mix", device, "bfloat16", dims={"dim": 2304, "block_size": 12})
    assert _reasons(attn_res_mix._supports(narrow)) == "needs dim 7168, this is 2304"
    assert attn_res_mix._supports(Call("attn_res_mix", device, "bfloat16", dims={"dim": 7168, "block_size": 12}))


def test_arguments_are_laid_out_as_the_compiler_lays_them_out() -> None:
    # Pointers and long longs, then ints and floats, without holes.
    assert mla_decode.ARGUMENTS.size == (7 + 4) * 8 + (8 + 1 + 2) * 4 + 60
    assert (tensor_map.MAP_BYTES + mla_decode.ARGUMENTS.size) % 64 == 0  # As a map is aligned.
    assert attn_res_mix.ARGUMENTS.size == (6 + 4) * 8 + (6 + 2) * 4
    # Of the driver's header: CUlaunchConfig and CUlaunchAttribute.
    assert library._LAUNCH.size == 56
    assert library._ATTRIBUTE.size == 72


def test_what_a_kernel_file_includes_is_put_in_its_place() -> None:
    source = library._source("mla_decode.cu")
    assert b"#include" not in source
    assert b"struct Arguments" in source
    headers = [header.read_bytes() for header in library._SOURCES.glob("mla_*.h")]
    assert len(headers) == 4
    assert all(header in source for header in headers)


@pytest.mark.parametrize(
    ("heads", "blocks"),
    [(1, (1, 1)), (16, (1, 16)), (17, (1, 24)), (48, (1, 48)), (49, (2, 32)), (64, (2, 32)), (96, (2, 48))],
)
def test_many_heads_are_shared_by_programs(heads: int, blocks: tuple[int, int]) -> None:
    assert mla_decode._blocks(heads) == blocks


KERNELS = [
    *(("mla_decode", [f"FP8={fp8}", f"ONCE={once}"], 0, 3) for fp8 in (0, 1) for once in (0, 1)),
    *(("mla_many", [f"HEADS={heads}"], 0, 1) for heads in mla_decode.BLOCKS),
    ("attn_res_mix", ["DIM=7168", "WORKERS=224", "MOST=8"], 0, 2),
    # As measured: the bytes of stack a thread has where more blocks are held than K3 has.
    ("attn_res_mix", ["DIM=7168", "WORKERS=896", "MOST=15"], 300, 2),
]


@compiles
@pytest.mark.parametrize(("name", "macros", "stack", "count"), KERNELS)
def test_kernels_compile_without_spills(
    name: str, macros: list[str], stack: int, count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("what a kernel uses is read by a tool that comes with triton")
    from .triton_compile import _resources

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = library.compiled(name, macros)
    used = [int(bytes_of) for bytes_of in re.findall(r"STACK:(\d+)", _resources(code))]
    assert len(used) == count
    assert max(used) <= stack
    assert library.compiled(name, macros) == code
    assert len(list((tmp_path / "k3hal" / "nvidia").iterdir())) == 1


class _Two(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_float))


@pytest.mark.parametrize("arguments", [struct.pack("@if", 7, 0.5), _Two(7, 0.5)])
def test_launches_take_packed_bytes_and_structures(
    arguments: bytes | ctypes.Structure, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def launched(how: bytes, handle: object, parameters: Any, extra: None) -> int:
        address = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0]
        assert address
        seen.extend([library._LAUNCH.unpack(how), ctypes.string_at(address, 8)])
        return 0

    monkeypatch.setattr(library, "_driver", lambda: SimpleNamespace(cuLaunchKernelEx=launched))
    monkeypatch.setattr(library.torch._C, "_cuda_getCurrentRawStream", lambda index: 40 + index, raising=False)
    library.Kernel("f", ctypes.c_void_p(1), 96, 2).launch((3, 4), 64, arguments, overlapped=True)
    how, given = seen
    assert how == (3, 4, 1, 64, 1, 1, 96, 42, library._OVERLAPPED_AT, 1)
    assert given == struct.pack("@if", 7, 0.5)


@compiles
def test_what_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_SOURCES", tmp_path)
    (tmp_path / "broken.cu").write_text("__device__ int f() { return nothing; }")
    with pytest.raises(UnsupportedError, match=r"broken.cu: .*nothing.*undefined"):
        library.compiled("broken")
    assert not list((tmp_path / "k3hal").rglob("*.cubin"))
