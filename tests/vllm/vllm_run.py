"""Real vLLM beside K3HAL's own engine: the same prompts, greedy, by both."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from k3hal import LLM, SamplingParams

DRIVER = Path(__file__).with_name("drive.py")
DEADLINE = 400
"""Seconds; a start takes half a minute on a quiet machine."""

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: `make test-vllm` has it"
)


@dataclass(frozen=True, slots=True)
class Round:
    """Prompts that are sent at once."""

    prompts: list[list[int]]
    max_tokens: int = 24


@dataclass(frozen=True, slots=True)
class Answers:
    """What vLLM answered: by rounds and prompts, tokens and how many of the prompt's were cached."""

    platform: str
    tokens: list[list[list[int]]]
    cached: list[list[int]]
    preempted: float
    log: str = field(repr=False)


def prompt(length: int, seed: int) -> list[int]:
    """Ordinary tokens of the synthetic vocabulary, in no order that repeats soon."""
    return [(seed * 101 + i * (7 + seed) + i * i // 5) % 360 for i in range(length)]


def run_vllm(folder: Path, model: Path, rounds: list[Round], *, processes: bool = False, **engine: Any) -> Answers:
    """Answer the rounds in a process of its own, with vLLM's own processes or all in that one.

    Each of several ranks gets one processor.
    """
    job, answer = folder / "job.json", folder / "answer.json"
    options = {"model": str(model), "skip_tokenizer_init": True, "enforce_eager": True, "disable_log_stats": False}
    options |= {"max_model_len": 1024, "max_num_seqs": 8} | engine
    asked = [{"prompts": r.prompts, "max_tokens": r.max_tokens} for r in rounds]
    job.write_text(json.dumps({"engine": options, "rounds": asked}))
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if (ranks := engine.get("tensor_parallel_size", 1)) > 1:
        processors = sorted(os.sched_getaffinity(0))
        if len(processors) < ranks:
            pytest.skip(f"{ranks} ranks need as many processors")
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, processors[:ranks]))
    # Not from a folder where packages of vLLM's names could be.
    ran = subprocess.run(
        [sys.executable, "-P", str(DRIVER), str(job), str(answer)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    log = ran.stdout + ran.stderr
    assert ran.returncode == 0 and answer.is_file(), log[-6000:]
    found = json.loads(answer.read_text())
    by_round = found["rounds"]
    return Answers(
        found["platform"], [r["tokens"] for r in by_round], [r["cached"] for r in by_round], found["preempted"], log
    )


class Own:
    """K3HAL's own engine over the same checkpoint."""

    def __init__(self, model: Path, dtype: str, **options: Any) -> None:
        self.llm, self.dtype = LLM(str(model), device="cpu", dtype=dtype, max_model_len=2048, **options), dtype

    @functools.cache  # noqa: B019 - one object for a run of tests
    def _answer(self, ids: tuple[int, ...], max_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return list(self.llm.generate([list(ids)], params)[0].outputs[0].token_ids)

    def agrees(self, rounds: list[Round], found: Answers) -> None:
        """Every token is the own engine's; in bfloat16 the first one that is not may be as good as it."""
        for asked, tokens in zip(rounds, found.tokens, strict=True):
            for ids, got in zip(asked.prompts, tokens, strict=True):
                wanted = self._answer(tuple(ids), asked.max_tokens)
                if got != wanted:
                    self._is_a_tie(ids, wanted, got)

    def _is_a_tie(self, ids: list[int], wanted: list[int], got: list[int]) -> None:
        assert len(got) == len(wanted)
        first = next(i for i, (a, b) in enumerate(zip(wanted, got, strict=True)) if a != b)
        where = f"token {first} of the answer to a prompt of {len(ids)}: {got[first]}, not {wanted[first]}"
        assert self.dtype == "bfloat16", where
        logits = self.llm.logits(ids + wanted[:first])[-1]
        gap = float(logits[wanted[first]] - logits[got[first]])
        assert gap < 0.02 * float(logits.std()), f"{where}, whose logit is {gap} below"
