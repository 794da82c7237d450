"""vLLM's view of a step as the model takes it: against K3HAL's own `step_metadata`, and the order vLLM puts it in."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.ops.step_metadata import step_metadata
from k3hal.dispatch.plan import make_plan
from k3hal.dispatch.probe import probe
from k3hal.engine.cache.layout import CacheLayout
from k3hal.engine.largest import Bounds
from k3hal.errors import UnsupportedError
from k3hal.model.batch import StepBatch
from k3hal.model.config import ModelConfig
from k3hal.model.generated import GeneratedModel, GeneratedReader
from k3hal.model.k3 import K3Model
from k3hal.model.presets import preset_config
from k3hal.model.requests import PAGE_TOKENS, model_requests
from k3hal.vllm.sizes import cache_dtypes, latent_width, scratch_views, state_shapes
from k3hal.vllm.step import (
    StepRows,
    StepSlots,
    count_decodes,
    largest_scratch_steps,
    last_columns,
    layer_batches,
    scratch_step,
    slots_of,
    step_rows,
)

PAGE, CPU = 16, torch.device("cpu")

decodes = st.tuples(st.integers(1, 200), st.just(1))
extends = st.tuples(st.integers(1, 200), st.integers(2, 70))
prompts = st.tuples(st.just(0), st.integers(1, 70))


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(cached, new) of each sequence, in vLLM's order: decodes, chunks of prompts that began before, new prompts."""
    parts = [draw(st.lists(kind, max_size=4)) for kind in (decodes, extends, prompts)]
    return [sequence for part in parts for sequence in part] or [(0, 1)]


def int32(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows_of(step: list[tuple[int, int]]) -> tuple[StepRows, tuple[Tensor, ...]]:
    """The step from what vLLM has of it, and from the operator that K3HAL's engine takes."""
    context, new = int32([c for c, _ in step]), int32([n for _, n in step])
    width = max(-(-(c + n) // PAGE) for c, n in step)
    table = 1 + torch.randperm(len(step) * width, dtype=torch.int32).view(len(step), width)
    total = int(new.sum())
    known = step_metadata(context, new, table, PAGE, total)
    starts, seq_lens = known[2], context + new
    return step_rows(starts, starts, seq_lens, seq_lens, table, known[1]), known


@given(step=steps())
def test_a_step_is_what_the_engine_makes_of_it(step: list[tuple[int, int]]) -> None:
    rows, (_, kv_rows, cu_seqlens, seq_lens) = rows_of(step)
    decoding = sum(c > 0 and n == 1 for c, n in step)
    slots = int32(list(range(1, len(step) + 1)))
    batch = layer_batches(torch.zeros(kv_rows.shape[0], dtype=torch.int64), [rows, StepSlots(slots)])[0]
    assert batch.num_decodes == decoding
    assert (batch.decode is None) == (decoding == 0) and (batch.prefill is None) == (decoding == len(step))
    assert torch.equal(batch.kv_rows, kv_rows)
    if batch.decode:
        assert torch.equal(batch.decode.seq_lens, seq_lens[:decoding])
        assert torch.equal(batch.decode.slots, slots[:decoding])
    if batch.prefill:
        assert torch.equal(batch.prefill.cu_seqlens, cu_seqlens[decoding:] - decoding)
        assert batch.prefill.context_lens.tolist() == [c for c, _ in step[decoding:]]
        assert batch.prefill.has_state.tolist() == [c > 0 for c, _ in step[decoding:]]
        assert torch.equal(batch.prefill.slots, slots[decoding:])


def test_a_prompt_of_one_token_does_not_decode_from_whatever_is_in_its_slot() -> None:
    assert count_decodes(np.array([0, 1, 2]), np.array([9, 1])) == 1
    assert count_decodes(np.array([0, 1]), np.array([1])) == 0
    assert count_decodes(np.array([0]), np.array([], np.int32)) == 0


def test_what_comes_after_a_chunk_does_not_decode() -> None:
    assert count_decodes(np.array([0, 1, 4, 5]), np.array([9, 9, 9])) == 1


@pytest.mark.parametrize(("length", "column"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_a_state_is_in_the_block_of_the_last_token(length: int, column: int) -> None:
    table = int32([[10, 20, 30]])
    columns = last_columns(int32([length]), PAGE)
    assert columns.tolist() == [[column]]
    assert slots_of(table, columns).tolist() == [10 * (column + 1)]


def test_slots_lie_side_by_side() -> None:
    """Kernels take their address only."""
    table = int32([[1, 0, 0], [2, 0, 0]])
    assert slots_of(table, None).is_contiguous() and slots_of(table, None).tolist() == [1, 2]
    assert slots_of(table, last_columns(int32([3, 4]), PAGE)).is_contiguous()


def test_layers_of_a_group_share_a_batch_and_groups_have_their_own_slots() -> None:
    rows, _ = rows_of([(5, 1), (3, 1)])
    first, second = StepSlots(int32([1, 2])), StepSlots(int32([7, 8]))
    batches: list[StepBatch] = layer_batches(torch.zeros(2, dtype=torch.int64), [first, second, rows, first])
    assert batches[0] is batches[3] and batches[0] is not batches[1]
    assert [batch.decode.slots.tolist() for batch in batches if batch.decode] == [[1, 2], [7, 8], [1, 2], [1, 2]]


def test_the_step_that_measures_memory_touches_no_null_page_or_slot() -> None:
    rows, states = scratch_step([0], [300], 3, 3, 128, CPU)
    assert rows.page_table.tolist() == [[1, 2, 3]] and states.slots.tolist() == [1]
    assert rows.kv_rows[0] == 128 and rows.kv_rows[-1] == 128 + 299
    assert rows.has_state is not None and not rows.has_state.any()


sizes = st.tuples(st.integers(1, 6), st.integers(0, 70), st.integers(2, 400))


@given(sizes)
def test_steps_that_are_tried_are_as_wide_as_vllms_and_lie_in_the_scratch(sizes: tuple[int, int, int]) -> None:
    seqs, extra, length = sizes
    bounds, pages = Bounds(seqs, seqs + extra, length), -(-(seqs + extra) // PAGE)
    tried = list(largest_scratch_steps(bounds, pages, PAGE, CPU))
    for tokens, rows, states in tried:
        assert 0 < tokens <= seqs + extra and rows.kv_rows.shape == (tokens,)
        assert rows.page_table.shape == (states.slots.shape[0], -(-length // PAGE))
        assert int(rows.page_table.min()) == 1 and int(rows.page_table.max()) <= pages
        assert set(states.slots.tolist()) == {1}
        assert int(rows.kv_rows.min()) >= PAGE and int(rows.kv_rows.max()) < (1 + pages) * PAGE
    assert max(rows.num_decodes for _, rows, _ in tried) == seqs
    assert max(int(rows.seq_lens.max()) for _, rows, _ in tried) >= length


def test_the_model_computes_every_step_that_is_tried() -> None:
    cfg, dtypes, pages = ModelConfig.from_json(preset_config("nano")), cache_dtypes(torch.float32, "auto"), 2
    requests = model_requests(cfg, "float32", "float32")
    plan = make_plan(requests, build_selector(), model="nano", device=probe("cpu"), dtype="float32")
    reader = GeneratedReader(GeneratedModel.of("nano", cfg), CPU, torch.float32)
    model = K3Model.load(cfg, plan.bind(), reader, dtype=torch.float32)
    tried = list(largest_scratch_steps(Bounds(3, 200, 700), pages, PAGE_TOKENS, CPU))
    prompts = [(rows.num_decodes, rows.context_lens.tolist()) for _, rows, _ in tried if rows.context_lens is not None]
    assert prompts == [(0, [0]), (0, [0, 0, 0]), (0, [500]), (2, [502]), (0, [633, 0, 0])]
    assert [rows.num_decodes for _, rows, _ in tried if rows.context_lens is None] == [3]
    for tokens, rows, states in tried:
        views = scratch_views(cfg, dtypes, 1, pages, CPU)
        steps = [states if cfg.is_kda(i) else rows for i in range(cfg.num_layers)]
        batches = layer_batches(torch.arange(tokens) % cfg.vocab_size, steps)
        hidden = model.forward_unnormed(batches[0].token_ids, batches, views)
        assert hidden.shape[0] == tokens and hidden.isfinite().all()
        assert not any(view[0].any() for view in (*views.kv, *views.conv, *views.state)), "the null page and slot"


def test_cache_dtypes_are_those_of_the_operators() -> None:
    assert cache_dtypes(torch.bfloat16, "auto").kv == torch.bfloat16
    assert cache_dtypes(torch.float32, "fp8").kv == torch.float8_e4m3fn
    for activations, kv in ((torch.float16, "auto"), (torch.float32, "bfloat16"), (torch.bfloat16, "fp8_e5m2")):
        with pytest.raises(UnsupportedError, match="is not supported"):
            cache_dtypes(activations, kv)


@pytest.mark.parametrize("name", ["tiny", "kl-tiny"])
def test_caches_have_the_sizes_of_the_own_engines(name: str) -> None:
    cfg = ModelConfig.from_json(preset_config(name))
    layout = CacheLayout.of(cfg, torch.bfloat16)
    for tp in (1, 2):
        conv, state = state_shapes(cfg, tp)
        assert prod(conv) * 2 * tp == layout.conv_layer_bytes and conv[0] == layout.conv_rows
        assert prod(state) * 4 * tp == layout.state_layer_bytes and state[0] * tp == layout.heads
    assert latent_width(cfg) == layout.kv_width
