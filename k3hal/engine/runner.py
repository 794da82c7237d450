"""Executes step plans with a model over a cache arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from k3hal.dispatch.observe import Step, step_observers
from k3hal.engine.batch import build_batch
from k3hal.engine.cache.arena import CacheArena
from k3hal.engine.cache.interface import PageCopies
from k3hal.engine.sampler import Sampler
from k3hal.engine.step_plan import BEFORE_ALL, NOT_YET, StepPlan, StepResult
from k3hal.engine.tier.mover import Mover
from k3hal.engine.verify import sample_drafts
from k3hal.model.batch import CacheViews, StepBatch


class StepModel(Protocol):
    """What the runner needs of a model."""

    def forward(self, batch: StepBatch, cache: CacheViews, aux_layers: Sequence[int] = ()) -> Tensor:
        """Hidden states [T, D] after the final norm."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [R, V] of hidden states [R, D]."""
        ...


@runtime_checkable
class VerifyingModel(StepModel, Protocol):
    """A model that takes drafts."""

    def commit(self, batch: StepBatch, cache: CacheViews, kept: Tensor) -> None:
        """Leave the state of each sequence of `batch.verify` as after its first `kept` int32 [N] new tokens.

        Called once after each forward pass over such a batch, before the next one.
        """
        ...


class ModelRunner:
    """Owns the model, the arena and the sampler. `step_metadata` and `copy_pages` are the bound operators.

    The step observers in force when it is made are told of every step (`dispatch/observe.py`).
    """

    def __init__(
        self,
        model: StepModel,
        arena: CacheArena,
        sampler: Sampler,
        step_metadata: Callable[..., Any],
        copy_pages: Callable[..., Any],
        mover: Mover | None = None,
    ) -> None:
        self.model = model
        self.arena = arena
        self._sampler = sampler
        self._step_metadata = step_metadata
        self._copy_pages = copy_pages
        self._mover = mover
        self._observers = step_observers()
        self._epoch = BEFORE_ALL

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises `RuntimeError` on a plan out of order; whatever the model raises passes through.

        When it raises, nothing moves to or from the external tier any more.
        """
        try:
            result = self._execute(plan)
        except BaseException:
            if self._mover:
                self._mover.drain()
            raise
        return replace(result, transferred=self._mover.finished()) if self._mover else result

    def _execute(self, plan: StepPlan) -> StepResult:
        if not plan.num_seqs:
            self._begin(plan)
            return StepResult(plan.epoch, [])
        for binding in plan.bindings:
            self._sampler.bind(binding)
        if plan.num_verifies:
            _verifying(self.model)
        hidden, batch = self._forward(plan)
        if not plan.sampled.size:
            return StepResult(plan.epoch, [])
        logits = self.model.logits(hidden[batch.logit_rows])
        if not plan.num_verifies:
            token_ids, logprobs = self._sampler.sample(logits, plan.rows[plan.sampled], plan.positions)
            return StepResult(plan.epoch, token_ids, logprobs, failures=self._sampler.take_failures())
        result = sample_drafts(plan, logits, self._sampler)
        self._commit(plan, batch, result.accepted)
        return replace(result, failures=self._sampler.take_failures())

    @torch.inference_mode()
    def score(self, plan: StepPlan) -> Tensor:
        """Run one step and return the logits of every token, fp32 [T, V] on the device. Samples nothing."""
        hidden, batch = self._forward(plan, all_logits=True)
        return self.model.logits(hidden[batch.logit_rows])

    def _forward(self, plan: StepPlan, *, all_logits: bool = False) -> tuple[Tensor, StepBatch]:
        self._begin(plan)
        device = self.arena.pages.device
        page_tokens, token_ids = self.arena.layout.page_tokens, self._token_ids(plan)
        batch = build_batch(plan, self._step_metadata, page_tokens, device, token_ids, all_logits=all_logits)
        hidden = self._observed(plan, batch) if self._observers else self.model.forward(batch, self.arena.views)
        return hidden, batch

    def _begin(self, plan: StepPlan) -> None:
        """Take a plan in order, and move the memory it says."""
        if plan.epoch <= self._epoch:
            raise RuntimeError(f"step {plan.epoch} came after step {self._epoch}")
        self._epoch = plan.epoch
        if self._mover:
            self._mover.store(plan.transfers.stores)
        self._copy(plan.copies)
        if self._mover:
            self._mover.load(plan.transfers.loads)

    def _commit(self, plan: StepPlan, batch: StepBatch, accepted: list[int]) -> None:
        """Leave the states of the sequences that verified as after what was accepted."""
        kept = torch.tensor(accepted, dtype=torch.int32, device=self.arena.pages.device) + 1
        _verifying(self.model).commit(batch, self.arena.views, kept)

    def _token_ids(self, plan: StepPlan) -> Tensor:
        """The step's tokens on the device, those that an earlier step sampled among them."""
        token_ids = torch.from_numpy(plan.token_ids).to(self.arena.pages.device)
        late = np.flatnonzero(plan.token_ids[: plan.num_decodes] == NOT_YET)
        if late.size:
            index = torch.from_numpy(late).to(token_ids.device)
            token_ids = token_ids.clone()  # the plan stays as it is
            token_ids[index] = self._sampler.last_tokens(plan.rows[late])
        return token_ids

    def _observed(self, plan: StepPlan, batch: StepBatch) -> Tensor:
        views = self.arena.views
        step = Step(
            run=lambda: self.model.forward(batch, views),
            num_decodes=plan.num_decodes,
            slots=plan.slots,
            context_lens=plan.context_lens,
            new_lens=plan.new_lens,
            states=self.arena.slots,
            kv=views.kv,
            kv_rows=batch.kv_rows,
            moved=len(plan.copies) > 0,
        )
        for observer in self._observers:
            observer.stepping(step)
        hidden = step.run()
        for observer in self._observers:
            observer.stepped(step, hidden)
        return hidden

    def _copy(self, copies: PageCopies) -> None:
        if len(copies):
            device = self.arena.pages.device
            src, dst = torch.from_numpy(copies.src).to(device), torch.from_numpy(copies.dst).to(device)
            self._copy_pages(self.arena.pages, src, dst)


def _verifying(model: StepModel) -> VerifyingModel:
    if not isinstance(model, VerifyingModel):
        raise RuntimeError(f"a step has drafts, and {type(model).__name__} verifies none")
    return model
