"""Verification leaves the states alone; committing a prefix is decoding that prefix."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from k3hal.dispatch.sampling_inputs import int32, poison

from .kda_layer import HEADS, PROJECTIONS, Layer, bound, relative_error, rows, tokens

TOLERANCE = 1e-5


def _filled(lower_bound: float | None) -> Layer:
    """A layer whose slots 1..4 hold prompts of one to four tokens."""
    layer = Layer.make(lower_bound=lower_bound)
    layer.prefill([tokens(n, seed=n) for n in range(1, 5)], [1, 2, 3, 4], [False] * 4)
    return layer


def _verify(layer: Layer, drafts: dict[str, Tensor], slots: Sequence[int], width: int) -> tuple[Tensor, ...]:
    return bound("kda_verify", "cpu")(
        **drafts, **layer.weights, **layer.caches, slots=int32(slots), width=width,
        lower_bound=layer.lower_bound, eps=1e-5,
    )  # fmt: skip


def _commit(layer: Layer, records: Sequence[Tensor], accepted: Sequence[int], slots: Sequence[int]) -> None:
    u, k, gate, conv_in = records
    weights = {name: layer.weights[name] for name in ("A_log", "dt_bias")}
    bound("kda_commit", "cpu")(
        u=u, k=k, raw_gate=gate, conv_in=conv_in, accepted=int32(accepted), **weights, **layer.caches,
        slots=int32(slots), lower_bound=layer.lower_bound,
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    width=st.integers(1, 8),
    slots=st.lists(st.integers(1, 4), min_size=1, max_size=4, unique=True),
    lower_bound=st.sampled_from([-5.0, None]),
    data=st.data(),
)
def test_commit_equals_decoding_the_accepted(
    width: int, slots: list[int], lower_bound: float | None, data: st.DataObject
) -> None:
    accepted = data.draw(st.lists(st.integers(0, width), min_size=len(slots), max_size=len(slots)))
    drafts = tokens(width * len(slots), seed=7)
    layer, decoded = _filled(lower_bound), _filled(lower_bound)
    before = {name: cache.clone() for name, cache in layer.caches.items()}
    out, *records = _verify(layer, drafts, slots, width)
    for name, cache in layer.caches.items():
        assert torch.equal(cache[1:5], before[name][1:5]), f"kda_verify changed {name}"
    for n, count in enumerate(accepted):
        for x in records:
            poison(x[n, count:].contiguous())
            x[n, count:] = torch.nan
    _commit(layer, records, accepted, slots)
    for n, (slot, count) in enumerate(zip(slots, accepted, strict=True)):
        for t in range(n * width, n * width + count):
            expected = decoded.decode(rows(tokens(width * len(slots), seed=7), t, t + 1), [slot])
            assert relative_error(out[t : t + 1], expected) < TOLERANCE
    assert torch.equal(layer.conv_state[1:5], decoded.conv_state[1:5])
    assert relative_error(layer.state[1:5], decoded.state[1:5]) < TOLERANCE
    for name, cache in layer.caches.items():
        untouched = [s for s in range(1, 5) if s not in slots] + [
            s for s, count in zip(slots, accepted, strict=True) if not count
        ]
        assert torch.equal(cache[untouched], before[name][untouched])


def test_null_rows_stay_out_of_everything() -> None:
    layer, alone = _filled(-5.0), _filled(-5.0)
    drafts = tokens(9, seed=3)
    for x in drafts.values():
        x[3:6] = torch.nan
    out, *records = _verify(layer, drafts, [2, 0, 4], 3)
    live = {name: torch.cat((drafts[name][:3], drafts[name][6:])) for name in PROJECTIONS}
    golden, *golden_records = _verify(alone, live, [2, 4], 3)
    assert torch.equal(out[3:6], torch.zeros(3, out.shape[1]))
    assert relative_error(out[[0, 1, 2, 6, 7, 8]], golden) < TOLERANCE
    u, k = records[:2]
    assert not u[1].any() and not k[1].any()
    _commit(layer, records, [3, 3, 1], [2, 0, 4])
    _commit(alone, golden_records, [3, 1], [2, 4])
    assert layer.state[0].isnan().all() and layer.conv_state[0].isnan().all()
    assert relative_error(layer.state[1:5], alone.state[1:5]) < TOLERANCE
    assert torch.equal(layer.conv_state[1:5], alone.conv_state[1:5])


@pytest.mark.parametrize("width", [1, 4])
def test_records_have_the_contracts_shapes(width: int) -> None:
    layer = _filled(-5.0)
    out, u, k, gate, conv_in = _verify(layer, tokens(2 * width), [1, 2], width)
    dim = layer.state.shape[-1]
    assert out.shape == (2 * width, HEADS * dim)
    assert u.shape == k.shape == gate.shape == (2, width, HEADS, dim)
    assert conv_in.shape == (2, width, 3 * HEADS * dim) and u.dtype == torch.float32
