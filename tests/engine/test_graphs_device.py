"""Graphs and launched steps on a real device: the outputs of eager steps, and no waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from k3hal.engine.step_plan import StepPlan
from k3hal.llm import LLM
from k3hal.sampling_params import SamplingParams

from .test_draft_llm import foresee, say

pytestmark = pytest.mark.device
MIXED = [
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, top_k=4, max_tokens=12, logprobs=3),
    SamplingParams(temperature=0.7, seed=6, top_k=3, top_p=0.9, min_p=0.01, max_tokens=12, min_tokens=4),
    SamplingParams(temperature=1.0, seed=7, top_k=4, presence_penalty=0.4, frequency_penalty=0.2, max_tokens=16),
    SamplingParams(temperature=1.0, seed=8, top_k=4, logit_bias={5: 4.0, 7: -50.0}, max_tokens=6),
    SamplingParams(temperature=1.0, seed=9, top_k=4, n=2, max_tokens=8, repetition_penalty=1.2),
]
"""Every feature, among few tokens: a product of other rows is rounded otherwise, and among thousands of tokens that are
alike in likelihood a random number soon falls between two whose border has moved."""
PROMPTS = [[3 + i] * (5 + 17 * i) for i in range(len(MIXED))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is here")


@contextmanager
def loaded(folder: Path, **options: Any) -> Iterator[tuple[LLM, Any, Any]]:
    """Nano in float32 on the device, with its core and its runner."""
    sizes = {"device": "cuda", "dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "memory_budget": 8.0}
    with LLM(folder, **(sizes | options)) as model:
        core = model._engine.engine.core
        yield model, core, core.runner


def answers(model: LLM, params: SamplingParams | list[SamplingParams]) -> list[tuple[list[int], str | None]]:
    outputs = model.generate(PROMPTS, params)
    assert not [one.error for output in outputs for one in output.outputs if one.error]
    return [(one.token_ids, one.finish_reason) for output in outputs for one in output.outputs]


def test_graphs_and_steps_ahead_change_no_output(nano_dir: Path) -> None:
    with loaded(nano_dir, graphs=False, async_depth=1) as (model, core, runner):
        expected = answers(model, GREEDY), answers(model, MIXED)
        assert runner.replays == 0 and runner._pieces is None and core.flights.depth == 1
    for depth in (1, 2, 3):
        with loaded(nano_dir, async_depth=depth) as (model, core, runner):
            assert (answers(model, GREEDY), answers(model, MIXED)) == expected
            assert runner.replays > 40 and runner._pieces.replays > 3 and core.flights.depth == depth


def test_drafts_change_no_output_and_are_verified_in_graphs(nano_dir: Path) -> None:
    with loaded(nano_dir, graphs=False) as (model, _, _):
        greedy, mixed = say(model, PROMPTS, GREEDY), say(model, PROMPTS, MIXED)
    for graphs in (True, False):
        with loaded(nano_dir, graphs=graphs, draft="ngram:4") as (model, core, runner):
            assert core.flights.depth == 1
            for expected, params in ((greedy, GREEDY), (mixed, MIXED)):
                drafter = foresee(model, PROMPTS, expected, 3)
                assert [end[:2] for end in say(model, PROMPTS, params)] == [end[:2] for end in expected]
                assert drafter.calls > 5
            assert (runner._verifying.replays > 10) if graphs else runner._verifying is None


def test_by_default_a_step_is_planned_while_one_runs(nano_dir: Path) -> None:
    with loaded(nano_dir) as (_, core, runner):
        assert core.flights.depth == 2 and runner.asynchronous


def test_the_graphs_equal_the_cpu(nano_dir: Path) -> None:
    with LLM(nano_dir, device="cpu", dtype="float32", max_model_len=512, max_num_seqs=4) as model:
        expected = answers(model, GREEDY)
    with loaded(nano_dir) as (model, _, _):
        assert answers(model, GREEDY) == expected


@pytest.mark.parametrize("graphs", [True, False])
def test_launching_a_step_that_decodes_never_waits(nano_dir: Path, graphs: bool) -> None:
    """torch raises at whatever would wait for the device, pageable copies among it."""
    with loaded(nano_dir, graphs=graphs) as (model, _, runner):
        answers(model, MIXED)  # what is compiled or allocated once
        launch, launched = runner.launch, 0

        def strict(plan: StepPlan) -> Any:
            nonlocal launched
            if plan.num_decodes != plan.num_seqs or plan.bindings:
                return launch(plan)
            launched += 1
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        runner.launch = strict
        answers(model, MIXED)
        answers(model, GREEDY)
        assert launched > 40


def test_captures_while_other_threads_use_the_device(nano_dir: Path) -> None:
    stop = threading.Event()
    turns = 0

    def work() -> None:
        nonlocal turns
        stream = torch.cuda.Stream()
        while not stop.is_set():
            with torch.cuda.stream(stream):
                host = torch.empty(1 << (10 + turns % 12), pin_memory=True)
                host.to("cuda", non_blocking=True).add_(1)
            stream.synchronize()
            turns += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with loaded(nano_dir) as (model, _, runner):
            answers(model, GREEDY)
            assert runner.replays
    finally:
        stop.set()
        thread.join()
    assert turns > 10


def test_steps_take_no_more_memory_as_they_go_on(nano_dir: Path) -> None:
    with loaded(nano_dir) as (model, _, _):
        answers(model, MIXED)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            answers(model, MIXED)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before + (1 << 20)
