"""Memory on huge pages: aligned, zero, and never shared by two tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3hal.backends.cpu._huge_pages import HUGE_PAGE, map_bytes, setting, zeros


@pytest.mark.parametrize("num_bytes", [1, 4096, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_mappings_are_zero_writable_and_begin_at_a_huge_page(num_bytes: int) -> None:
    memory = map_bytes(num_bytes)
    assert memory.shape == (num_bytes,)
    assert not memory.any()
    assert num_bytes < HUGE_PAGE or memory.data_ptr() % HUGE_PAGE == 0
    assert int(memory.fill_(255).sum()) == 255 * num_bytes


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))))
def test_tensors_cut_from_one_mapping_do_not_overlap(sizes: list[tuple[int, torch.dtype]]) -> None:
    tensors = [zeros(count, 3, dtype=dtype) for count, dtype in sizes]
    for i, tensor in enumerate(tensors):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0 or not tensor.numel()
        tensor.fill_(i)
    for i, tensor in enumerate(tensors):
        assert (tensor == torch.tensor(i, dtype=tensor.dtype)).all()


def test_the_last_mapping_is_left_when_the_next_tensor_does_not_fit() -> None:
    first = [zeros(9 << 20, dtype=torch.uint8).fill_(7) for _ in range(5)]
    assert not zeros(40 << 20, dtype=torch.uint8).any()
    assert all((t == 7).all() for t in first)


def test_the_setting_is_one_the_system_knows() -> None:
    assert setting() in ("always", "madvise", "never")
