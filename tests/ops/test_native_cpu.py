"""Our own CPU kernels: rows alone, in batches and over threads give equal bits; odd shapes and extreme values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3hal.dispatch import Call, No
from k3hal.dispatch.ops import kda_decode as kda_decode_op
from k3hal.dispatch.ops._kda import KdaCase
from k3hal.dispatch.ops._paged import MlaShape
from k3hal.dispatch.ops.kda_decode import kda_decode
from k3hal.dispatch.ops.mla_decode import inputs as mla_inputs
from k3hal.dispatch.ops.mla_decode import mla_decode
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import default_registry, get_operator
from k3hal.dispatch.sampling_inputs import DTYPES

from .kda_layer import relative_error

CPU = probe("cpu")
BATCH = 17
# Every argument whose rows are the batch, by operator; the axis of the rows.
ROWS = {
    "rms_norm": {"x": 0, "residual": 0},
    "attn_res_mix": {"prefix": 0, "delta": 0, "blocks": 1},
    "sigmoid_gate": {"x": 0, "gate": 0},
    "silu_and_mul": {"x": 0},
    "situ_and_mul": {"x": 0},
    "mla_decode": {"q": 0, "page_table": 0, "seq_lens": 0},
    "kda_decode": {"qkv": 0, "raw_gate": 0, "beta_logits": 0, "out_gate": 0, "slots": 0},
}


def _native(op: str) -> Callable[..., Any]:
    """The kernel's provider, taking weights as the contract lays them out; skips where it does not run."""
    provider = next(p for p in default_registry().of(op) if p.id == "cpu.native")
    answer = provider.answer(Call(op, CPU, "float32"))
    if isinstance(answer, No):
        pytest.skip("; ".join(answer.reasons))

    def run(**args: Any) -> Any:
        prepared = provider.prepare(**{w: args[w] for w in get_operator(op).weights}) if provider.prepare else {}
        return provider.fn(**{**args, **prepared})

    return run


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _kda(case: KdaCase, dtype: str) -> dict[str, Any]:
    return kda_decode_op._make(torch.Generator().manual_seed(0), case, dtype)


def _batch(op: str, dtype: str) -> dict[str, Any]:
    """Arguments of 17 rows, large enough for two threads."""
    gen = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen).to(DTYPES[dtype])

    weight = 1 + randn(2049)
    match op:
        case "rms_norm":
            return {"x": randn(BATCH, 2049), "weight": weight, "eps": 1e-5, "residual": randn(BATCH, 2049)}
        case "attn_res_mix":
            return {
                "prefix": randn(BATCH, 2049), "delta": randn(BATCH, 2049), "blocks": randn(4, BATCH, 2049),
                "num_blocks": 3, "reset": False, "store": True, "key_weight": torch.randn(2049, generator=gen) * 0.02,
                "out_weight": weight, "eps": 1e-5, "out_eps": 1e-5,
            }  # fmt: skip
        case "sigmoid_gate":
            return {"x": randn(BATCH, 2049), "gate": randn(BATCH, 2049)}
        case "silu_and_mul":
            return {"x": randn(BATCH, 4098)}
        case "situ_and_mul":
            return {"x": randn(BATCH, 4098), "beta": 4.0, "linear_beta": 25.0}
        case "mla_decode":
            shape = MlaShape(heads=5, kv_dtype=dtype)
            return mla_inputs(gen, shape, dtype, [1 + 37 * n for n in range(BATCH)], strided=True)
    return _kda(KdaCase("batch", (1,) * BATCH, heads=3, head_dim=64, strided=True), dtype)


def _results(op: str, args: dict[str, Any]) -> list[Tensor]:
    returned = _native(op)(**args)
    return [returned, *(args[name] for name in get_operator(op).mutates if args[name] is not None)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ROWS)
def test_a_row_does_not_depend_on_its_batch(op: str, dtype: str) -> None:
    args = _batch(op, dtype)
    alone = copy.deepcopy(args)
    together = _results(op, args)[0]
    for n in (0, 7, BATCH - 1):
        one = copy.deepcopy(alone) | {name: alone[name].narrow(axis, n, 1) for name, axis in ROWS[op].items()}
        assert torch.equal(_native(op)(**one)[0], together[n])


@pytest.mark.parametrize("op", ROWS)
def test_threads_change_nothing(op: str) -> None:
    args = _batch(op, "float32")
    with _threads(1):
        expected = _results(op, copy.deepcopy(args))
    with _threads(2):
        actual = _results(op, args)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@settings(max_examples=30, deadline=None)
@given(
    heads=st.integers(1, 5),
    dim=st.sampled_from([16, 48, 80, 128]),
    width=st.integers(2, 8),
    slots=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(lambda s: len({*s} - {0}) == sum(map(bool, s))),
    bound=st.sampled_from([-5.0, None]),
    seed=st.integers(0, 99),
)
def test_kda_shapes(heads: int, dim: int, width: int, slots: list[int], bound: float | None, seed: int) -> None:
    case = KdaCase("shapes", (1,) * len(slots), heads, dim, tuple(slots), lower_bound=bound, strided=True)
    args, gen, channels = _kda(case, "float32"), torch.Generator().manual_seed(seed), 3 * heads * dim
    args["conv_weight"] = torch.randn(channels, width, generator=gen)
    args["conv_state"] = torch.randn(args["state"].shape[0], width - 1, channels, generator=gen)
    expected = copy.deepcopy(args)
    golden = kda_decode(**expected)
    torch.testing.assert_close(_native("kda_decode")(**args), golden, rtol=1e-4, atol=1e-5)
    assert torch.equal(args["conv_state"], expected["conv_state"])
    for slot in {*slots} - {0}:
        assert relative_error(args["state"][slot], expected["state"][slot]) < 1e-5
    assert args["state"][0].isnan().all()


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("gate", [-200.0, -30.0, -1.0, 0.0, 1.0, 30.0, 200.0])
def test_kda_extreme_gates(gate: float, bound: float | None) -> None:
    args = _kda(KdaCase("gates", (1, 1), lower_bound=bound), "float32")
    for name in ("raw_gate", "out_gate", "beta_logits"):
        args[name].fill_(gate)
    expected = copy.deepcopy(args)
    golden, actual = kda_decode(**expected), _native("kda_decode")(**args)
    torch.testing.assert_close(actual, golden, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(args["state"][1:3], expected["state"][1:3], rtol=1e-4, atol=1e-6)


def test_mla_reads_every_fp8_code() -> None:
    """One cached row has all the weight, so the output is that row."""
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn)
    out = _native("mla_decode")(
        q=torch.zeros(1, 1, 254), kv_cache=codes.view(1, 1, 254), page_table=torch.zeros(1, 1, dtype=torch.int32),
        seq_lens=torch.ones(1, dtype=torch.int32), scale=1.0, kv_lora=254,
    )  # fmt: skip
    assert torch.equal(out[0, 0], codes.float())


@pytest.mark.parametrize("magnitude", [1.0, 1e4])
def test_mla_parts_of_a_sequence_merge(magnitude: float) -> None:
    """Lengths around one part, and so long that parts grow; with sharp scores too."""
    shape = MlaShape(heads=6, kv_lora=40, rope=8, page_tokens=16)
    args = mla_inputs(torch.Generator().manual_seed(0), shape, "float32", [127, 128, 129, 0, 9001, 8192])
    args["q"] *= magnitude
    torch.testing.assert_close(_native("mla_decode")(**args), mla_decode(**args), rtol=1e-4, atol=1e-4)
