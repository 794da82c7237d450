"""KDA's Hopper kernels in CUDA C++: who may use them, what they are launched with, and that they compile."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3hal.backends.nvidia import _kda, kda_decode, kda_prefill
from k3hal.backends.nvidia.native import library
from k3hal.dispatch.call import Call, No
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.errors import UnsupportedError
from k3hal.dispatch.ops import _kda as cases
from k3hal.dispatch.ops import kda_decode as decode_operator
from k3hal.dispatch.ops import kda_prefill as prefill_operator
from k3hal.dispatch.registry import default_registry

K3 = {"heads": 12, "head_dim": 128, "conv_width": 4, "bounded": True}
HOPPER = DeviceDescription("other", "nvidia", "sm_90")
PROCESSORS = 132
compiles = pytest.mark.skipif(library._compiler() is None, reason="there is no NVRTC here")


def _reasons(op: str, device: DeviceDescription = HOPPER, **changed: Any) -> str:
    supports = {"kda_decode": _kda.supports, "kda_prefill": kda_prefill._supports}[op]
    answer = supports(Call(op, device, "bfloat16", dims={**K3, **changed}))
    return " ".join(answer.reasons) if isinstance(answer, No) else ""


@pytest.mark.parametrize("op", ["kda_decode", "kda_prefill"])
def test_providers_say_what_they_are_not_made_for(op: str) -> None:
    assert not _reasons(op)
    assert "needs head_dim 128, this is 64" in _reasons(op, head_dim=64)
    assert "needs conv_width 4, this is 3" in _reasons(op, conv_width=3)
    assert "needs sm_90, this is sm_100" in _reasons(op, DeviceDescription("other", "nvidia", "sm_100"))
    assert _reasons(op, bounded=False) == ("" if op == "kda_decode" else "needs a bounded gate")


@pytest.mark.parametrize("op", ["kda_decode", "kda_prefill"])
def test_they_stand_before_the_portable_ones(op: str) -> None:
    ids = [provider.id for provider in default_registry().of(op)]
    assert ids.index("nvidia.hopper") < min(i for i, name in enumerate(ids) if name.startswith("triton."))


class _Launches:
    """Kernels that only note what they are launched with."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, tuple[int, int], ctypes.Structure]] = []
        self.threads: list[int] = []
        self.overlapped: list[bool] = []

    def kernel(self, name: str) -> Any:
        def launch(grid: tuple[int, int], threads: int, arguments: Any, overlapped: bool = False) -> None:
            self.threads.append(threads)
            self.overlapped.append(overlapped)
            self.noted.append((name, grid, arguments))

        return SimpleNamespace(launch=launch)


def _called(op: Any, provider: Callable[..., torch.Tensor], case: cases.KdaCase) -> dict[str, Any]:
    inputs = op._make(torch.Generator().manual_seed(0), case, "bfloat16")
    prepared = {name: inputs[name] for name in ("conv_weight", "A_log", "dt_bias", "norm_weight")}
    inputs |= _kda.laid_out(**prepared)
    inputs["out"] = provider(**inputs)
    return inputs


def _decode_launches(monkeypatch: pytest.MonkeyPatch) -> _Launches:
    launches = _Launches()
    ring, each, wide, halves, quarters = map(launches.kernel, kda_decode.WAYS)
    kernels = kda_decode.Kernels(ring, each, wide, halves, quarters, PROCESSORS)
    monkeypatch.setattr(kda_decode, "_kernels", lambda _: kernels)
    return launches


@pytest.mark.parametrize(
    ("rows", "launched", "grid"),
    [
        (1, "quarters", (48, 1)),
        (2, "quarters", (48, 2)),
        (4, "halves", (24, 4)),
        (8, "wide", (12, 8)),
        (60, "ring", (264, 1)),
        (256, "each", (12, 256)),
    ],
)
def test_the_number_of_heads_decides_how_they_are_taken(
    rows: int, launched: str, grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = _decode_launches(monkeypatch)
    case = cases.KdaCase("rows", (1,) * rows, heads=12, head_dim=128)
    inputs = _called(decode_operator, kda_decode.kda_decode, case)
    ((name, used, arguments),) = launches.noted
    assert (name, used) == (launched, grid)
    assert launches.overlapped == [True]
    assert (arguments.heads, arguments.rows, arguments.bounded) == (12, rows, 1)
    assert arguments.resident == 2 * PROCESSORS
    assert arguments.places == inputs["state"].shape[0]
    assert arguments.state == inputs["state"].data_ptr()
    assert arguments.out == inputs["out"].data_ptr()
    assert arguments.conv_stride == inputs["conv_state"].stride(0)


def test_a_tactic_is_what_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = _decode_launches(monkeypatch)
    case = cases.KdaCase("rows", (1,) * 2, heads=2, head_dim=128)
    for way in kda_decode.WAYS:
        _called(decode_operator, kda_decode._of(way), case)
    assert [(name, grid) for name, grid, _ in launches.noted] == [
        ("ring", (4, 1)), ("each", (2, 2)), ("wide", (2, 2)), ("halves", (4, 2)), ("quarters", (8, 2))
    ]  # fmt: skip


def _prefill_launches(monkeypatch: pytest.MonkeyPatch, case: cases.KdaCase) -> tuple[_Launches, dict[str, Any]]:
    launches = _Launches()
    operands, carry, join, sweep = map(launches.kernel, ("operands", "carry", "join", "sweep"))
    kernels = kda_prefill.Kernels(operands, carry, join, sweep, PROCESSORS)
    monkeypatch.setattr(kda_prefill, "_kernels", lambda *_: kernels)
    return launches, _called(prefill_operator, kda_prefill.kda_prefill, case)


def test_only_long_sequences_are_cut_into_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    short, _ = _prefill_launches(monkeypatch, cases.KdaCase("short", (40, 3), heads=2, head_dim=128))
    assert [(name, grid) for name, grid, _ in short.noted] == [("operands", (2, 3)), ("sweep", (2, 3))]
    assert short.noted[1][2].length == 0
    long, inputs = _prefill_launches(monkeypatch, cases.KdaCase("long", (1000,), heads=12, head_dim=128))
    parts = 1000 // 96 + 1
    expected = [("operands", (12, 32)), ("carry", (12, parts)), ("join", (96, 1)), ("sweep", (12, parts + 1))]
    assert [(name, grid) for name, grid, _ in long.noted] == expected
    assert long.threads == [256, 512, 256, 384]
    assert long.overlapped == [False, True, True, True]
    swept = long.noted[3][2]
    assert (swept.length, swept.segments, swept.tokens, swept.places) == (96, parts, 1000, 32)
    assert swept.state == inputs["state"].data_ptr()


@given(st.integers(1, 40_000), st.integers(1, 20), st.integers(1, 96))
def test_segments_fill_the_device_once(rows: int, count: int, heads: int) -> None:
    length = kda_prefill.segment_length(rows, count, heads, PROCESSORS)
    assert length % 32 == 0
    if length:
        # A sequence ends in a shorter segment of its own.
        assert (-(-rows // length) + count - 1) * heads <= PROCESSORS


def test_a_gate_it_cannot_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="from -10 on, this is -20"):
        _prefill_launches(monkeypatch, cases.KdaCase("wide", (3,), heads=1, head_dim=128, lower_bound=-20.0))


def test_caches_that_are_not_aligned_are_worked_on_as_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(grid: object, threads: object, arguments: Any, overlapped: bool = False) -> None:
        assert arguments.state % 16 == 0
        ctypes.c_float.from_address(arguments.state + arguments.state_stride * 4).value = 7.0

    fake: Any = SimpleNamespace(launch=launch)
    case = cases.KdaCase("one", (1,), heads=1, head_dim=128)
    kernels = kda_decode.Kernels(fake, fake, fake, fake, fake, PROCESSORS)
    monkeypatch.setattr(kda_decode, "_kernels", lambda _: kernels)
    inputs = decode_operator._make(torch.Generator().manual_seed(0), case, "bfloat16")
    slots, size = inputs["state"].shape[0], 128 * 128
    loose = torch.zeros(slots * (size + 1) + 1)[1:].as_strided((slots, 1, 128, 128), (size + 1, size, 128, 1))
    inputs |= {"state": loose, **_kda.laid_out(conv_weight=inputs["conv_weight"], A_log=inputs["A_log"])}
    kda_decode.kda_decode(**inputs)
    assert loose[1, 0, 0, 0] == 7.0
    assert loose.count_nonzero() == 1


def test_arguments_are_laid_out_as_the_compiler_lays_them_out() -> None:
    assert ctypes.sizeof(kda_decode.Arguments) == 12 * 8 + 6 * 8 + 5 * 4 + 2 * 4 + 4
    assert ctypes.sizeof(kda_prefill.OperandArguments) == 12 * 8 + 4 * 8 + 4 * 4
    assert ctypes.sizeof(kda_prefill.JoinArguments) == 6 * 8 + 8 + 2 * 4
    assert ctypes.sizeof(kda_prefill.SweepArguments) == 13 * 8 + 4 * 8 + 6 * 4 + 4 + 4


@pytest.mark.parametrize(
    ("file", "structure"),
    [
        ("kda_decode", kda_decode.Arguments),
        ("kda_operands", kda_prefill.OperandArguments),
        ("kda_sweep", kda_prefill.SweepArguments),
        ("kda_join", kda_prefill.JoinArguments),
    ],
)
def test_arguments_are_those_of_the_kernel_file(file: str, structure: type[ctypes.Structure]) -> None:
    source = library._source(f"{file}.cu").decode()
    body = source.partition("struct Arguments {")[2].partition("};")[0]
    names = re.findall(r"\*?\s*(\w+)\s*(?=[,;])", body)
    assert names == [name for name, *_ in structure._fields_]


@compiles
@pytest.mark.parametrize(
    ("file", "kernels"),
    [("kda_decode", 5), ("kda_operands", 1), ("kda_sweep", 2), ("kda_join", 1)],
)
def test_kernels_compile_and_keep_their_registers(
    file: str, kernels: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("what a kernel uses is read by a tool that comes with triton")
    from .triton_compile import _resources

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stacks = [int(n) for n in re.findall(r"STACK:(\d+)", _resources(library.compiled(file)))]
    assert len(stacks) == kernels
    # An address or two may lie there; a tile would be hundreds of bytes.
    assert max(stacks) <= 16
