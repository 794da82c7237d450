"""Each transform by itself, around functions that do to padding what the worst vendor does: NaN, or nothing at all."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from k3hal.dispatch.transforms import (
    KeptNullSlot,
    KFirst,
    LseBase,
    NullSlot,
    PaddedHeads,
    PaddedRows,
    gathered_states,
    live_rows,
    multiple_of,
    power_of_two,
    to_base2,
    to_natural,
    transformed,
    write_back,
    zeros_elsewhere,
)
from k3hal.dispatch.transforms.layouts import (
    gate_up_interleaved,
    gate_up_separated,
    taps_by_part,
    taps_first,
    up_first,
)

HEADS = st.integers(1, 130)
RULES = {"16": multiple_of(16), "8": multiple_of(8), "2^n": power_of_two}


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(HEADS, st.sampled_from(sorted(RULES)))
def test_a_rule_gives_the_least_number_that_fits(heads: int, name: str) -> None:
    wanted = RULES[name](heads)
    fits = (lambda n: n & (n - 1) == 0) if name == "2^n" else (lambda n: n % int(name) == 0)
    assert fits(wanted) and wanted >= heads
    assert not any(fits(n) for n in range(heads, wanted))


@pytest.mark.parametrize(("heads", "sixteens", "power"), [(12, 16, 16), (6, 16, 8), (24, 32, 32), (96, 96, 128)])
def test_k3s_heads(heads: int, sixteens: int, power: int) -> None:
    assert (multiple_of(16)(heads), power_of_two(heads)) == (sixteens, power)


@given(HEADS, st.sampled_from(sorted(RULES)), st.booleans())
def test_padded_heads_are_computed_and_cut_off(heads: int, name: str, in_place: bool) -> None:
    """The vendor's padded heads hold NaN, its `out` is one that it writes into, and another result comes beside."""
    q, scale, seen = _random(3, heads, 4), _random(heads), []

    @transformed(PaddedHeads(RULES[name], {"q": 1, "scale": 0}, 1, {"out": 1} if in_place else {}, index=0))
    def vendor(q: Tensor, scale: Tensor, out: Tensor | None = None) -> tuple[Tensor, str]:
        seen.append(q.shape[1])
        result = q * scale.view(1, -1, 1)
        assert not q[:, heads:].any(), "padding is zeros"
        result[:, heads:] = torch.nan
        if out is not None:
            out.copy_(result)
        return result, "beside"

    out = torch.full_like(q, torch.nan) if in_place else None
    result, beside = vendor(q, scale, out=out)
    assert torch.equal(result, q * scale.view(1, -1, 1)) and beside == "beside"
    assert out is None or torch.equal(out, result)
    assert seen == [RULES[name](heads)]


def test_heads_that_fit_are_given_as_they_are() -> None:
    q = _random(2, 16, 4)

    @transformed(PaddedHeads(multiple_of(16), {"q": 1}, 1))
    def vendor(q: Tensor) -> Tensor:
        return q

    assert vendor(q) is q


@given(st.integers(1, 40), st.integers(1, 16))
def test_padded_rows_are_filled_and_cut_off(rows: int, tile: int) -> None:
    x, ids = _random(rows, 3), torch.arange(rows, dtype=torch.int32)

    @transformed(PaddedRows(multiple_of(tile), {"x": 0.0, "ids": -1}, ("out",)))
    def vendor(x: Tensor, ids: Tensor, out: Tensor) -> Tensor:
        assert x.shape[0] % tile == 0 and x.shape[0] == ids.shape[0] == out.shape[0]
        assert bool((ids[rows:] == -1).all()) and not x[rows:].any() and ids.dtype is torch.int32
        out.copy_(x + 1)
        out[rows:] = torch.nan
        return out * 2

    out = torch.full_like(x, torch.nan)
    result = vendor(x, ids, out)
    assert torch.equal(out, x + 1) and torch.equal(result, out * 2)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, int]:
    """Offsets, slots (0 where none, else different ones), whether each has a state, and rows with padding."""
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    slots = draw(st.permutations(range(1, 9)))[: len(lengths)]
    slots = [draw(st.sampled_from([0, slot])) for slot in slots]
    has_state = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    rows = int(bounds[-1]) + draw(st.integers(0, 3))
    return bounds, torch.tensor(slots, dtype=torch.int32), torch.tensor(has_state), rows


@given(batches())
def test_rows_are_live_in_sequences_with_a_slot(batch: tuple[Tensor, Tensor, Tensor, int]) -> None:
    bounds, slots, _, rows = batch
    wanted = [False] * rows
    for n, slot in enumerate(slots.tolist()):
        wanted[int(bounds[n]) : int(bounds[n + 1])] = [slot != 0] * int(bounds[n + 1] - bounds[n])
    live = live_rows(bounds, slots, rows)
    assert live.tolist() == wanted
    garbage = torch.full((rows, 2, 3), torch.nan)
    garbage[live] = 1.0
    assert torch.equal(zeros_elsewhere(live, garbage), live.view(-1, 1, 1).expand(-1, 2, 3).float())


@given(batches())
def test_states_are_gathered_and_go_back_where_they_belong(batch: tuple[Tensor, Tensor, Tensor, int]) -> None:
    bounds, slots, has_state, _ = batch
    pool = _random(9, 2, 3, 4)
    pool[0] = torch.nan
    before = pool.clone()
    states = gathered_states(pool, slots, has_state)
    for n, slot in enumerate(slots.tolist()):
        wanted = before[slot] if slot and has_state[n] else torch.zeros(2, 3, 4)
        assert torch.equal(states[n], wanted)
    new = _random(len(states), 2, 3, 4, seed=1)
    new[(slots == 0) | (bounds[1:] == bounds[:-1])] = torch.nan  # as the vendor leaves it
    write_back(pool, new, slots, bounds)
    for n, slot in enumerate(slots.tolist()):
        if slot:
            assert torch.equal(pool[slot], new[n] if bounds[n + 1] > bounds[n] else before[slot])
    others = [slot for slot in range(1, 9) if slot not in slots.tolist()]
    assert torch.equal(pool[others], before[others]) and bool(pool[0].isnan().all())


def test_states_with_the_key_first() -> None:
    state, pool = _random(2, 3, 4, 5), _random(6, 3, 4, 5, seed=1)
    before = pool.clone()

    @transformed(KFirst(("state",), ("pool",), index=1))
    def vendor(state: Tensor, pool: Tensor) -> tuple[str, Tensor]:
        assert state.shape == (2, 3, 5, 4) and state.is_contiguous() and pool.is_contiguous()
        pool *= torch.arange(5.0).view(1, 1, 5, 1)
        return "out", state + 1

    out, final = vendor(state, pool)
    assert out == "out" and torch.equal(final, state + 1) and final.is_contiguous()
    assert torch.equal(pool, before * torch.arange(5.0))


def test_the_null_slot_gets_the_vendors_number() -> None:
    @transformed(NullSlot("slots"))
    def vendor(slots: Tensor) -> Tensor:
        return slots

    assert vendor(torch.tensor([3, 0, 1, 0], dtype=torch.int32)).tolist() == [3, -1, 1, -1]


def test_a_vendor_without_a_null_slot_leaves_it_as_it_was() -> None:
    pool = _random(4, 2)
    pool[0] = torch.nan
    before = pool.clone()

    @transformed(KeptNullSlot(("pool",)))
    def vendor(pool: Tensor, slots: Tensor) -> Tensor:
        pool[slots.long()] = 7.0
        return slots

    vendor(pool, torch.tensor([0, 2]))
    assert torch.equal(pool.nan_to_num(9), torch.where(torch.arange(4).view(-1, 1) == 2, 7.0, before).nan_to_num(9))


@given(st.lists(st.floats(-80, 80), min_size=1, max_size=8))
def test_logarithms_of_sums_change_their_base(values: list[float]) -> None:
    x = torch.tensor(values)
    natural = x.logsumexp(0)
    base2 = torch.tensor(math.log2(sum(2.0 ** (v * math.log2(math.e)) for v in values)))
    assert torch.allclose(to_base2(natural), base2, rtol=1e-5, atol=1e-4)
    assert torch.allclose(to_natural(base2), natural, rtol=1e-5, atol=1e-4)
    none = torch.tensor(-torch.inf)
    assert to_base2(none) == to_natural(none) == -torch.inf


@pytest.mark.parametrize(("base", "wanted"), [("2", math.log(2.0)), ("e", math.log2(math.e))])
def test_a_result_is_given_in_the_other_base(base: str, wanted: float) -> None:
    def vendor() -> tuple[str, Tensor]:
        return "out", torch.tensor([1.0, -torch.inf])

    out, lse = transformed(LseBase(base))(vendor)()
    assert out == "out" and lse[0] == pytest.approx(wanted) and lse[1] == -torch.inf


def test_transforms_are_undone_in_reverse_and_the_signature_stays() -> None:
    order: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name = name

        def before(self, arguments: Any) -> Any:
            order.append(self.name)
            return {**arguments, "x": arguments["x"] + self.name}, lambda result: result + self.name.upper()

    def vendor(x: str, y: int = 3) -> str:
        return x

    around = transformed(Noted("a"), Noted("b"))(vendor)
    assert around("x") == "xabBA" and order == ["a", "b"]
    assert inspect.signature(around) == inspect.signature(vendor)
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        around("x", z=1)  # type: ignore[call-arg]


@given(st.integers(1, 4), st.integers(1, 5), st.integers(2, 4))
def test_taps_keep_their_channels(dim: int, scale: int, width: int) -> None:
    channels = 3 * dim * scale
    weight = torch.arange(channels * width).view(channels, width)
    by_part = taps_by_part(weight)
    assert by_part.shape == (3, width, channels // 3) and by_part.is_contiguous()
    assert torch.equal(by_part.transpose(1, 2).flatten(0, 1), weight)
    assert torch.equal(taps_first(weight).t(), weight) and taps_first(weight).is_contiguous()


@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 2, 8]))
def test_gate_and_up_change_places_and_come_back(experts: int, blocks: int, block: int) -> None:
    rows = blocks * block
    w13 = torch.arange(experts * 2 * rows * 2).view(experts, 2 * rows, 2)
    assert torch.equal(up_first(up_first(w13)), w13) and torch.equal(up_first(w13)[:, :rows], w13[:, rows:])
    mixed = gate_up_interleaved(w13, block)
    assert torch.equal(gate_up_separated(mixed, block), w13)
    assert torch.equal(mixed[:, :block], w13[:, :block])
    assert torch.equal(mixed[:, block : 2 * block], w13[:, rows : rows + block])
