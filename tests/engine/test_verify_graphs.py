"""Drafts verified through graphs: the same outputs, the same cache, and no waiting where nothing else is sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k3hal.engine.batch import build_batch
from k3hal.engine.graphs import GraphLimits, batch_buckets, width_buckets
from k3hal.engine.step_plan import StepPlan
from k3hal.engine.verify_graphs import most_verified
from k3hal.llm import LLM
from k3hal.sampling_params import SamplingParams

from .harness import Harness, greedy_by_hand
from .test_draft_llm import GREEDY, MIXED, SIZES, foresee, say, tokens
from .test_graphs import served_by_closures

LONG = SamplingParams(temperature=0.0, max_tokens=22, ignore_eos=True)
PROMPT = [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("seqs", "drafts", "most"), [(256, 4, 51), (256, 0, 256), (4, 4, 4), (16, 32, 1), (64, 3, 16), (40, 3, 16)]
)
def test_no_more_rows_than_decode_at_once(seqs: int, drafts: int, most: int) -> None:
    assert most_verified(GraphLimits(seqs, 10, drafts=drafts)) == most


@pytest.mark.parametrize("wrong", [2, 1000])
def test_greedy_drafts_are_verified_without_waiting(wrong: int) -> None:
    sizes: dict[str, Any] = {"num_runs": 60, "max_num_seqs": 6, "max_num_batched_tokens": 64}
    harness = Harness(graphs=True, drafts=3, wrong_drafts=wrong, **sizes)
    runner, runtime, waited, verified = harness.runner, harness.runtime, [], 0
    widths = len(width_buckets(16, 2))
    assert runtime is not None and runtime.captured == 3 * widths * len(batch_buckets(6)) and runtime.pools == 1
    launch = runner.launch

    def counted(plan: StepPlan) -> Any:
        nonlocal verified
        before = runtime.waits
        answer = launch(plan)
        generates = plan.num_decodes + plan.num_verifies == plan.num_seqs
        # Drafts beside prompts have no graph.
        if generates or not plan.num_verifies:
            waited.append(runtime.waits - before)
        verified += bool(plan.num_verifies and generates)
        return answer

    runner.launch = counted
    prompts = {f"r{i}": [*PROMPT, i + 2] for i in range(8)}
    for name, prompt in prompts.items():
        harness.add(name, prompt, LONG)
    harness.run()
    harness.core.close()
    graphs = runner._verifying
    assert graphs is not None and graphs.replays == verified > 5 and not any(waited)
    assert harness.model.accepted > 10
    for name, prompt in prompts.items():
        assert harness.tokens(name) == greedy_by_hand(prompt, LONG, 57)[0]


def test_nano_verifies_as_without_graphs(nano_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of request, and sequences with and without drafts in one step."""
    prompts = [[3 + i] * (5 + 7 * i) for i in range(len(MIXED))]
    with LLM(nano_dir, **SIZES) as plain:
        expected = say(plain, prompts, MIXED)
        greedy = say(plain, prompts, GREEDY)
    served_by_closures(monkeypatch)
    for wrong in (2, 5):
        with LLM(nano_dir, **SIZES, draft="ngram:5") as llm:
            runner: Any = llm._engine.engine.core.runner
            for params, ends in ((MIXED, expected), (GREEDY, greedy)):
                before = runner._verifying.replays
                foresee(llm, prompts, ends, wrong)
                assert [end[:2] for end in say(llm, prompts, params)] == [end[:2] for end in ends]
                assert runner._verifying.replays > before


def test_a_step_in_a_graph_is_the_step_without(nano_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and the cache bit for bit: rows of other sequences and padding are in neither."""
    served_by_closures(monkeypatch)
    with LLM(nano_dir, **SIZES, draft="ngram:3", warm_up="off") as llm:
        runner: Any = llm._engine.engine.core.runner
        arena, run = runner.arena, runner.arena.layout.pages_per_slot
        for view in (*arena.views.conv, *arena.views.state, *arena.views.kv):
            view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(view.numel())) * 0.1)
        before = arena.pages.clone()
        plan = StepPlan(
            epoch=1, num_decodes=1, num_verifies=2, rows=np.arange(3, dtype=np.int32),
            slots=np.array([2, 3, 4], np.int32), context_lens=np.array([3, 130, 40], np.int32),
            new_lens=np.array([1, 4, 2], np.int32),
            page_table=np.array([[5 * run, 0], [6 * run, 7 * run], [8 * run, 0]], np.int32),
            token_ids=np.array(tokens(1, 7)), sampled=np.arange(3), positions=np.array([4, 5, 6]),
        )  # fmt: skip
        graphs = runner._verifying
        verified = graphs.run(plan)
        graphs.commit(plan, torch.tensor([1, 3, 2], dtype=torch.int32))
        logits = torch.cat([verified.logits[i, :count] for i, count in enumerate((1, 4, 2))]).clone()
        replayed = arena.pages.clone()
        arena.pages.copy_(before)
        batch = build_batch(
            plan, runner._step_metadata, arena.layout.page_tokens, runner._staging, runner._sampler.last_tokens,
            all_logits=True,
        )  # fmt: skip
        model = runner.model
        torch.testing.assert_close(model.logits(model.forward(batch, arena.views)), logits, rtol=1e-4, atol=1e-4)
        model.commit(batch, arena.views, torch.tensor([3, 2], dtype=torch.int32))
        mine = torch.zeros(len(replayed), dtype=torch.bool)
        for first in (0, 2, 3, 4, 5, 6, 7, 8):
            mine[first * run : (first + 1) * run] = True
        assert torch.equal(replayed[~mine], before[~mine]) and int((~mine).sum()) > 0
        # States and KV of the sequences that verify; the one that decodes is not in what is compared with.
        for view in (*arena.views.conv, *arena.views.state):
            expected = view[[3, 4]].clone()
            with torch.inference_mode():
                arena.pages.copy_(replayed)
                torch.testing.assert_close(view[[3, 4]], expected, rtol=1e-4, atol=1e-5)
