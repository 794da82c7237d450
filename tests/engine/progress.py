"""Random configurations of scheduler and cache, run by a worker that only keeps count of what each row has computed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from k3hal.engine.cache.geometry import CacheGeometry
from k3hal.engine.cache.policies import make_policy
from k3hal.engine.cache.prefix import PrefixCache
from k3hal.engine.cache.seen import SeenUnits
from k3hal.engine.core import EngineCore
from k3hal.engine.interface import EngineInfo, EngineRequest, PrefixContext
from k3hal.engine.request import Request
from k3hal.engine.scheduler import Scheduler
from k3hal.engine.step_plan import StepPlan, StepResult
from k3hal.errors import QueueFullError, RequestError
from k3hal.sampling_params import SamplingParams

from .harness import LateFlights

VOCAB = 50
_POLICIES = ("none", "prompt", "second-hit", "interval:1", "interval:7", "interval:40", "cost", "cost")


@dataclass
class CountingWorker:
    """Answers any token, takes any number of drafts, and knows how many tokens each row has computed."""

    rng: random.Random
    computed: dict[int, int] = field(default_factory=dict)
    steps: int = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        for binding in plan.bindings:
            self.computed.pop(binding.row, None)
        accepted = [self.rng.randint(0, int(new) - 1) for new in plan.new_lens[plan.verifies]]
        taken = plan.new_lens.tolist()
        taken[plan.verifies] = [1 + count for count in accepted]
        assert (plan.new_lens > 0).all(), "a sequence with nothing to compute"
        assert len(set(plan.rows.tolist())) == plan.num_seqs, "a row twice in a step"
        for row, context, new in zip(plan.rows.tolist(), plan.context_lens.tolist(), taken, strict=True):
            assert self.computed.get(row, context) == context, f"row {row} goes on where it is not"
            self.computed[row] = context + new
        counts = [1 + accepted[i - plan.verifies.start] if plan.verifies.start <= i < plan.verifies.stop else 1
                  for i in plan.sampled.tolist()]  # fmt: skip
        return StepResult(plan.epoch, [self.rng.randrange(VOCAB) for _ in range(sum(counts))], None, accepted)


@dataclass
class AnyDrafts:
    rng: random.Random
    most: int

    def propose(self, requests: list[Request], limits: list[int]) -> list[np.ndarray]:
        return [np.zeros(self.rng.randint(0, self.most), np.int64) for _ in requests]


@dataclass
class Progress:
    """One configuration. `refused` counts the requests that were, by why."""

    seed: int
    steps: int = 0
    ended: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    stuck: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.budget = rng.choice([1, 2, 3, 7, 16, 63, 64, 65, 128, 500])
        seqs = rng.randint(1, min(self.budget, 12))
        self.max_len = rng.choice([16, 40, 64] if self.budget < 60 else [16, 64, 200, 400])
        page_tokens, run = rng.choice([1, 4, 16, 64]), rng.choice([1, 2, 3, 5, 9])
        geometry = CacheGeometry(page_tokens=page_tokens, page_bytes=10, slot_bytes=10 * run, has_kv=rng.random() < 0.9)
        need = -(-self.max_len // page_tokens) // run
        num_runs = rng.choice([4, 3 + need, 3 + need, 4 + need, 4 + need + need // 2, 4 + 2 * need, 4 + 8 * need])
        self.cache = PrefixCache(
            geometry, num_runs, seqs, self.max_len,
            policy=make_policy(rng.choice(_POLICIES)), match_unit=rng.choice([1, 4, 5, 16, 64]),
            clock=lambda: float(self.steps),
        )  # fmt: skip
        self.cache.index.seen = SeenUnits(1 << 10)
        self.depth = rng.randint(1, 3)
        drafter = AnyDrafts(rng, rng.choice([1, 3, 8])) if rng.random() < 0.5 else None
        self.scheduler = Scheduler(
            self.cache, max_num_seqs=seqs, max_num_batched_tokens=self.budget, max_queue=rng.choice([0, 100, 100]),
            drafter=drafter,
        )  # fmt: skip
        info = EngineInfo(self.max_len, VOCAB, (1,), seqs, self.budget, 100, "none")
        self.worker = CountingWorker(rng)
        self.core = EngineCore(self.scheduler, self.worker, info)
        self.core.flights = LateFlights(self.depth)
        self.prompts: list[list[int]] = []

    def play(self) -> Progress:
        """Requests come, some are aborted, all that were admitted end. Raises `AssertionError` on a standstill."""
        for number in range(self.rng.randint(1, 12)):
            self._submit(f"r{number}")
            for _ in range(self.rng.choice([0, 0, 1, 5])):
                self._step()
            if self.rng.random() < 0.1:
                self.core.abort([f"r{self.rng.randint(0, number)}"])
        left = 200 + 40 * sum(len(prompt) + self.max_len for prompt in self.prompts)
        while self.core.has_work:
            left -= 1
            assert left, "no end in sight"
            self._step()
        assert self.scheduler.idle and self.cache.usage == 0.0
        return self

    def _submit(self, name: str) -> None:
        rng = self.rng
        if self.prompts and rng.random() < 0.5:
            shared = rng.choice(self.prompts)
            prompt = shared[: rng.randint(1, len(shared))] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 20))]
        else:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, self.max_len + 2))]
        params = SamplingParams(temperature=0.0, max_tokens=rng.choice([1, 5, 12, 40]), ignore_eos=rng.random() < 0.5)
        context = PrefixContext(boundaries=(len(prompt) // 2,) if rng.random() < 0.5 else ())
        try:
            self.core.add(EngineRequest(name, prompt, params, rng.choice([0, 0, 0, 1]), context=context))
        except (RequestError, QueueFullError) as error:
            self.refused[type(error).__name__ if str(error) else "without a reason"] += 1
        else:
            self.prompts.append(prompt)

    def _step(self) -> None:
        """A step is planned or answered, and no sequence that runs is passed over for longer than two with room."""
        self.steps += 1
        before = self._places()
        planned: list[int] = []
        schedule: Any = self.scheduler.schedule

        def counted() -> Any:
            scheduled = schedule()
            planned.append(scheduled[0].num_tokens if scheduled else 0)
            assert planned[-1] <= self.budget
            return scheduled

        self.scheduler.schedule = counted
        ran = self.worker.steps + bool(self.core.has_work)
        outputs = self.core.step()
        assert self.worker.steps == ran, "work is left, and no step ran"
        del self.scheduler.schedule
        self.ended += sum(output.finish_reason is not None for output in outputs)
        after = self._places()
        full = max(planned, default=0) >= self.budget
        still = [name for name in after if before.get(name) == after[name]]
        self.stuck = {name: self.stuck.get(name, 0) + (not full) for name in still}
        assert max(self.stuck.values(), default=0) <= 1 + self.depth, f"no progress: {self.stuck}"

    def _places(self) -> dict[str, tuple[int, int]]:
        return {r.id: (r.num_computed + r.pending, r.row) for r in self.scheduler.running}


def play_configurations(seeds: range) -> Counter[str]:
    """What happened in all of them."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            played = Progress(seed).play()
        except Exception as error:
            raise AssertionError(f"configuration {seed}: {error}") from error
        seen += played.refused
        seen += Counter(configurations=1, steps=played.steps, ended=played.ended)
        seen += Counter(preempted=played.scheduler.preemptions, hits=played.cache.stats.cached_tokens)
    return seen
