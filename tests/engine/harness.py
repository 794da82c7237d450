"""An engine over the fold oracle, and what it must answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3hal.dispatch.ops.copy_pages import copy_pages
from k3hal.dispatch.ops.sample import sample
from k3hal.dispatch.ops.step_metadata import step_metadata
from k3hal.engine.cache.arena import CacheArena
from k3hal.engine.cache.keys import NO_CONTEXT
from k3hal.engine.cache.policies import make_policy
from k3hal.engine.cache.prefix import PrefixCache
from k3hal.engine.core import EngineCore
from k3hal.engine.flights import Flights, Later, Runner
from k3hal.engine.graphs import GraphLimits
from k3hal.engine.interface import EngineInfo, EngineOutput, EngineRequest, PrefixContext
from k3hal.engine.request import Request
from k3hal.engine.runner import ModelRunner
from k3hal.engine.sampler import Sampler
from k3hal.engine.scheduler import Scheduler
from k3hal.engine.staging import Staging
from k3hal.engine.step_plan import NOT_YET, StepPlan
from k3hal.sampling_params import SamplingParams

from .closure_runtime import ClosureRuntime
from .fold_model import VOCAB, FoldModel, fold, fold_layout, fold_logits
from .tier_kit import TierKit

CPU = torch.device("cpu")
EOS = 1


class LateFlights(Flights):
    """Steps that run as late as they may: when their answer is asked for, after others were planned behind them."""

    def __init__(self, depth: int) -> None:
        super().__init__(1)
        self.depth = depth

    def _answer(self, runner: Runner, plan: StepPlan) -> Later:
        return Later(runner, plan)


@dataclass
class ToyDrafter:
    """Guesses by the definition of greedy sampling, wrong in every `wrong`-th token; at most `most` a time, or none."""

    most: int
    wrong: int
    proposed: int = 0
    asked: int = 0

    def propose(self, requests: list[Request], limits: list[int]) -> list[np.ndarray]:
        return [self._guess(request.token_ids.tolist(), limit) for request, limit in zip(requests, limits, strict=True)]

    def _guess(self, tokens: list[int], limit: int) -> np.ndarray:
        self.asked += 1
        count = min(limit, self.asked % (self.most + 1))
        prefix, drafts = 0, []
        for token in tokens:
            prefix = fold(prefix, token)
        for _ in range(count):
            self.proposed += 1
            best = int(fold_logits(prefix).argmax())
            drafts.append((best + 1) % VOCAB if self.proposed % self.wrong == 0 else best)
            prefix = fold(prefix, drafts[-1])
        return np.array(drafts, np.int64)


@dataclass
class Harness:
    """A `EngineCore` on tiny pages, with handles on its parts and everything it has put out."""

    num_runs: int = 40
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 64
    max_queue: int = 1000
    page_tokens: int = 4
    policy: str = "none"
    match_unit: int = 4
    tier: dict[str, Any] | None = None
    async_depth: int = 1
    graphs: bool = False
    """Steps are launched ahead, and replays where they only decode."""
    drafts: int = 0
    wrong_drafts: int = 5
    steps: int = 0
    skip_copies: bool = False
    fail_copies: int = 0
    planned: int = 0
    drafted: int = 0
    """Drafts that were planned."""
    ahead: int = 0
    """Tokens that were planned for unseen."""
    surplus: int = 0
    """Tokens that were sampled behind an end."""
    stuck: dict[str, int] = field(default_factory=dict)
    pages_copied: int = 0
    outputs: dict[str, list[EngineOutput]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = FoldModel()
        self.kit = None if self.tier is None else TierKit(**self.tier)
        self.build()

    def build(self) -> None:
        """The engine, with nothing in its memory. What the tier's backing has is still there the next time."""
        layout = fold_layout(self.page_tokens)
        # NaN wherever nobody has written.
        self.arena = CacheArena(layout, torch.full((self.num_runs * layout.run_bytes,), 255, dtype=torch.uint8))
        if self.kit:
            self.kit.build(layout.geometry, self.arena.pages, self.match_unit)
        self.cache = PrefixCache(
            layout.geometry,
            self.num_runs,
            self.max_num_seqs,
            self.max_model_len,
            policy=make_policy(self.policy),
            match_unit=self.match_unit,
            seed=b"the same after a restart",
            clock=lambda: float(self.steps),
            connector=self.kit.tier if self.kit else None,
            connector_timeout=self.kit.timeout if self.kit else 0.0,
        )
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_queue=self.max_queue,
            drafter=ToyDrafter(self.drafts, self.wrong_drafts) if self.drafts else None,
        )
        self.plan_step, self.scheduler.schedule = self.scheduler.schedule, self.schedule
        self.free_left, self.scheduler.free_left = self.scheduler.free_left, self.count_left
        self.runtime = ClosureRuntime() if self.graphs else None
        staging = Staging(CPU, self.runtime)
        sampler = Sampler(VOCAB, self.max_num_seqs, CPU, sample, staging)
        pages = -(-self.max_model_len // self.page_tokens)
        limits = GraphLimits(self.max_num_seqs, pages, least_width=2, drafts=self.drafts)
        self.runner = ModelRunner(
            self.model, self.arena, sampler, step_metadata, self.copy_pages, self.kit.mover if self.kit else None,
            staging=staging, runtime=self.runtime, graphs=limits,
        )  # fmt: skip
        self.runner.prepare()
        limits = (self.max_num_seqs, self.max_num_batched_tokens, self.max_queue)
        info = EngineInfo(self.max_model_len, VOCAB, (EOS,), *limits, "cpu")
        self.core = EngineCore(self.scheduler, self.runner, info)
        self.core.flights = Flights(self.async_depth) if self.graphs else LateFlights(self.async_depth)

    def restart(self, *, in_order: bool) -> None:
        """A new process; the old one wrote what waited to be written only when it ended in order."""
        if in_order and self.kit:
            self.kit.jobs.close()
        self.stuck = {}
        # What was to fail next was the old process's.
        self.model.fail_next = self.fail_copies = 0
        self.build()

    def copy_pages(self, arena: Tensor, src: Tensor, dst: Tensor) -> None:
        if self.fail_copies:
            self.fail_copies -= 1
            raise RuntimeError("simulated loss of copies")
        self.pages_copied += src.numel()
        if not self.skip_copies:
            copy_pages(arena, src, dst)

    def add(
        self,
        name: str,
        prompt: list[int],
        params: SamplingParams,
        priority: int = 0,
        context: PrefixContext = NO_CONTEXT,
    ) -> None:
        self.core.add(EngineRequest(name, prompt, params, priority, context=context))
        self.outputs[name] = []

    def keep(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        for output in outputs:
            before = self.outputs[output.request_id]
            assert not before or before[-1].finish_reason is None, "an output after the last one"
            before.append(output)
        return outputs

    def step(self) -> list[EngineOutput]:
        """One step; every running sequence advances within two that had room for it, and as many as are under way."""
        self.steps += 1
        self.planned = 0
        before = {r.id: (r.num_computed, r.row) for r in self.scheduler.running}
        outputs = self.keep(self.core.step())
        self.check_flights()
        if self.kit:
            self.kit.jobs.pump()
        after = {r.id: (r.num_computed, r.row) for r in self.scheduler.running}
        still = [name for name, now in after.items() if before.get(name) == now]
        full = self.planned >= self.max_num_batched_tokens
        self.stuck = {name: self.stuck.get(name, 0) + (not full) for name in still}
        assert max(self.stuck.values(), default=0) <= 1 + self.async_depth, f"no progress: {self.stuck}"
        return outputs

    def schedule(self) -> tuple[StepPlan, list[Request]] | None:
        scheduled = self.plan_step()
        if scheduled:
            plan = scheduled[0]
            self.planned = max(self.planned, plan.num_tokens)
            self.drafted += int(plan.new_lens[plan.verifies].sum()) - plan.num_verifies
            self.ahead += int((plan.token_ids == NOT_YET).sum())
        return scheduled

    def check_flights(self) -> None:
        """What the steps under way write still belongs to their sequences."""
        for flight in self.core.flights:
            for row, slot in zip(flight.plan.rows.tolist(), flight.plan.slots.tolist(), strict=True):
                assert self.cache.slots[row] == slot, f"slot {slot} was freed before step {flight.plan.epoch} ran"

    def count_left(self) -> None:
        before = self.scheduler.leaving
        self.free_left()
        self.surplus += sum(request.surplus for request in before if request not in self.scheduler.leaving)

    def run(self, max_steps: int = 5000) -> None:
        while self.core.has_work:
            max_steps -= 1
            assert max_steps, "no end in sight"
            self.step()

    def tokens(self, name: str) -> list[int]:
        return [t for output in self.outputs[name] for t in output.token_ids]

    def reason(self, name: str) -> str | None:
        return self.outputs[name][-1].finish_reason

    def assert_clean(self) -> None:
        """Nothing runs, and every page and slot is back once the cache has forgotten what it kept."""
        assert self.scheduler.idle
        assert self.cache.usage == 0.0
        self.cache.forget()
        pool = self.cache.pool
        assert pool.num_free_runs == pool.num_runs - 1
        assert pool.num_free_pages == pool.num_pages - pool.run
        assert not self.cache.slots.any()
        assert not self.cache.num_pages.any()


def greedy_by_hand(
    prompt: list[int], params: SamplingParams, room: int, poison: frozenset[int] = frozenset()
) -> tuple[list[int], str]:
    """The answer to a greedy request from the definition alone: no engine, no cache.

    After a token of `poison` the logits are not finite.
    """
    prefix = 0
    for token in prompt:
        prefix = fold(prefix, token)
    limit = min(params.max_tokens or room, room)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    output: list[int] = []
    while True:
        if (output or prompt)[-1] in poison:
            return output, "error"
        logits = fold_logits(prefix)
        if len(output) < params.min_tokens:
            logits[list(stops)] = -np.inf
        output.append(int(logits.argmax()))
        prefix = fold(prefix, output[-1])
        if output[-1] in stops and len(output) >= params.min_tokens:
            return output, "stop"
        if len(output) >= limit:
            return output, "length"
