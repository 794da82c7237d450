"""What a planted bug is: one of the public reports of spec cache_scheduler §4, put into this engine for a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from k3hal.engine.interface import PrefixContext
from k3hal.sampling_params import SamplingParams

from ..harness import Harness, greedy_by_hand

Plant = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[], None]

LONG = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@dataclass(frozen=True)
class Bug:
    """Number `number` of the list. `plant` puts it into the engine; `check` then fails, and passes without.

    `kind` says what the check is: the fold oracle compares every cell and output, the others measure one thing.
    """

    number: int
    title: str
    kind: str
    plant: Plant
    check: Check


def replaced(target: Any, name: str, new: Callable[..., Any]) -> Plant:
    """Plants `new`, which is called with what it replaces and the arguments."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = getattr(target, name)
        patch.setattr(target, name, lambda *args, **named: new(real, *args, **named))

    return plant


def answers(harness: Harness, prompts: dict[str, list[int]], params: SamplingParams = LONG) -> None:
    """Give the harness prompts, run it to the end, and compare with the definition."""
    for name, prompt in prompts.items():
        harness.add(name, prompt, params, context=PrefixContext(boundaries=(len(prompt) // 2,)))
    harness.run()
    compare(harness, prompts, params)


def compare(harness: Harness, prompts: dict[str, list[int]], params: SamplingParams = LONG) -> None:
    for name, prompt in prompts.items():
        room, poison = harness.max_model_len - len(prompt), frozenset(harness.model.poison)
        expected = greedy_by_hand(prompt, params, room, poison)
        assert (harness.tokens(name), harness.reason(name)) == expected, (name, harness.outputs[name][-1].error)


def cached(harness: Harness, name: str) -> int:
    return harness.outputs[name][-1].num_cached_tokens


REPORTS = {
    1: "vllm-project/vllm#45238",
    2: "vllm-project/vllm#53749",
    3: "vllm-project/vllm#53912",
    4: "vllm-project/vllm#53505",
    5: "vllm-project/vllm#39273",
    6: "vllm-project/vllm#55600",
    7: "vllm-project/vllm#46453",
    8: "vllm-project/vllm#44409",
    9: "vllm-project/vllm#51766",
    10: "vllm-project/vllm#53084",
    11: "vllm-project/vllm#52627",
    12: "ROCm/ATOM#2154",
    13: "vllm-project/vllm#45357",
    14: "vllm-project/vllm#51094",
    15: "vllm-project/vllm#53504",
    16: "vllm-project/vllm#57253",
    17: "vllm-project/vllm#40707",
    18: "vllm-project/vllm#47930",
    19: "vllm-project/vllm#50551",
    20: "vllm-project/vllm#25780",
    21: "vllm-project/vllm#52527",
    22: "vllm-project/vllm#51039",
    23: "sgl-project/sglang#34676",
    24: "sgl-project/sglang#22935",
    25: "sgl-project/sglang#38000",
    26: "sgl-project/sglang#31474",
    27: "ggml-org/llama.cpp#26185",
    28: "sgl-project/sglang#24380",
    29: "vllm-project/vllm-ascend#14314",
    30: "SemiAnalysisAI/InferenceX#2374",
}
"""Where each was reported, by its number in the list."""
