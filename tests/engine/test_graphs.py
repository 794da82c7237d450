"""Decoding through graphs, and steps launched ahead: the same outputs, no waiting, nothing else touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k3hal.dispatch.plan import DispatchPlan
from k3hal.engine import build
from k3hal.engine.graphs import GraphLimits, batch_buckets, not_capturable, width_buckets
from k3hal.engine.step_plan import StepPlan
from k3hal.engine.step_times import StepTimes
from k3hal.errors import BackendError, EngineDeadError
from k3hal.llm import LLM
from k3hal.sampling_params import SamplingParams

from .closure_runtime import ClosureGraph, ClosureRuntime
from .harness import Harness, greedy_by_hand
from .test_async_depth import MIXED

LONG = SamplingParams(temperature=0.0, max_tokens=22, ignore_eos=True)
PROMPT = [2, 3, 4, 5, 6, 7]
SIZES: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4}


def test_buckets_grow_to_the_most_there_may_be() -> None:
    assert batch_buckets(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert batch_buckets(200) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 200]
    assert batch_buckets(1) == [1] and batch_buckets(3) == [1, 2, 3]
    assert width_buckets(1) == [1] and width_buckets(36) == [36] and width_buckets(8192) == [36, 288, 2304, 8192]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_decoding_replays_and_its_launch_waits_for_nothing(depth: int) -> None:
    harness = Harness(graphs=True, async_depth=depth, num_runs=60, max_num_seqs=6, max_num_batched_tokens=64)
    runner, runtime, waited = harness.runner, harness.runtime, []
    assert runtime is not None and runtime.captured == len(batch_buckets(6)) * len(width_buckets(16, 2))
    launch = runner.launch

    def counted(plan: StepPlan) -> Any:
        before = runtime.waits
        answer = launch(plan)
        waited.append(runtime.waits - before)
        return answer

    runner.launch = counted
    prompts = {f"r{i}": [*PROMPT, i + 2] for i in range(8)}
    for name, prompt in prompts.items():
        harness.add(name, prompt, LONG)
    harness.run()
    harness.core.close()
    assert runner.replays > 20 and not any(waited)
    for name, prompt in prompts.items():
        assert harness.tokens(name) == greedy_by_hand(prompt, LONG, 57)[0]


def served_by_closures(patch: pytest.MonkeyPatch) -> list[ClosureRuntime]:
    """Engines for the CPU get a `ClosureRuntime` from now on; those are in the list."""
    made: list[ClosureRuntime] = []

    def runtime_for(device: Any) -> ClosureRuntime:
        made.append(ClosureRuntime(device))
        return made[-1]

    patch.setattr(build, "runtime_for", runtime_for)
    patch.setattr(build, "not_capturable", lambda _: [])
    return made


def answers(folder: Path, **options: Any) -> tuple[list[Any], LLM]:
    """What nano gives to every kind of request, several times the sequences that run at once."""
    with LLM(folder, **SIZES, **options) as model:
        prompts = [[3 + i] * (5 + 7 * i) for i in range(len(MIXED))]
        outputs = model.generate(prompts + prompts[::-1], [*MIXED, *MIXED[::-1]])
    return [(one.token_ids, one.finish_reason, one.logprobs) for output in outputs for one in output.outputs], model


def test_the_nano_model_answers_as_without_graphs(nano_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = answers(nano_dir)
    runtimes = served_by_closures(monkeypatch)
    for options in ({}, {"async_depth": 1}, {"async_depth": 3}, {"graphs": False}):
        assert answers(nano_dir, **options)[0] == expected, options
    assert [runtime.captured for runtime in runtimes] == [3, 3, 3, 0]


def test_what_may_not_be_captured_is_named_and_runs_without_graphs(
    nano_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtimes = served_by_closures(monkeypatch)
    monkeypatch.setattr(build, "not_capturable", not_capturable)
    with LLM(nano_dir, **SIZES) as model:
        assert model.generate([[5, 6]], LONG)[0].outputs[0].token_ids
    assert [runtime.captured for runtime in runtimes] == [0]
    assert "decoding runs without graphs: " in caplog.text and "kda_decode=cpu." in caplog.text
    assert "prefill" not in caplog.text


def test_padding_touches_nothing_that_is_somebodys(nano_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all memory a replay writes the null slot and pages at most, and what one sequence alone would write."""
    plain, padded = (_decoded_once(nano_dir, monkeypatch, buckets) for buckets in ((1,), (4,)))
    assert torch.equal(plain[0], padded[0])
    null = plain[2]
    assert torch.equal(plain[1][null:], padded[1][null:])
    assert bool((padded[1][null:] == 0xA5).any()), "nothing was left untouched"


def _decoded_once(folder: Path, patch: pytest.MonkeyPatch, buckets: tuple[int, ...]) -> tuple[Any, Any, int]:
    """Logits of one token decoded in slot 2 through a graph of the only bucket, the arena after it as bytes, and how
    many of those belong to nobody."""
    served_by_closures(patch)
    prepare = build.ModelRunner.prepare
    patch.setattr(build.ModelRunner, "prepare", lambda self: prepare(self, buckets))
    built = build.build_engine(str(folder), **SIZES)
    arena = built.runner.arena
    arena.pages.fill_(0xA5)
    run = arena.layout.pages_per_slot
    for view in (*arena.views.conv, *arena.views.state):
        view[2].zero_()
    for view in arena.views.kv:
        view[5 * run].zero_()
    one = np.ones(1, np.int32)
    plan = StepPlan(
        epoch=1, num_decodes=1, rows=0 * one, slots=2 * one, context_lens=3 * one, new_lens=one,
        page_table=np.array([[5 * run]], np.int32), token_ids=np.array([7]), sampled=np.array([0]),
        positions=np.array([0]),
    )  # fmt: skip
    built.runner.execute(plan)
    assert built.runner.replays == 1
    graphs = built.runner._graphs
    assert graphs is not None
    patch.undo()
    logits = graphs._logits
    assert logits is not None
    return logits[0].clone(), arena.pages.clone(), run


@dataclass
class Stale(ClosureRuntime):
    """Its graphs do nothing from the `good`-th on."""

    good: int = 0

    def capture(self, work: Callable[[], None], pool: Any = None) -> ClosureGraph:
        graph = super().capture(work, pool)
        return graph if self.captured <= self.good else ClosureGraph(lambda: None)


def test_a_graph_that_gives_other_logits_is_refused_at_once(nano_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served_by_closures(monkeypatch)
    monkeypatch.setattr(build, "runtime_for", lambda device: Stale(device, good=1))
    with pytest.raises(
        BackendError, match=r"the graph for decoding with 2 sequences of 1 pages gives other logits .*--no-graphs"
    ):
        LLM(nano_dir, **SIZES)


@pytest.mark.parametrize("buckets", [[], [0, 2], [9]])
def test_buckets_that_cannot_be_are_refused(buckets: list[int]) -> None:
    with pytest.raises(ValueError, match="graphs for"):
        Harness(graphs=True).runner.prepare(buckets)


def test_what_is_wider_than_any_graph_runs_without() -> None:
    harness = Harness(graphs=True, max_num_seqs=2)
    harness.runner._limits = GraphLimits(2, 3)
    harness.runner.prepare()
    harness.add("a", PROMPT, LONG)
    harness.run()
    assert harness.tokens("a") == greedy_by_hand(PROMPT, LONG, 58)[0]
    assert 0 < harness.runner.replays <= 6


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_that_cannot_be_launched_ends_its_requests_and_those_behind_it(depth: int) -> None:
    harness = Harness(graphs=True, async_depth=depth, num_runs=12, policy="interval:4", max_num_seqs=2)
    for name in ("a", "b", "c"):
        harness.add(name, [*PROMPT, len(name)], LONG)
    for _ in range(4):
        harness.step()
    harness.model.fail_next = 1
    harness.run()
    assert {harness.reason("a"), harness.reason("b")} == {"error"}
    assert harness.outputs["a"][-1].error == "RuntimeError: simulated kernel failure"
    assert harness.tokens("c") == greedy_by_hand([*PROMPT, 1], LONG, 57)[0]
    harness.assert_clean()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_device_that_is_lost_ends_the_engine_at_once(depth: int) -> None:
    harness = Harness(graphs=True, async_depth=depth)
    for name in ("a", "b"):
        harness.add(name, PROMPT, LONG)
    for _ in range(3):
        harness.step()
    assert harness.runtime is not None
    harness.runtime.lost = True
    outputs = harness.step()
    assert {(o.request_id, o.finish_reason) for o in outputs} == {("a", "error"), ("b", "error")}
    assert "failed and takes no more work: RuntimeError: simulated loss" in (outputs[0].error or "")
    with pytest.raises(EngineDeadError, match="simulated loss of the device"):
        harness.add("late", [2], LONG)
    assert harness.step() == []


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_interrupt_passes_through_launched_steps(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(graphs=True, async_depth=depth, num_runs=12, policy="interval:4")
    for name in ("a", "b"):
        harness.add(name, [*PROMPT, len(name)], LONG)
    for _ in range(4):
        harness.step()

    def interrupted(_: StepPlan) -> bool:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(harness.runner._graphs, "fits", interrupted)
    with pytest.raises(KeyboardInterrupt):
        harness.run()
    harness.keep(harness.core.abort_all())
    assert not harness.core.has_work and not harness.cache.usage
    harness.add("next", PROMPT, LONG)
    harness.run()
    assert harness.tokens("next") == greedy_by_hand(PROMPT, LONG, 58)[0]
    harness.assert_clean()


def test_times_are_kept_for_every_step() -> None:
    harness = Harness(graphs=True, async_depth=2)
    harness.core.timings = harness.runner.timings = times = StepTimes(harness.runtime)
    harness.add("a", PROMPT, LONG)
    harness.run()
    assert len(times.launch) == len(times.wait) == len(times.deliver) == len(times.device()) >= 20
    assert len(times.idle()) == len(times.device()) - 1
    assert len(times.schedule) >= len(times.launch)
    assert min(times.launch) > 0 and 0 < times.idle_share() < 1
    assert StepTimes().idle_share() == 0.0


def plan_of(*entries: tuple[str, str, str, bool]) -> DispatchPlan:
    from types import SimpleNamespace as Of

    made = [
        Of(request=Of(op=op, phase=phase), decision=Of(provider=provider, graph_safe=safe))
        for op, phase, provider, safe in entries
    ]
    return Of(entries=made)  # pyright: ignore[reportReturnType]


def test_only_what_decodes_must_be_capturable() -> None:
    plan = plan_of(
        ("kda_prefill", "prefill", "x.a", False),
        ("sample", "any", "x.b", False),
        ("linear", "any", "x.c", True),
        ("mla_decode", "decode", "x.d", False),
        ("mla_decode", "decode", "x.d", False),
    )
    assert not_capturable(plan) == ["mla_decode=x.d"]
