"""The steps that are tried before there is traffic: a scheduler could plan them, and none that it plans takes more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.engine.step_plan import BEFORE_ALL
from k3hal.engine.warmup import Sizes, trials

from .fold_model import VOCAB, fold_layout

LAYOUT = fold_layout()


@given(
    seqs=st.integers(1, 300),
    extra=st.integers(0, 600),
    length=st.integers(2, 5000),
    num_runs=st.integers(2, 400),
    few=st.booleans(),
    page_tokens=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_trials_are_steps_that_a_scheduler_could_plan(
    seqs: int, extra: int, length: int, num_runs: int, few: bool, page_tokens: int
) -> None:
    layout = fold_layout(page_tokens)
    sizes = Sizes(seqs, seqs + extra, length, VOCAB, layout, num_runs)
    runs = min(3, num_runs) if few else num_runs
    found = [trial.plan for trial in trials(sizes, runs)]
    assert [plan.epoch for plan in found] == sorted({plan.epoch for plan in found})
    assert BEFORE_ALL < found[0].epoch <= found[-1].epoch < 0
    for plan in found:
        ends = plan.context_lens + plan.new_lens
        assert 0 < plan.num_seqs <= seqs
        assert plan.num_tokens == plan.new_lens.sum() <= sizes.max_num_batched_tokens
        assert plan.new_lens.min() > 0
        assert ends.max() <= length
        assert (plan.new_lens[: plan.num_decodes] == 1).all()
        assert (plan.context_lens[: plan.num_decodes] > 0).all()
        assert plan.slots.min() > 0
        assert plan.slots.max() < runs
        assert plan.page_table.shape == (plan.num_seqs, layout.pages_for(int(ends.max())))
        assert plan.page_table.max() < runs * layout.pages_per_slot
        written = [plan.page_table[i, : layout.pages_for(int(end))] for i, end in enumerate(ends)]
        assert min(row.min() for row in written) >= layout.pages_per_slot, "a page of the null run"
    most = min(sizes.max_num_batched_tokens, seqs * length)
    assert max(plan.num_tokens for plan in found) == most
    assert max(int((plan.context_lens + plan.new_lens).max()) for plan in found) == length
    assert max(plan.num_decodes for plan in found) == seqs
    assert not any(plan.num_verifies for plan in found)
    rich, plain = found[0].bindings[0].sampling, found[-1].bindings
    assert rich.penalised
    assert rich.logprobs
    assert len(plain) == seqs
    assert not any(binding.sampling.penalised or binding.constraint for binding in plain)


@given(data=st.data(), drafts=st.integers(0, 6), prices=st.tuples(*[st.integers(0, 50)] * 4))
@settings(max_examples=200, deadline=None)
def test_no_step_of_a_scheduler_takes_more_than_a_trial(
    data: st.DataObject, drafts: int, prices: tuple[int, int, int, int]
) -> None:
    """Whatever a part of a step takes for its sequences, its rows, the widest of each, and all tokens."""
    seqs, length = data.draw(st.integers(1, 40)), data.draw(st.integers(drafts + 2, 200))
    tokens = seqs + data.draw(st.integers(0, 300))
    sizes = Sizes(seqs, tokens, length, VOCAB, LAYOUT, 400, drafts)
    verifies = data.draw(st.integers(0, min(seqs, tokens // 2 // drafts))) if drafts else 0
    decodes = data.draw(st.integers(0, min(seqs - verifies, tokens - verifies * (1 + drafts))))
    free = tokens - decodes - verifies * (1 + drafts)
    prompts = data.draw(st.integers(0, min(seqs - decodes - verifies, free)))
    new = [1] * decodes + [1 + drafts] * verifies
    for after in reversed(range(prompts)):
        new.append(data.draw(st.integers(1, min(length, tokens - sum(new) - after))))
    widest = data.draw(st.integers(max(new, default=1), length))

    def takes(new: Sequence[int], split: int, end: int, widest: int) -> list[int]:
        parts = [new[:split], new[split:end], new[end:]]
        return [
            sum(p * f for p, f in zip(prices, (len(part), sum(part), len(part) * widest, sum(new)), strict=True))
            for part in parts
        ]

    tried = []
    for plan in (trial.plan for trial in trials(sizes)):
        end, longest = plan.num_decodes + plan.num_verifies, int((plan.context_lens + plan.new_lens).max())
        tried.append(takes(plan.new_lens.tolist(), plan.num_decodes, end, longest))
    for needed, *enough in zip(takes(new, decodes, decodes + verifies, widest), *tried, strict=True):
        assert needed <= max(enough)


@pytest.mark.parametrize(
    ("seqs", "tokens", "length", "beside"),
    [
        (8, 64, 10, [(7, [10]), (1, [9] * 7)]),
        (8, 64, 40, [(7, [40]), (6, [29, 29])]),
        (4, 16, 64, [(3, [13])]),
        (1, 16, 64, []),
        (3, 3, 9, [(2, [1])]),
    ],
)
def test_prompts_beside_the_largest_batch_are_one_and_as_few_as_fill_the_step(
    seqs: int, tokens: int, length: int, beside: list[tuple[int, list[int]]]
) -> None:
    plans = [trial.plan for trial in trials(Sizes(seqs, tokens, length, VOCAB, LAYOUT, 50)) if "beside" in trial.name]
    assert [(plan.num_decodes, plan.new_lens[plan.num_decodes :].tolist()) for plan in plans] == beside
    assert all(int((plan.context_lens + plan.new_lens).max()) == length for plan in plans)


@pytest.mark.parametrize(("seqs", "tokens", "drafts", "verifying"), [(4, 64, 3, 4), (8, 32, 5, 3), (4, 4, 3, 0)])
def test_the_largest_batch_is_tried_with_drafts(seqs: int, tokens: int, drafts: int, verifying: int) -> None:
    sizes = Sizes(seqs, tokens, 40, VOCAB, LAYOUT, 50, drafts)
    found = [trial for trial in trials(sizes) if trial.plan.num_verifies]
    assert bool(found) == (verifying > 0)
    for trial in found[:1]:
        plan = trial.plan
        assert (plan.num_decodes, plan.num_verifies) == (seqs - verifying, verifying)
        assert plan.new_lens.tolist() == [1] * (seqs - verifying) + [1 + drafts] * verifying
        assert int((plan.context_lens + plan.new_lens).max()) == 40
        assert "--draft" in trial.flag and f"{drafts} drafts for {verifying} of them" in trial.name
    for trial in found[1:]:
        assert trial.plan.num_tokens <= tokens and trial.name.endswith(found[0].name)
