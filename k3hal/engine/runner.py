"""Executes step plans with a model over a cache arena."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3hal.dispatch.observe import Step, must_see_every_call, step_observers
from k3hal.dispatch.runtime import CapturesParts, DeviceRuntime
from k3hal.engine.batch import build_batch
from k3hal.engine.cache.arena import CacheArena
from k3hal.engine.cache.interface import PageCopies
from k3hal.engine.decode_graphs import DecodeGraphs
from k3hal.engine.draws import Drawn
from k3hal.engine.graphs import Around, GraphLimits
from k3hal.engine.pieces import StepPieces
from k3hal.engine.sampler import Sampler
from k3hal.engine.staging import Staging
from k3hal.engine.step_model import StepModel, VerifyingModel
from k3hal.engine.step_plan import BEFORE_ALL, StepPlan, StepResult
from k3hal.engine.step_times import StepTimes
from k3hal.engine.tier.mover import Mover
from k3hal.engine.verify import VerifyDraw, sample_drafts, verified_rows
from k3hal.engine.verify_graphs import VerifyGraphs
from k3hal.errors import DeviceLostError
from k3hal.model.batch import StepBatch


class Launched:
    """A step whose work is queued on the device, or done."""

    def __init__(self, runner: ModelRunner, answer: StepResult, draw: Drawn | None = None) -> None:
        self._runner, self._answer, self._draw = runner, answer, draw

    def result(self) -> StepResult:
        """Wait for what it sampled. Raises whatever went wrong on the device."""
        return self._runner.finish(self._answer, self._draw)


class ModelRunner:
    """Owns the model, the arena and the sampler. `step_metadata` and `copy_pages` are the bound operators.

    The step observers in force when it is made are told of every step (`dispatch/observe.py`). On a device that works
    while the host goes on (`staging`, which the sampler shares), `launch` queues steps one behind the other. With
    `graphs` and a runtime that has them, steps without prompts are replays, once `prepare` has captured them, and small
    ones with prompts are but for attention; not where operators or steps are observed.
    """

    def __init__(
        self,
        model: StepModel,
        arena: CacheArena,
        sampler: Sampler,
        step_metadata: Callable[..., Any],
        copy_pages: Callable[..., Any],
        mover: Mover | None = None,
        *,
        staging: Staging | None = None,
        runtime: DeviceRuntime | None = None,
        graphs: GraphLimits | None = None,
    ) -> None:
        self.model = model
        self.arena = arena
        self.timings: StepTimes | None = None
        self._sampler = sampler
        self._step_metadata = step_metadata
        self._copy_pages = copy_pages
        self._mover = mover
        self._runtime = runtime
        self._staging = staging or Staging(arena.pages.device, runtime)
        self._observers = step_observers()
        captures = runtime is not None and runtime.supports_graphs and not must_see_every_call()
        self._limits = graphs if captures else None
        self._graphs: DecodeGraphs | None = None
        self._verifying: VerifyGraphs | None = None
        self._pieces: StepPieces | None = None
        self._epoch = BEFORE_ALL

    @property
    def asynchronous(self) -> bool:
        """Whether `launch` returns before the step has run."""
        return self._staging.asynchronous

    @property
    def replays(self) -> int:
        """Steps that were replays of a graph."""
        return sum(graphs.replays for graphs in (self._graphs, self._verifying) if graphs)

    def prepare(self, buckets: Sequence[int] | None = None) -> None:
        """Capture the graphs there shall be, for batches of `buckets` sequences (by default `batch_buckets`).

        Nothing may be under way. Only null slots and pages are touched. Raises `BackendError` when a graph does not
        give what the same work gives without it.
        """
        if self._limits is None:
            return
        assert self._runtime is not None
        around = Around(
            self.model, self.arena.views, self._step_metadata, self.arena.layout.page_tokens, self._sampler,
            self._staging, self._runtime,
        )  # fmt: skip
        pool = self._runtime.graph_pool()
        graphs = DecodeGraphs(around, self._limits)
        graphs.prepare(buckets, pool)
        if self._limits.drafts:
            verifying = VerifyGraphs(around, self._limits)
            verifying.prepare(None, pool)
            self._verifying = verifying
        if isinstance(self._runtime, CapturesParts):
            pieces = StepPieces(around)
            pieces.prepare(pool)
            self._pieces = pieces
        self._graphs = graphs

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises `RuntimeError` on a plan out of order; whatever the model raises passes through.

        When it raises, nothing moves to or from the external tier any more.
        """
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Queue one step. Raises as `execute`, and `Launched.result` may: then the steps behind it are void.

        It waits for the device only where drafts are verified, and for what was sampled before for constraints.
        """
        with self._guarded():
            if self.timings is None:
                return self._launch(plan)
            with self.timings.part("launch"):
                launched = self._launch(plan)
                self.timings.ends()
            return launched

    def finish(self, answer: StepResult, draw: Drawn | None) -> StepResult:
        """The answer with what was sampled; waits for that."""
        with self._guarded():
            with self.timings.part("wait") if self.timings else nullcontext():
                answer = draw.answer(answer) if draw else answer
            moved = self._mover.finished() if self._mover else ()
        return replace(answer, transferred=moved)

    def _launch(self, plan: StepPlan) -> Launched:
        self._begin(plan)
        for binding in plan.bindings:
            self._sampler.bind(binding)
        if not plan.num_seqs:
            return Launched(self, StepResult(plan.epoch, []))
        if plan.num_verifies:
            return self._verify(plan)
        draw = self._replay(plan) if self._graphs and self._graphs.fits(plan) else self._decode(plan)
        return Launched(self, StepResult(plan.epoch, [], failures=self._sampler.take_failures()), draw)

    def _replay(self, plan: StepPlan) -> Drawn | None:
        """Queue a step that has a graph."""
        assert self._graphs is not None
        decoded = self._graphs.run(plan, self.timings.begins if self.timings else None)
        rows = plan.rows[plan.sampled]
        if not rows.size:
            return None
        if self._sampler.plain(rows):
            return self._sampler.picked(decoded.tokens, rows, plan.sampled)
        logits = decoded.logits
        if rows.size < plan.num_seqs:
            logits = logits[self._staging.upload(plan.sampled)[0]]
        return self._sampler.launch(logits, rows, plan.positions)

    def _decode(self, plan: StepPlan) -> Drawn | None:
        """Queue a step as it comes."""
        if self.timings:
            self.timings.begins()
        hidden, batch = self._forward(plan)
        if not plan.sampled.size:
            return None
        logits = self.model.logits(hidden[batch.logit_rows])
        return self._sampler.launch(logits, plan.rows[plan.sampled], plan.positions)

    def _verify(self, plan: StepPlan) -> Launched:
        """Queue or run a step that has drafts."""
        if self._verifying and self._verifying.fits(plan):
            return self._verify_replay(plan, self._verifying)
        _verifying(self.model)
        hidden, batch = self._forward(plan)
        result = sample_drafts(plan, self.model.logits(hidden[batch.logit_rows]), self._sampler)
        self._commit(plan, batch, result.accepted)
        return Launched(self, replace(result, failures=self._sampler.take_failures()))

    def _verify_replay(self, plan: StepPlan, graphs: VerifyGraphs) -> Launched:
        """A step with drafts that has a graph: queued where nothing but the likeliest tokens is asked for, else run."""
        verified = graphs.run(plan, self.timings.begins if self.timings else None)
        if self._sampler.plain(plan.rows[plan.sampled]):
            graphs.commit(plan)
            return Launched(self, StepResult(plan.epoch, []), VerifyDraw(plan, verified, self._staging))
        (rows,) = self._staging.upload(verified_rows(plan, verified.logits.shape[1]))
        result = sample_drafts(plan, verified.logits.flatten(0, 1)[rows], self._sampler)
        kept = np.ones(plan.num_seqs, np.int32)
        kept[plan.verifies] += np.array(result.accepted, np.int32)
        graphs.commit(plan, self._staging.upload(kept)[0])
        return Launched(self, replace(result, failures=self._sampler.take_failures()))

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """When the block raises, nothing moves any more, and what was launched is void.

        Raises `DeviceLostError` when the device does not answer any more.
        """
        try:
            yield
        except BaseException as error:
            self._sampler.give_up()
            self._stop(error)
            raise

    def _stop(self, error: BaseException) -> None:
        if not self._runtime or not self.asynchronous:
            if self._mover:
                self._mover.drain()
            return
        try:
            self._runtime.synchronize()
            if self._mover:
                self._mover.drain()
        except Exception as lost:  # noqa: BLE001 - whatever it is, the device does not answer
            name = self._runtime.device.id
            raise DeviceLostError(
                f"{name} failed and takes no more work: {_first_line(error)}",
                hint=f"restart; what the device said last: {_first_line(lost)}",
            ) from error

    @torch.inference_mode()
    def score(self, plan: StepPlan, accepted: Sequence[int] = ()) -> Tensor:
        """Run one step and return the logits of every token, fp32 [T, V] on the device. Samples nothing.

        Of sequences that verify `accepted` says how many of their drafts are kept.
        """
        self._begin(plan)
        hidden, batch = self._forward(plan, all_logits=True)
        logits = self.model.logits(hidden[batch.logit_rows])
        if plan.num_verifies:
            self._commit(plan, batch, accepted)
        return logits

    def _forward(self, plan: StepPlan, *, all_logits: bool = False) -> tuple[Tensor, StepBatch]:
        page_tokens, last = self.arena.layout.page_tokens, self._sampler.last_tokens
        batch = build_batch(plan, self._step_metadata, page_tokens, self._staging, last, all_logits=all_logits)
        if self._observers:
            return self._observed(plan, batch), batch
        pieces = self._pieces
        forward = pieces.forward if pieces and plan.num_tokens <= pieces.most else self.model.forward
        return forward(batch, self.arena.views), batch

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

    def _commit(self, plan: StepPlan, batch: StepBatch, accepted: Sequence[int]) -> None:
        """Leave the states of the sequences that verified as after what was accepted."""
        (kept,) = self._staging.upload(np.array(accepted, np.int32) + np.int32(1))
        _verifying(self.model).commit(batch, self.arena.views, kept)

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
            self._copy_pages(self.arena.pages, *self._staging.upload(copies.src, copies.dst))


def _verifying(model: StepModel) -> VerifyingModel:
    if not isinstance(model, VerifyingModel):
        raise RuntimeError(f"a step has drafts, and {type(model).__name__} verifies none")
    return model


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
