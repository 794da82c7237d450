"""Arrays between host and device: what arrives is what was sent, and no buffer is used again too early."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.engine.staging import Layout, PinnedBuffers, Staging

from .closure_runtime import ClosureRuntime, SlowEvent

CPU = torch.device("cpu")
KINDS = ("bool", "uint8", "int32", "int64", "float32", "float64")


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 5), min_size=0, max_size=3)), min_size=1, max_size=6
    ),
    st.booleans(),
)
def test_uploads_arrive_with_their_shapes_and_dtypes(specs: list[tuple[str, list[int]]], ahead: bool) -> None:
    staging = Staging(CPU, ClosureRuntime() if ahead else None)
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 2, shape).astype(kind) for kind, shape in specs]
    for array, tensor in zip(arrays, staging.upload(*arrays), strict=True):
        assert torch.equal(tensor, torch.from_numpy(array)) and tensor.dtype == torch.from_numpy(array).dtype


def test_places_are_aligned_and_apart() -> None:
    layout = Layout.of((np.int32, (3,)), (np.bool_, (5, 1)), (np.float64, ()), (np.int64, (0, 4)))
    assert [at for at, _, _ in layout.places] == [0, 16, 32, 48] and layout.size == 48


def test_a_buffer_comes_back_when_its_event_is_over_and_not_before() -> None:
    sizes: list[int] = []

    def allocate(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    buffers, runtime = PinnedBuffers(allocate), ClosureRuntime()
    first = buffers.take(5000)
    event = SlowEvent(runtime, 1, asked=-100)
    buffers.give_back(first, event)
    assert buffers.take(1) is not first
    event.synchronize()
    assert buffers.take(8192) is first
    assert sizes == [8192, 4096]


def test_the_smallest_buffer_that_fits_is_taken() -> None:
    buffers = PinnedBuffers(lambda size: torch.zeros(size, dtype=torch.uint8))
    small, large = buffers.take(10), buffers.take(100_000)
    buffers.give_back(large)
    buffers.give_back(small)
    assert buffers.take(4096) is small and buffers.take(1) is large


def test_what_is_fetched_is_what_the_tensor_held_then() -> None:
    runtime = ClosureRuntime()
    staging = Staging(CPU, runtime)
    tensors: list[Any] = [torch.arange(6).view(2, 3), torch.tensor([0.5]), torch.tensor([[True]])]
    coming = staging.fetch(*tensors)
    tensors[0].zero_()
    assert not runtime.waits
    assert coming.lists() == [[[0, 1, 2], [3, 4, 5]], [0.5], [[True]]]
    assert runtime.waits == 1
    with pytest.raises(RuntimeError, match="has been taken"):
        coming.lists()


def test_a_steady_stream_of_steps_needs_no_more_buffers() -> None:
    class Counting(ClosureRuntime):
        made = 0

        def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
            Counting.made += 1
            return super().allocate_pinned(num_bytes)

    staging = Staging(CPU, Counting())
    for i in range(200):
        (tensor,) = staging.upload(np.array([i]))
        assert staging.fetch(tensor).lists() == [[i]]
    assert Counting.made < 12


def test_what_an_array_does_not_fill_of_its_place_is_zero() -> None:
    staging = Staging(CPU, ClosureRuntime())
    layout = Layout.of((np.int64, (4,)), (np.int32, (3, 5)))
    target = torch.full((layout.size,), 0xFF, dtype=torch.uint8)
    staging.send(staging.pack(layout, (np.array([1, 2]), np.ones((2, 3), np.int32))), target, layout)
    first, second = layout.tensors(target)
    assert first.tolist() == [1, 2, 0, 0]
    assert second.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [0] * 5]
