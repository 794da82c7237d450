"""A real device's memory: what a warm-up lets pass serves traffic at its limits, what it refuses is refused by name."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k3hal.dispatch.probe import probe
from k3hal.dispatch.runtime import DeviceRuntime, runtime_for
from k3hal.engine.interface import EngineRequest
from k3hal.engine.memory import GB, MemoryPlan
from k3hal.errors import CapacityError
from k3hal.llm import LLM
from k3hal.sampling_params import SamplingParams

pytestmark = pytest.mark.device
SECONDS = 60.0
SIZES: dict[str, Any] = {
    "device": "cuda",
    "memory_budget": 4.0,
    "max_model_len": 20_000,
    "max_num_seqs": 48,
    "max_num_batched_tokens": 4096,
}


@pytest.fixture(scope="module", autouse=True)
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is here")


@pytest.fixture
def runtime() -> DeviceRuntime:
    return runtime_for(probe("cuda"))


@contextmanager
def started(folder: Path, runtime: DeviceRuntime, **sizes: Any) -> Iterator[tuple[LLM, int]]:
    """An engine, and the bytes that tensors held before it."""
    runtime.reset_peak()
    before = runtime.memory().held
    assert before is not None
    with LLM(folder, **(SIZES | sizes)) as model:
        yield model, before


def plan_of(model: LLM) -> MemoryPlan:
    assert model._built is not None
    return model._built.memory


def params(rng: np.random.Generator, most: int) -> SamplingParams:
    tokens = int(rng.integers(1, most + 1))
    if rng.random() < 0.5:
        return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return SamplingParams(
        temperature=1.0,
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias={3: 1.0},
        logprobs=20,
        max_tokens=tokens,
        ignore_eos=True,
    )


def test_a_minute_at_the_limits_runs_out_of_nothing(nano_dir: Path, runtime: DeviceRuntime) -> None:
    rng = np.random.default_rng(0)
    with started(nano_dir, runtime) as (model, before):
        core, memory = model._engine.engine.core, plan_of(model)
        print(memory)
        assert {"weights", "workspace", "buffers", "code", "graphs"} <= memory.needs.measured
        room = memory.max_model_len
        assert room == SIZES["max_model_len"]
        count, ended, deadline = 0, 0, time.monotonic() + SECONDS
        while time.monotonic() < deadline or core.has_work:
            while time.monotonic() < deadline and core.stats().num_waiting + core.stats().num_running < 64:
                length = int(rng.choice([1, 100, 4096, room - 200, int(rng.integers(1, room - 200))]))
                prompt = rng.integers(0, 300, length).tolist()
                core.add(EngineRequest(f"r{count}", prompt, params(rng, 200)))
                count += 1
            for output in core.step():
                assert output.error is None, output.error
                ended += output.finish_reason is not None
        figures = runtime.memory()
        assert figures.peak is not None
        print(f"{ended} requests, {core.stats().steps} steps, peak {(figures.peak - before) / GB:.3f} GB")
        assert ended == count > 50
        assert figures.peak - before <= memory.budget - memory.needs.code


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"memory_budget": 0.9, "max_num_seqs": 400}, "--max-num-seqs|--memory-budget"),
        (
            {"memory_budget": 1.2, "max_num_batched_tokens": 200_000, "max_model_len": 131_072},
            "--max-num-batched-tokens",
        ),
        ({"memory_budget": 1.2, "max_num_batched_tokens": 512, "max_model_len": 131_072}, "--max-model-len"),
    ],
)
def test_too_small_a_budget_is_refused_by_name(
    nano_dir: Path, runtime: DeviceRuntime, sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CapacityError, match=rf"[0-9.]+ GB.*({message})") as caught:
        LLM(nano_dir, **(SIZES | sizes))
    print(caught.value)
    assert "\n" not in str(caught.value)


def test_the_steps_that_are_tried_change_no_output(nano_dir: Path, runtime: DeviceRuntime) -> None:
    prompts = [[(7 * i + j) % 300 for j in range(30 + 200 * i)] for i in range(6)]
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    found = []
    for warm_up in ("off", "full"):
        with started(nano_dir, runtime, dtype="float32", warm_up=warm_up) as (model, _):
            assert model._engine.engine.stats().steps == 0
            found.append([output.outputs[0].token_ids for output in model.generate(prompts, greedy)])
    assert found[0] == found[1]


def test_a_closed_engine_gives_its_memory_back(nano_dir: Path, runtime: DeviceRuntime) -> None:
    figures = runtime.memory()
    with started(nano_dir, runtime) as (model, before):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(4 * GB, dtype=torch.uint8, device="cuda")
        held = runtime.memory().held
        assert held is not None
        assert held - before > plan_of(model).cache // 2
    del model
    gc.collect()
    runtime.reset_peak()
    after = runtime.memory().held
    assert after is not None
    assert after - before < 0.3 * GB
    assert torch.empty(min(5 * GB, figures.free // 2), dtype=torch.uint8, device="cuda").numel()
