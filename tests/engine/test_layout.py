"""Pages and slots of one arena: sizes from the config, views that never overlap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from k3hal.engine.cache.arena import CacheArena
from k3hal.engine.cache.layout import CacheLayout
from k3hal.model.config import ModelConfig

from .fold_model import fold_layout


def full_size(kv_dtype: torch.dtype, *, kv_layers: int = 24, kda_layers: int = 69) -> CacheLayout:
    """K3 on one of eight ranks."""
    return CacheLayout(
        kv_layers=kv_layers,
        kv_width=576,
        kv_dtype=kv_dtype,
        kda_layers=kda_layers,
        heads=12,
        head_dim=128,
        conv_rows=3,
        dtype=torch.bfloat16,
    )


def test_the_full_model_on_eight_ranks_wastes_under_one_percent() -> None:
    layout = full_size(torch.float8_e4m3fn)
    assert layout.slot_bytes == 56_171_520
    assert layout.page_bytes == 128 * 24 * 576
    assert layout.pages_per_slot == 32
    assert layout.slot_waste == pytest.approx(0.008, abs=5e-4)


def test_the_published_config_gives_these_sizes(shared_data: Callable[[str], Path]) -> None:
    config = ModelConfig.from_json(shared_data("kimi_k3_config.json"))
    layout = CacheLayout.of(config, torch.bfloat16)
    assert (layout.kv_layers, layout.kda_layers) == (24, 69)
    assert layout.slot_bytes == 449_372_160
    assert layout.page_bytes == 128 * 27_648


@pytest.mark.parametrize("tokens", [1, 128, 129, 5000])
@pytest.mark.parametrize("num_seqs", [1, 7])
def test_runs_for_is_enough_and_longest_sequence_agrees(num_seqs: int, tokens: int) -> None:
    layout = full_size(torch.bfloat16)
    runs = layout.runs_for(num_seqs, tokens)
    spare = (runs - 1) * layout.pages_per_slot - num_seqs * (layout.pages_per_slot + layout.pages_for(tokens))
    assert 0 <= spare < layout.pages_per_slot
    if num_seqs == 1:
        longest = layout.longest_sequence(runs)
        assert longest is not None
        assert longest >= tokens


@pytest.mark.parametrize(
    "layout",
    [fold_layout(), fold_layout(1), fold_layout(64)],
    ids=["three pages a slot", "pages of one token", "a slot in a page"],
)
def test_no_byte_serves_two_views_of_one_kind(layout: CacheLayout) -> None:
    arena = CacheArena(layout, torch.zeros(5 * layout.run_bytes, dtype=torch.uint8))
    for kind in (arena.views.kv, (*arena.views.state, *arena.views.conv)):
        arena.pages.zero_()
        for number, view in enumerate(kind, 1):
            assert not view.any(), "the view holds what another wrote"
            view.fill_(number)
        assert [bool((view == number).all()) for number, view in enumerate(kind, 1)] == [True] * len(kind)


def test_slot_and_its_pages_are_the_same_bytes() -> None:
    layout = fold_layout()
    arena = CacheArena(layout, torch.zeros(5 * layout.run_bytes, dtype=torch.uint8))
    for view in (*arena.views.state, *arena.views.conv):
        view[2].fill_(1.0)
    touched = arena.pages.any(-1).nonzero().flatten().tolist()
    run = layout.pages_per_slot
    assert touched == list(range(2 * run, 3 * run))
    assert int((arena.pages != 0).sum()) <= layout.slot_bytes


@pytest.mark.parametrize("begin", [0, 256, 4096 + 512])
def test_the_views_lie_in_the_memory_given(begin: int) -> None:
    """Memory may be a part of a larger block: it begins at a huge page, for one."""
    layout = fold_layout()
    whole = torch.zeros(begin + 5 * layout.run_bytes + 512, dtype=torch.uint8)
    arena = CacheArena(layout, whole[begin : begin + 5 * layout.run_bytes])
    for view in (*arena.views.kv, *arena.views.conv, *arena.views.state):
        view.fill_(1.0)
    assert arena.pages.any(dim=1).all(), "a page that no view reaches"
    assert not whole[:begin].any() and not whole[begin + 5 * layout.run_bytes :].any()
    arena.pages.zero_()
    assert not any(view.any() for view in (*arena.views.kv, *arena.views.conv, *arena.views.state))
    arena.views.state[1][4].fill_(1.0)
    assert arena.slots.any(dim=1).tolist() == [False] * 4 + [True]


def test_a_model_without_mla_layers_needs_no_pages() -> None:
    layout = full_size(torch.bfloat16, kv_layers=0)
    assert layout.pages_per_slot == 1
    assert layout.pages_for(10_000) == 0
    assert layout.longest_sequence(3) is None
    assert CacheArena(layout, torch.zeros(2 * layout.run_bytes, dtype=torch.uint8)).views.kv == ()


def test_a_model_without_kda_layers_still_counts_its_sequences() -> None:
    layout = full_size(torch.bfloat16, kda_layers=0)
    assert layout.pages_per_slot == 1
    assert layout.runs_for(2, 128) == 5


def test_memory_of_a_broken_run_is_refused() -> None:
    layout = fold_layout()
    with pytest.raises(ValueError, match="no whole number of runs"):
        CacheArena(layout, torch.zeros(layout.run_bytes + 1, dtype=torch.uint8))
