"""The logits of every position of a given sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from k3hal.engine.core import EngineCore
from k3hal.engine.interface import EngineRequest, PrefixContext
from k3hal.engine.step_plan import StepPlan
from k3hal.errors import UsageError
from k3hal.sampling_params import SamplingParams


class ScoringRunner(Protocol):
    def score(self, plan: StepPlan) -> Tensor: ...


def score(core: EngineCore, runner: ScoringRunner, token_ids: Sequence[int]) -> Tensor:
    """fp32 logits [T, vocab] on the CPU, row t predicting token t + 1, computed in chunks as a prompt would be.

    The engine must be idle. Raises `RequestError` as a request with this prompt would.
    """
    if not core.scheduler.idle:
        raise UsageError("logits need an idle engine", hint="wait for the running requests to end")
    while core.has_work:
        core.step()
    whole = PrefixContext(private=True)
    request = core.check(EngineRequest("score", token_ids, SamplingParams(max_tokens=1), context=whole))
    scheduler = core.scheduler
    scheduler.add(request)
    parts: list[Tensor] = []
    try:
        while request.remaining:
            scheduled = scheduler.schedule()
            assert scheduled is not None
            plan, requests = scheduled
            parts.append(runner.score(plan).to("cpu", torch.float32))
            scheduler.advance(plan, requests)
    except BaseException:
        scheduler.cache.forget()
        raise
    finally:
        scheduler.remove([request])
    return torch.cat(parts)
