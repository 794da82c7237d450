"""Hopper kernels in CUDA C++: who may use them, and that they compile where there is NVRTC."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import pytest

from k3hal.backends.nvidia import mla_decode
from k3hal.backends.nvidia.native import library
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
        ({"heads": 24}, "at most 16 heads, this has 24"),
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


def test_arguments_are_laid_out_as_the_compiler_lays_them_out() -> None:
    # Seven pointers, four long longs, seven ints and a float, without holes.
    assert ctypes.sizeof(mla_decode.Arguments) == 7 * 8 + 4 * 8 + 7 * 4 + 4
    assert ctypes.sizeof(library._Launch) == 56
    assert ctypes.sizeof(library._Attribute) == 72


@compiles
@pytest.mark.parametrize("fp8", [0, 1])
def test_decoding_compiles_without_spills(fp8: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("what a kernel uses is read by a tool that comes with triton")
    from .triton_compile import _resources

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = library.compiled("mla_decode", [f"FP8={fp8}"])
    lines = [line for line in _resources(code).splitlines() if "REG:" in line]
    assert len(lines) == 2
    assert all("STACK:0" in line for line in lines)
    assert library.compiled("mla_decode", [f"FP8={fp8}"]) == code
    assert len(list((tmp_path / "k3hal" / "nvidia").iterdir())) == 1


@compiles
def test_what_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_SOURCES", tmp_path)
    (tmp_path / "broken.cu").write_text("__device__ int f() { return nothing; }")
    with pytest.raises(UnsupportedError, match=r"broken.cu: .*nothing.*undefined"):
        library.compiled("broken")
    assert not list((tmp_path / "k3hal").rglob("*.cubin"))
