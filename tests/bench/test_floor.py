"""The floor counts what it says, and the clocks and counters it is fed by."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3hal.bench.bandwidth import BandwidthMeter
from k3hal.bench.engine import draw_prompts
from k3hal.bench.floor import step_bytes
from k3hal.bench.ours import Ours, full_decodes
from k3hal.bench.runs import Difference, first_difference
from k3hal.bench.steps import ExpertCounter, Step
from k3hal.engine.build import build_engine
from k3hal.engine.cache.layout import CacheLayout
from k3hal.model.checkpoint import Checkpoint

FP32 = torch.float32


def _steps(sequences: int, context: int, experts: int) -> list[Step]:
    return [Step(sequences, sequences, context, experts=experts)] * 2


def test_with_every_expert_touched_all_weights_but_the_embedding_are_read(k3_dir: Path) -> None:
    checkpoint = Checkpoint.open(k3_dir)
    config = checkpoint.config
    layout = CacheLayout.of(config, FP32)
    total = len(config.moe_layers) * config.num_experts
    got = step_bytes(checkpoint, layout, _steps(2, 20, total))
    row = config.hidden_size * 2
    assert got.dense + got.experts == checkpoint.total_bytes - config.vocab_size * row + 2 * row
    half = step_bytes(checkpoint, layout, _steps(2, 20, total // 2))
    assert half.experts == got.experts / 2 and half.dense == got.dense


def test_states_are_read_and_written_and_latents_read(k3_dir: Path) -> None:
    checkpoint = Checkpoint.open(k3_dir)
    got = step_bytes(checkpoint, CacheLayout.of(checkpoint.config, FP32), _steps(3, 50, 1))
    # Two KDA layers of two heads of 32 with a window of three rows; one MLA layer of 32 + 16 channels.
    assert got.state == 2 * 3 * 2 * (2 * 32 * 32 * 4 + 3 * 3 * 2 * 32 * 4)
    assert got.kv == (50 + 3) * 48 * 4
    assert got.total == got.dense + got.experts + got.state + got.kv


def test_experts_are_counted_as_they_are_routed(kimi_linear_dir: Path) -> None:
    built = build_engine(str(kimi_linear_dir), dtype="float32", max_model_len=128)
    config = Checkpoint.open(kimi_linear_dir).config
    ours = Ours(built)
    prompts = draw_prompts(3, 6, 300, 1)
    one = full_decodes(ours.counted(prompts[:1], 4).steps, 1)
    three = full_decodes(ours.counted(prompts, 4).steps, 3)
    layers = len(config.moe_layers)
    assert [step.experts for step in one] == [layers * config.top_k] * 3
    assert all(layers * config.top_k <= step.experts <= layers * min(3 * config.top_k, 6) for step in three)
    assert all(step.experts == 0 for step in ours.run(prompts, 4).steps)


def test_the_counter_counts_an_expert_once_and_padding_never() -> None:
    counter = ExpertCounter()
    route = counter._counting(lambda: (torch.ones(2, 3), torch.tensor([[0, 4, 2], [4, 2, -1]])))
    gate, ids = route()
    assert gate.shape == ids.shape == (2, 3)
    route()
    assert counter.take() == 6 and counter.take() == 0


def test_clocks_of_a_step_follow_each_other(kimi_linear_dir: Path) -> None:
    built = build_engine(str(kimi_linear_dir), dtype="float32", max_model_len=128)
    run = Ours(built).run(draw_prompts(2, 6, 300, 1), 4)
    assert [step.num_decodes for step in run.steps] == [0, 2, 2, 2]
    assert [step.context for step in run.steps] == [12, 14, 16, 18]
    for step in run.steps:
        assert step.begin <= step.planned <= step.built <= step.computed <= step.sampled <= step.end
        assert sum(step.parts().values()) == pytest.approx(step.seconds)
    assert run.decode_tokens == 6
    assert run.decode_seconds == pytest.approx(sum(step.seconds for step in run.steps[1:]))


def test_bandwidth_is_of_both_kinds_and_the_best_is_the_fastest() -> None:
    meter = BandwidthMeter()
    meter.measure()
    found = meter.result()
    assert found.buffer_bytes == 1 << 20
    assert 0 < found.copy.min <= found.copy.median <= found.copy.max <= found.best
    assert found.best == max(found.copy.max, found.read.max)


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=4), st.data())
def test_first_difference_finds_the_first(tokens: list[list[int]], data: st.DataObject) -> None:
    assert first_difference(tokens, tokens) is None
    places = [(i, j) for i, row in enumerate(tokens) for j in range(len(row))]
    if not places:
        return
    i, j = data.draw(st.sampled_from(places))
    changed = [list(row) for row in tokens]
    changed[i][j] = 9
    assert first_difference(tokens, changed) == Difference(i, j, tokens[i][j], 9)
    shorter = [list(row) for row in tokens]
    del shorter[i][-1]
    assert first_difference(shorter, tokens) == Difference(i, len(tokens[i]) - 1, -1, tokens[i][-1])


def test_a_model_without_experts_counts_none() -> None:
    counter = ExpertCounter()
    stand_in: Any = SimpleNamespace()
    with counter.attached(stand_in):
        assert counter.take() == 0
