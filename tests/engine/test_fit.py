"""What a warm-up lets pass never runs out of memory; what it refuses is refused by name."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from k3hal.backends.cpu.runtime import CpuRuntime
from k3hal.dispatch.ops.copy_pages import copy_pages
from k3hal.dispatch.ops.sample import sample
from k3hal.dispatch.ops.step_metadata import step_metadata
from k3hal.dispatch.probe import probe
from k3hal.engine.build import assemble_core
from k3hal.engine.cache.arena import CacheArena
from k3hal.engine.cache.layout import CacheLayout
from k3hal.engine.core import EngineCore
from k3hal.engine.fit import Fitting, Gauge
from k3hal.engine.interface import EngineInfo, EngineRequest
from k3hal.engine.memory import (
    GB,
    MemoryPlan,
    Needs,
    estimated_needs,
    margin_for,
    penalty_bytes,
    plan_memory,
    workspace_bytes,
)
from k3hal.engine.options import EngineOptions
from k3hal.engine.penalties import Penalties
from k3hal.engine.runner import ModelRunner
from k3hal.engine.sampler import Sampler
from k3hal.engine.sampling import GenerationDefaults
from k3hal.engine.staging import Staging
from k3hal.engine.warmup import Sizes, trials
from k3hal.errors import CapacityError
from k3hal.llm import LLM
from k3hal.model.config import ModelConfig
from k3hal.model.presets import preset_config
from k3hal.sampling_params import SamplingParams

from .counted_device import Appetite, CountedDevice, HungryModel
from .fold_model import VOCAB, fold_layout
from .harness import CPU, EOS, greedy_by_hand

CONFIG = ModelConfig.from_json(preset_config("nano"))
LAYOUT = fold_layout()
RUN = LAYOUT.run_bytes


@pytest.fixture(autouse=True)
def small_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is counted in bytes here, not in GB."""
    monkeypatch.setattr("k3hal.engine.memory._MARGIN", RUN)


class Engine:
    """An engine fitted into a counted device. Building it may raise `CapacityError`."""

    def __init__(
        self,
        appetite: Appetite,
        *,
        weights: int = 5000,
        budget: int | None = 60 * RUN,
        capacity: int = 100 * RUN,
        max_model_len: int | None = 64,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        try_out: bool = True,
        thought: int = 0,
        graphs: Callable[[CountedDevice], int] | None = None,
    ) -> None:
        """`thought` bytes are thought to be needed by graphs; `graphs` captures them and says what they hold."""
        self.device = CountedDevice(capacity)
        self.limits = max_num_seqs, max_num_batched_tokens
        gauge = Gauge(self.device)  # pyright: ignore[reportArgumentType]

        def replan(needs: Needs) -> MemoryPlan:
            return plan_memory(
                CONFIG,
                LAYOUT,
                needs,
                free=gauge.free,
                budget=budget,
                on_cpu=False,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
            )

        estimate = replan(Needs(weights=weights, workspace=0, graphs=thought))
        self.device.take(weights)
        self.model = HungryModel(self.device, appetite)
        sampler = Sampler(VOCAB, max_num_seqs, CPU, sample)

        def make(arena: CacheArena, max_model_len: int) -> ModelRunner:
            return ModelRunner(self.model, arena, sampler, step_metadata, copy_pages)

        def prepare(runner: ModelRunner) -> None:
            assert graphs is not None
            held = graphs(self.device)
            weakref.finalize(runner, self.device.give, held)

        fitting = Fitting(
            self.device,  # pyright: ignore[reportArgumentType]
            gauge,
            estimate,
            replan,
            make,
            None if graphs is None else prepare,
            try_out=try_out,
        )
        sizes = Sizes(max_num_seqs, max_num_batched_tokens, estimate.max_model_len, VOCAB, LAYOUT, estimate.num_runs)
        self.runner, self.plan = fitting.fit(sizes)
        self.model.trying = False
        self.steps_tried = self.model.steps
        self.core = self._core()

    def _core(self) -> EngineCore:
        info = EngineInfo(self.plan.max_model_len, VOCAB, (EOS,), *self.limits, 1000, "counted:0")
        return assemble_core(self.runner, self.runner.arena, info, GenerationDefaults(), EngineOptions())

    def serve(self, rng: np.random.Generator, count: int) -> None:
        """Random requests, some of them as long as may be; every greedy one is answered as by hand."""
        room = self.plan.max_model_len
        wanted: dict[str, tuple[list[int], SamplingParams]] = {}
        for i in range(count):
            length = int(rng.choice([1, room - 1, int(rng.integers(1, room))]))
            prompt = rng.integers(2, VOCAB, length).tolist()
            if wanted and rng.random() < 0.3:
                first = list(wanted.values())[int(rng.integers(len(wanted)))][0]
                prompt = (first + prompt)[: room - 1]
            greedy = SamplingParams(temperature=0.0, max_tokens=int(rng.integers(1, room)), ignore_eos=True)
            rich: Any = {"temperature": 1.0, "seed": i, "logprobs": 20, "frequency_penalty": 0.5, "top_k": 5}
            params = greedy if rng.random() < 0.6 else replace(greedy, **rich)
            wanted[f"r{i}"] = prompt, params
            self.core.add(EngineRequest(f"r{i}", prompt, params))
        tokens: dict[str, list[int]] = {name: [] for name in wanted}
        while self.core.has_work:
            for output in self.core.step():
                assert output.error is None, output.error
                tokens[output.request_id] += output.token_ids
        for name, (prompt, params) in wanted.items():
            if params.temperature == 0.0:
                assert tokens[name] == greedy_by_hand(prompt, params, room - len(prompt))[0]


def built(appetite: Appetite, **sizes: Any) -> tuple[Engine | None, str]:
    """An engine, or why there is none."""
    try:
        return Engine(appetite, **sizes), ""
    except CapacityError as error:
        return None, str(error)


appetites = st.builds(
    Appetite,
    token=st.integers(0, 400),
    sequence=st.integers(0, 2000),
    length=st.integers(0, 100),
    product=st.integers(0, 12),
    padded=st.integers(0, 60),
    row=st.integers(0, 2000),
    kept=st.integers(0, 5000),
    code=st.integers(0, 5000),
)


@given(
    appetite=appetites,
    budget=st.integers(20 * RUN, 90 * RUN),
    max_model_len=st.sampled_from([2, 7, 40]),
    max_num_seqs=st.integers(1, 5),
    extra_tokens=st.integers(0, 30),
    seed=st.integers(0, 100),
)
@example(Appetite(product=12), 60 * RUN, 64, 1, 15, 0)
@example(Appetite(padded=60), 60 * RUN, 40, 4, 12, 0)
@example(Appetite(token=100, length=20), 22 * RUN, None, 3, 9, 0)
@settings(max_examples=20, deadline=None)
def test_traffic_at_the_limits_never_runs_out_of_what_a_warm_up_found_enough(
    appetite: Appetite, budget: int, max_model_len: int | None, max_num_seqs: int, extra_tokens: int, seed: int
) -> None:
    engine, refusal = built(
        appetite,
        budget=budget,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + extra_tokens,
    )
    if engine is None:
        assert re.fullmatch(r".*[0-9.e-]+ GB.*--(memory-budget|max-[a-z-]+).*", refusal)
        return
    plan = engine.plan
    assert plan.total <= budget
    assert engine.core.stats().steps == 0
    engine.device.reset_peak()
    engine.serve(np.random.default_rng(seed), 6)
    assert engine.device.refused == 0
    assert engine.device.peak + engine.device.code <= budget
    engine.core.close()


def test_the_plan_says_what_was_measured() -> None:
    appetite = Appetite(token=100, kept=3000, code=2000)
    plan = Engine(appetite, max_num_seqs=12).plan
    needs = plan.needs
    assert (needs.weights, needs.workspace, needs.buffers, needs.code) == (5000, 1600, 3000, 2000)
    assert needs.margin == margin_for(1600)
    assert needs.measured == {"weights", "workspace", "buffers", "code"}
    assert [name for name, _, _ in plan.items()] == ["weights", "cache", "workspace", "buffers", "code", "margin"]
    assert needs.how("margin") == "allowance"
    assert 60 * RUN - RUN < plan.total <= 60 * RUN


def test_nothing_is_limited_where_nobody_counts_nor_after_the_end() -> None:
    device = CountedDevice(1000, code=10)
    gauge = Gauge(device)  # pyright: ignore[reportArgumentType]
    gauge.limit(100)
    assert device.most == 100
    gauge.limit(None)
    assert device.most == 1000
    uncounted = CpuRuntime(probe("cpu"))
    gauge = Gauge(uncounted)
    gauge.limit(0)
    assert not gauge.counted
    assert uncounted.allocate(1 << 20).numel() == 1 << 20


def test_what_is_not_needed_for_steps_becomes_cache() -> None:
    hungry, modest = (Engine(Appetite(token=token), max_num_seqs=12).plan for token in (900, 10))
    assert modest.num_runs - hungry.num_runs == pytest.approx((hungry.needs.total - modest.needs.total) / RUN, abs=1)


@pytest.mark.parametrize(
    ("appetite", "knobs", "message"),
    [
        (Appetite(token=10_000), {}, r"the largest prompt of one step \(16 tokens\).*--max-num-batched-tokens"),
        (Appetite(sequence=20_000), {}, r"4 prompts in one step.*--max-num-seqs"),
        (Appetite(row=20_000), {}, r"4 prompts in one step.*--max-num-seqs"),
        (Appetite(padded=250), {}, r"4 prompts in one step, one of 64 tokens.*--max-model-len, --max-num-seqs or"),
        (Appetite(length=2_000), {}, r"up to 64 tokens.*--max-num-seqs|longest prompt \(64 tokens\).*--max-model-len"),
        (Appetite(product=50), {}, r"the end of the longest prompt \(64 tokens\).*--max-model-len"),
        (Appetite(token=2000), {}, r"GB are missing\. Weights .*workspace.*lower --max-num-batched-tokens"),
        (Appetite(kept=35_000), {}, r"GB are missing\. .*buffers.*lower --max-num-seqs"),
        (Appetite(code=45_000), {}, r"GB are missing\. .*code.*raise --memory-budget"),
        (Appetite(), {"weights": 50_000}, r"GB are missing\. .*raise --memory-budget"),
        (Appetite(), {"weights": 70_000, "budget": None}, r"GB are missing\. .*free memory"),
        (Appetite(), {"budget": 20 * RUN, "max_model_len": 600}, r"GB are missing\. .*lower --max-model-len"),
        (
            Appetite(),
            {"budget": 120 * RUN, "max_model_len": 800},
            r"only [0-9.e-]+ GB are free .*lower --memory-budget",
        ),
    ],
)
def test_an_over_commit_is_refused_with_the_flag_that_helps(
    appetite: Appetite, knobs: dict[str, Any], message: str
) -> None:
    with pytest.raises(CapacityError, match=message) as caught:
        Engine(appetite, **knobs)
    assert "\n" not in str(caught.value)


def taking(num_bytes: int) -> Callable[[CountedDevice], int]:
    def capture(device: CountedDevice) -> int:
        device.take(num_bytes)
        return num_bytes

    return capture


@pytest.mark.parametrize("takes", [0, 1500, 2000, 2300, 2700, 4000, 4900])
def test_graphs_are_measured_and_the_cache_gets_what_they_leave(takes: int) -> None:
    engine = Engine(Appetite(token=100), max_num_seqs=12, thought=2000, graphs=taking(takes))
    plan = engine.plan
    assert (plan.needs.graphs, plan.needs.how("graphs")) == (takes, "measured")
    assert margin_for(1600) // 2 <= plan.needs.margin <= margin_for(1600)
    assert plan.total <= plan.budget
    assert engine.device.held == plan.weights + plan.cache + takes
    assert engine.device.most == plan.budget
    if takes >= 4000:
        assert plan.total > plan.budget - RUN
        assert engine.steps_tried == 3 * len(list(trials(Sizes(12, 16, 64, VOCAB, LAYOUT, 50))))


def growing() -> Callable[[CountedDevice], int]:
    """Graphs that take more each time."""
    sizes = iter([8000, 12_000])

    def capture(device: CountedDevice) -> int:
        device.take(size := next(sizes))
        return size

    return capture


def ends_in_another_error(device: CountedDevice) -> int:
    try:
        device.take(1 << 20)
    finally:
        raise RuntimeError("the capture was invalidated")


@pytest.mark.parametrize(
    ("graphs", "message"),
    [
        (
            growing(),
            r"graphs of the decode batches take 1.2e-05 GB, .* more than the budget.*lower --max-num-seqs, give",
        ),
        (taking(1 << 20), r"graphs of the decode batches do not fit the [0-9.e-]+ GB.*lower --max-num-seqs, give"),
        (
            ends_in_another_error,
            r"graphs of the decode batches do not fit the [0-9.e-]+ GB.*give --no-graphs, or raise",
        ),
    ],
)
def test_graphs_that_take_too_much_are_refused(graphs: Callable[[CountedDevice], int], message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        Engine(Appetite(token=300), budget=56 * RUN, max_num_seqs=12, thought=2000, graphs=graphs)


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    def fail(device: CountedDevice) -> int:
        raise RuntimeError("the kernel is wrong")

    with pytest.raises(RuntimeError, match="the kernel is wrong"):
        Engine(Appetite(), graphs=fail)


def test_without_a_trial_traffic_may_fail() -> None:
    """The other tests would notice: this engine takes more than it thinks."""
    engine = Engine(Appetite(token=3000), try_out=False)
    assert engine.steps_tried == 0
    with pytest.raises(AssertionError, match="OutOfMemoryError"):
        engine.serve(np.random.default_rng(0), 8)


@given(
    weights=st.integers(0, 200 * GB),
    tokens=st.integers(1, 16384),
    seqs=st.integers(1, 512),
    free=st.integers(0, 300 * GB),
    budget=st.none() | st.integers(0, 300 * GB),
    max_model_len=st.none() | st.integers(2, CONFIG.max_position_embeddings),
    counted=st.booleans(),
    num_graphs=st.integers(0, 20),
)
@settings(max_examples=150, deadline=None)
def test_a_plan_keeps_its_budget_and_holds_a_sequence(
    weights: int,
    tokens: int,
    seqs: int,
    free: int,
    budget: int | None,
    max_model_len: int | None,
    counted: bool,
    num_graphs: int,
) -> None:
    layout = CacheLayout.of(CONFIG, torch.bfloat16)
    needs = estimated_needs(CONFIG, weights, 2, tokens, seqs, counted=counted, num_graphs=num_graphs)
    assert needs.workspace == workspace_bytes(CONFIG, 2, tokens, seqs).total
    assert (needs.code > 0, needs.margin > 0, needs.graphs > 0) == (counted, counted, num_graphs > 0)
    limits: Any = {"budget": budget, "max_model_len": max_model_len, "max_num_seqs": seqs, "on_cpu": not counted}
    total = free * 9 // 10 if counted else free // 2
    least = layout.runs_for(1, max_model_len or layout.page_tokens) * layout.run_bytes
    if needs.total + least > (total if budget is None else budget):
        with pytest.raises(CapacityError, match=r"[0-9.e+-]+ GB are missing"):
            plan_memory(CONFIG, layout, needs, free=free, **limits)
        return
    if needs.total + least > free:
        with pytest.raises(CapacityError, match=r"only [0-9.e+-]+ GB are free"):
            plan_memory(CONFIG, layout, needs, free=free, **limits)
        return
    plan = plan_memory(CONFIG, layout, needs, free=max(free, budget or 0), **limits)
    assert sum(size for _, size, _ in plan.items()) == plan.total <= plan.budget
    assert plan.cache == plan.num_runs * layout.run_bytes
    assert 2 <= plan.num_runs <= layout.runs_for(seqs, max_model_len or CONFIG.max_position_embeddings)
    assert max_model_len in (None, plan.max_model_len)
    assert layout.runs_for(1, plan.max_model_len) <= plan.num_runs
    report = plan.report()
    assert report["total"] == sum(item["bytes"] for item in report["items"])


@pytest.mark.parametrize("rows", [1, 4, 5, 64, 100])
def test_penalties_take_the_bytes_that_are_planned(rows: int) -> None:
    penalties = Penalties(1000, Staging(CPU))
    for trial in trials(Sizes(rows, rows, 8, 1000, LAYOUT, 10)):
        for binding in trial.plan.bindings:
            penalties.forget(binding.row)
            if binding.sampling.penalised:
                penalties.bind(binding.row, binding.sampling, binding.token_ids, binding.num_prompt)
    tables = (penalties._counts, penalties._prompt)
    assert sum(table.nbytes for table in tables) == penalty_bytes(1000, rows)


def test_a_real_engine_answers_the_same_after_a_trial(nano_dir: Path, llm: LLM) -> None:
    prompts = [np.random.default_rng(i).integers(0, 300, n).tolist() for i, n in enumerate((3, 130, 250))]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, frequency_penalty=0.3)
    sizes: dict[str, Any] = {"max_model_len": 300, "max_num_seqs": 3, "max_num_batched_tokens": 128}
    with LLM(nano_dir, device="cpu", dtype="float32", warm_up="full", **sizes) as tried:
        stats = tried._engine.engine.stats()
        assert (stats.steps, stats.prompt_tokens, stats.cached_usage) == (0, 0, 0.0)
        answers = [output.outputs[0].token_ids for output in tried.generate(prompts, params)]
    assert answers == [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
