"""Routing and routed experts: invariants on every format, the reference against the CPU provider in fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.backends.cpu import _expert_sum
from k3hal.dispatch.call import Call
from k3hal.dispatch.ops import latent_moe as latent_op
from k3hal.dispatch.ops._experts import Routing, activation_arguments, routed_inputs
from k3hal.dispatch.ops.latent_moe import EXPERT_WEIGHTS
from k3hal.dispatch.ops.moe_experts_int4 import int4_dequantize
from k3hal.dispatch.ops.moe_route import moe_route
from k3hal.dispatch.ops.mx_dequantize import mx_dequantize
from k3hal.dispatch.ops.situ_and_mul import situ_and_mul
from k3hal.dispatch.probe import probe
from k3hal.dispatch.provider import Provider
from k3hal.dispatch.registry import default_registry, get_operator

Fn = Callable[..., Any]
ROUTING = Routing("test", 1, 12, 3, 64, 32, "float32", ())
OPS = {"bf16": "moe_experts", "mxfp4": "moe_experts_mxfp4", "int4": "moe_experts_int4"}


def _cpu(op: str) -> list[Provider]:
    """The CPU providers this machine can run."""
    call = Call(op, probe("cpu"), "float32", "any", {})
    return [p for p in default_registry().of(op) if p.backend == "cpu" and p.answer(call)]


CPU = [(fmt, provider.name) for fmt in ("bf16", "mxfp4") for provider in _cpu(OPS[fmt])]
EXPERTS = pytest.mark.parametrize(("fmt", "name"), [*((f, "reference") for f in OPS), *CPU], ids=lambda v: str(v))


def _function(fmt: str, name: str) -> Fn:
    """The reference or a provider, laying its weights out anew at each call."""
    operator = get_operator(OPS[fmt])
    if name == "reference":
        return operator.reference
    provider = next(p for p in _cpu(OPS[fmt]) if p.name == name)
    prepare = provider.prepare
    if prepare is None:
        return provider.fn
    return lambda **given: provider.fn(**given | prepare(**{w: given[w] for w in operator.weights}))


def _inputs(fmt: str, seed: int = 0, **changes: Any) -> dict[str, Any]:
    g, routing = torch.Generator().manual_seed(seed), replace(ROUTING, **changes)
    return routed_inputs(g, routing) | EXPERT_WEIGHTS[fmt](g, routing) | activation_arguments(routing)


def _close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@EXPERTS
def test_a_row_does_not_depend_on_its_batch(fmt: str, name: str) -> None:
    fn, batch = _function(fmt, name), _inputs(fmt, tokens=40)
    together = fn(**batch)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    moved = {name: batch[name][order] for name in ("x", "ids", "weights")}
    _close(fn(**(batch | moved)), together[order])
    for size in (1, 2, 7):
        part = {name: batch[name][:size] for name in ("x", "ids", "weights")}
        _close(fn(**(batch | part)), together[:size])


@EXPERTS
def test_the_order_of_choices_does_not_matter(fmt: str, name: str) -> None:
    fn, batch = _function(fmt, name), _inputs(fmt, tokens=5)
    turned = {name: batch[name].flip(1) for name in ("ids", "weights")}
    _close(fn(**(batch | turned)), fn(**batch))


@EXPERTS
def test_negative_ids_add_up_as_shards_do(fmt: str, name: str) -> None:
    """Expert parallelism: masks that split the choices sum to the whole."""
    fn, batch = _function(fmt, name), _inputs(fmt, tokens=9)
    lower = batch["ids"].masked_fill(batch["ids"] >= 6, -1)
    upper = batch["ids"].masked_fill(batch["ids"] < 6, -3)
    _close(fn(**(batch | {"ids": lower})) + fn(**(batch | {"ids": upper})), fn(**batch))


@EXPERTS
@pytest.mark.parametrize("tokens", [1, 6])
def test_padding_rows_are_zero_and_never_read(fmt: str, name: str, tokens: int) -> None:
    fn, batch = _function(fmt, name), _inputs(fmt, tokens=tokens)
    batch["ids"][-1], batch["x"][-1], batch["weights"][-1] = -1, torch.nan, torch.nan
    out = fn(**batch)
    assert out.isfinite().all()
    assert not out[-1].any()


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 40),
    experts=st.integers(1, 20),
    top_k=st.integers(1, 6),
    kind=st.sampled_from(["spread", "one", "negative"]),
    activation=st.sampled_from(["situ", "silu"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    case=st.sampled_from(CPU),
    seed=st.integers(0, 99),
)
def test_cpu_experts_equal_the_reference(
    case: tuple[str, str], seed: int, experts: int, top_k: int, **changes: Any
) -> None:
    fmt, name = case
    batch = _inputs(fmt, seed, experts=experts, top_k=min(top_k, experts), **changes)
    expected, actual = _function(fmt, "reference")(**batch), _function(fmt, name)(**batch)
    assert actual.dtype == expected.dtype
    # Both are fp32 inside: in bf16 they may differ by one unit in the last place where a value is near a half.
    rounding = 1e-5 if changes["dtype"] == "float32" else 2**-7
    torch.testing.assert_close(actual, expected, rtol=rounding, atol=1e-5)


def test_many_tokens_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = _inputs("bf16", tokens=37)
    whole = _function("bf16", "sorted")(**batch)
    monkeypatch.setattr(_expert_sum, "MAX_ELEMENTS", 5 * 3 * 4 * 64)
    _close(_function("bf16", "sorted")(**batch), whole)


@pytest.mark.parametrize("name", [name for fmt, name in CPU if fmt == "bf16"])
def test_an_odd_intermediate_size_runs(name: str) -> None:
    batch = _inputs("bf16", tokens=4, inner=9, hidden=17)
    _close(_function("bf16", name)(**batch), _function("bf16", "reference")(**batch))
    one = batch | {part: batch[part][:1] for part in ("x", "ids", "weights")}
    _close(_function("bf16", name)(**one), _function("bf16", "reference")(**one))


def test_quantised_formats_are_their_dequantised_experts() -> None:
    for fmt, expand in (("mxfp4", lambda w, s: mx_dequantize(w, s, torch.float32)), ("int4", int4_dequantize)):
        batch = _inputs(fmt, tokens=6)
        dense = {name: expand(batch[name], batch[f"{name}_scale"]) for name in ("w13", "w2")}
        plain = {name: v for name, v in batch.items() if not name.endswith("_scale")} | dense
        _close(_function(fmt, "reference")(**batch), _function("bf16", "reference")(**plain))


def test_int4_values() -> None:
    packed = torch.tensor([[0x80, 0x1F] * 8], dtype=torch.uint8)
    expected = torch.tensor([[-8.0, 0.0, 7.0, -7.0] * 8]) * 0.5
    assert torch.equal(int4_dequantize(packed, torch.tensor([[0.5]])), expected)


def test_one_token_by_hand() -> None:
    """y = weight * w2 silu(g) u with everything one-dimensional."""
    batch = {
        "x": torch.tensor([[1.5]]),
        "ids": torch.tensor([[0]]).int(),
        "weights": torch.tensor([[0.25]]),
        "w13": torch.tensor([[[2.0], [3.0]]]),
        "w2": torch.tensor([[[5.0]]]),
    }
    expected = 0.25 * 5.0 * (3.0 / (1 + torch.exp(torch.tensor(-3.0)))) * 4.5
    for name in ("reference", *(name for fmt, name in CPU if fmt == "bf16")):
        out = _function("bf16", name)(**batch, activation="silu", beta=4.0, linear_beta=25.0)
        torch.testing.assert_close(out[0, 0], expected)


def test_situ_caps_both_halves() -> None:
    x = torch.tensor([[1e4, -1e4, 0.0, 1.0, 1e4, 1e4, 7.0, 0.5]])
    out = situ_and_mul(x, 4.0, 25.0)[0]
    assert out[:3].tolist() == [100.0, 0.0, 0.0]
    expected = (
        4 * torch.tanh(torch.tensor(0.25)) * torch.sigmoid(torch.tensor(1.0)) * 25 * torch.tanh(torch.tensor(0.02))
    )
    torch.testing.assert_close(out[3], expected)


ROUTES = {"reference": moe_route} | {provider.name: provider.fn for provider in _cpu("moe_route")}
ROUTE = pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())


@ROUTE
def test_ties_go_to_the_lowest_id(route: Fn) -> None:
    weights, ids = route(torch.zeros(2, 9), torch.zeros(9), 4, True, 2.0)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    torch.testing.assert_close(weights, torch.full((2, 4), 0.5))


@ROUTE
def test_bias_chooses_but_does_not_weigh(route: Fn) -> None:
    logits, bias = torch.tensor([[0.0, 2.0, -1.0, 1.0]]), torch.tensor([0.9, 0.0, 0.5, 0.0])
    weights, ids = route(logits, bias, 2, False, 1.5)
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.sigmoid(torch.tensor([[0.0, 2.0]])) * 1.5)


@ROUTE
@settings(max_examples=30, deadline=None)
@given(levels=st.integers(1, 30), experts=st.integers(1, 40), seed=st.integers(0, 999), top=st.integers(1, 40))
def test_choice_is_the_stable_order(route: Fn, levels: int, experts: int, seed: int, top: int) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, levels, (5, experts), generator=g).float() / 4
    bias = torch.randint(0, 2, (experts,), generator=g).float() / 8
    top = min(top, experts)
    weights, ids = route(logits, bias, top, True, 1.0)
    biased = (torch.sigmoid(logits) + bias).tolist()
    for row, chosen in zip(biased, ids.tolist(), strict=True):
        assert chosen == sorted(range(experts), key=lambda e: (-row[e], e))[:top]
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(5))


def test_latent_moe_composed_of_references_equals_its_reference() -> None:
    """With no more parts than the operator says a call of these dims needs."""
    operator = latent_op.OPERATOR
    assert operator.lowering is not None
    formats = set()
    for sample in operator.samples():
        if "device" in sample.tags:
            continue
        formats.add(sample.dims["expert_format"])
        composed = operator.lowering({name: get_operator(name).reference for name in operator.parts_of(sample.dims)})
        arguments = sample.make(torch.Generator().manual_seed(3))
        rounding = 1e-5 if sample.dtype == "float32" else 2e-2
        torch.testing.assert_close(composed(**arguments), operator.reference(**arguments), rtol=rounding, atol=rounding)
    assert formats == set(OPS)
