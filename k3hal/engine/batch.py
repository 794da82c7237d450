"""From a step plan to the tensors the model works on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3hal.engine.step_plan import StepPlan
from k3hal.model.batch import DecodeBatch, PrefillBatch, StepBatch


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


def build_batch(
    plan: StepPlan,
    step_metadata: Callable[..., Any],
    page_tokens: int,
    device: torch.device,
    *,
    all_logits: bool = False,
) -> StepBatch:
    """The step's tensors on `device`, derived there by one call of the bound `step_metadata`.

    `all_logits` asks for every row's logits instead of the sampled ones.
    """
    context_lens = _to_device(plan.context_lens, device)
    page_table = _to_device(plan.page_table, device)
    slots = _to_device(plan.slots, device)
    _, kv_rows, cu_seqlens, seq_lens = step_metadata(
        context_lens, _to_device(plan.new_lens, device), page_table, page_tokens, plan.num_tokens
    )
    decodes = plan.num_decodes
    decode = prefill = None
    if decodes:
        decode = DecodeBatch(slots[:decodes], page_table[:decodes], seq_lens[:decodes])
    if decodes < plan.num_seqs:
        context = context_lens[decodes:]
        prefill = PrefillBatch(
            slots[decodes:], page_table[decodes:], cu_seqlens[decodes:] - decodes, context, context > 0
        )
    last_rows = np.cumsum(plan.new_lens, dtype=np.int64) - 1
    logit_rows = np.arange(plan.num_tokens) if all_logits else last_rows[plan.sampled]
    return StepBatch(_to_device(plan.token_ids, device), kv_rows, _to_device(logit_rows, device), decode, prefill)
