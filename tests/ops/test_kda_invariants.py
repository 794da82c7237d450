"""KDA over sequences: splits, decoding, batches, slots and padding never change what a sequence computes."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.dispatch.sampling_inputs import poison

from .kda_layer import CHANNELS, DIM, HEADS, KINDS, PROJECTIONS, Layer, relative_error, rows, tokens

TOLERANCE = 1e-5
BOUNDS = st.sampled_from([-5.0, None])
GATES = st.sampled_from([0.0, -10.0, 10.0])


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 130), cuts=st.sets(st.integers(1, 129), max_size=4), bound=BOUNDS, gate=GATES)
def test_a_split_anywhere_changes_nothing(count: int, cuts: set[int], bound: float | None, gate: float) -> None:
    sequence = tokens(count, gate=gate)
    whole = Layer.make(lower_bound=bound)
    (golden,) = whole.prefill([sequence], [3], [False])
    parts, layer, edges = [], Layer.make(lower_bound=bound), [0, *sorted(c for c in cuts if c < count), count]
    for start, stop in pairwise(edges):
        parts += layer.prefill([rows(sequence, start, stop)], [2], [start > 0])
    assert relative_error(torch.cat(parts), golden) < TOLERANCE
    assert relative_error(layer.state[2], whole.state[3]) < TOLERANCE
    assert torch.equal(layer.conv_state[2], whole.conv_state[3])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bound", [-5.0, None])
def test_decoding_equals_prefill(kind: str, bound: float | None) -> None:
    sequence = tokens(9)
    whole, layer = Layer.make(kind=kind, lower_bound=bound), Layer.make(kind=kind, lower_bound=bound)
    (golden,) = whole.prefill([sequence], [1], [False])
    parts = layer.prefill([rows(sequence, 0, 2)], [4], [False])
    parts += [layer.decode(rows(sequence, t, t + 1), [4]) for t in range(2, 9)]
    assert relative_error(torch.cat(parts), golden) < TOLERANCE
    assert relative_error(layer.state[4], whole.state[1]) < TOLERANCE
    assert torch.equal(layer.conv_state[4], whole.conv_state[1])


@cache
def _sequence(seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A sequence and its outputs when it runs alone in one call."""
    sequence = tokens(100, seed=seed)
    return sequence, Layer.make().prefill([sequence], [1], [False])[0]


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_schedule_equals_each_sequence_alone(data: st.DataObject) -> None:
    """Sequences start in reused slots, advance in mixed batches, and must not see each other or a slot's past."""
    layer = Layer.make(count=5)
    active: dict[int, tuple[int, int]] = {}
    for step in range(data.draw(st.integers(2, 5))):
        slots = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4, unique=True))
        fresh = {slot for slot in slots if slot not in active or data.draw(st.booleans())}
        active |= {slot: (10 * step + slot, 0) for slot in fresh}
        decode = all(active[slot][1] for slot in slots) and data.draw(st.booleans())
        lengths = [1 if decode else data.draw(st.integers(0, 20)) for _ in slots]
        spans = [(*active[slot], length) for slot, length in zip(slots, lengths, strict=True)]
        chunks = [rows(_sequence(seed)[0], done, done + length) for seed, done, length in spans]
        if decode:
            batch = {name: torch.cat([c[name] for c in chunks]) for name in PROJECTIONS}
            outs = list(layer.decode(batch, slots).split(1))
        else:
            outs = layer.prefill(chunks, slots, [active[slot][1] > 0 for slot in slots])
        for slot, (seed, done, length), out in zip(slots, spans, outs, strict=True):
            if length:
                assert relative_error(out, _sequence(seed)[1][done : done + length]) < TOLERANCE
            active[slot] = seed, done + length


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_null_rows_of_a_prefill(kind: str) -> None:
    first, null, last = tokens(5, seed=1), tokens(4, seed=2), tokens(3, seed=3)
    for x in null.values():
        poison(x)
    alone, layer = Layer.make(kind=kind), Layer.make(kind=kind)
    golden = alone.prefill([first, last], [1, 2], [False, False])
    outs = layer.prefill([first, null, last], [1, 0, 2], [False, True, False])
    assert torch.equal(outs[1], torch.zeros(4, HEADS * DIM))
    for out, expected in zip((outs[0], outs[2]), golden, strict=True):
        assert relative_error(out, expected) < TOLERANCE
    for held, expected in zip(layer.caches.values(), alone.caches.values(), strict=True):
        assert held[[0, 3, 4, 5]].isnan().all()
        assert relative_error(held[[1, 2]], expected[[1, 2]]) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_null_rows_of_a_decode(kind: str) -> None:
    layer = Layer.make(kind=kind)
    layer.prefill([tokens(6)], [3], [False])
    alone = Layer.make(kind=kind)
    alone.prefill([tokens(6)], [3], [False])
    batch = tokens(3, seed=5)
    for x in batch.values():
        x[[0, 2]] = torch.nan
    out = layer.decode(batch, [0, 3, 0])
    assert torch.equal(out[[0, 2]], torch.zeros(2, HEADS * DIM))
    assert relative_error(out[1:2], alone.decode(rows(batch, 1, 2), [3])) < TOLERANCE
    assert layer.state[[0, 1, 2, 4, 5]].isnan().all() and layer.conv_state[[0, 1, 2, 4, 5]].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [(1, 2, 3, 4), (4, 2, 1, 5)])
def test_a_decode_batch_in_any_order(kind: str, slots: tuple[int, ...]) -> None:
    outs = []
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        layer = Layer.make(kind=kind)
        for n, slot in enumerate(slots):
            layer.prefill([tokens(n + 2, seed=n)], [slot], [False])
        batch = {name: x[list(order)] for name, x in tokens(4, seed=9).items()}
        outs.append((layer.decode(batch, [slots[i] for i in order])[[order.index(i) for i in range(4)]], layer.state))
    assert relative_error(outs[1][0], outs[0][0]) < 1e-6
    assert relative_error(outs[1][1][1:].nan_to_num(), outs[0][1][1:].nan_to_num()) < 1e-6


def test_empty_batches() -> None:
    layer = Layer.make()
    assert layer.decode(tokens(0), []).shape == (0, HEADS * DIM)
    assert layer.prefill([tokens(0)], [1], [False])[0].shape == (0, HEADS * DIM)
    assert layer.state.isnan().all() and layer.conv_state.isnan().all()
    assert layer.conv_state.shape[-1] == CHANNELS
