"""From a step plan to the tensors the model works on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from k3hal.engine.staging import Staging
from k3hal.engine.step_plan import NOT_YET, StepPlan
from k3hal.model.batch import DecodeBatch, PrefillBatch, StepBatch, VerifyBatch


def build_batch(
    plan: StepPlan,
    step_metadata: Callable[..., Any],
    page_tokens: int,
    staging: Staging,
    last_tokens: Callable[[Tensor], Tensor],
    *,
    all_logits: bool = False,
) -> StepBatch:
    """The step's tensors on the device, by one copy and one call of the bound `step_metadata`.

    `last_tokens` gives what rows int64 sampled last, for the tokens that are not known yet. `all_logits` asks for every
    row's logits instead of the sampled ones.
    """
    logit_rows = np.arange(plan.num_tokens) if all_logits else _sampled_rows(plan)
    context_lens, new_lens, page_table, slots, token_ids, wanted, rows = staging.upload(
        plan.context_lens, plan.new_lens, plan.page_table, plan.slots, plan.token_ids, logit_rows,
        plan.rows[: plan.num_decodes].astype(np.int64),
    )  # fmt: skip
    _, kv_rows, cu_seqlens, seq_lens = step_metadata(context_lens, new_lens, page_table, page_tokens, plan.num_tokens)
    decodes, verifies = plan.num_decodes, plan.verifies
    if (plan.token_ids[:decodes] == NOT_YET).any():
        first = with_late_tokens(token_ids[:decodes], last_tokens(rows))
        token_ids = torch.cat((first, token_ids[decodes:]))
    decode = verify = prefill = None
    if decodes:
        decode = DecodeBatch(slots[:decodes], page_table[:decodes], seq_lens[:decodes])
    if plan.num_verifies:
        bounds = cu_seqlens[decodes : verifies.stop + 1] - decodes
        verify = _verify_batch(plan, slots[verifies], page_table[verifies], bounds, context_lens[verifies], staging)
    if verifies.stop < plan.num_seqs:
        rest = slice(verifies.stop, None)
        context, bounds = context_lens[rest], cu_seqlens[rest]
        prefill = PrefillBatch(slots[rest], page_table[rest], bounds - bounds[0], context, context > 0)
    return StepBatch(token_ids, kv_rows, wanted, decode, prefill, verify)


def with_late_tokens(token_ids: Tensor, last: Tensor) -> Tensor:
    """`token_ids` int64 [N], `last` int64 [N] where they are not known yet."""
    return torch.where(token_ids == NOT_YET, last, token_ids)


def _verify_batch(
    plan: StepPlan, slots: Tensor, page_table: Tensor, bounds: Tensor, context: Tensor, staging: Staging
) -> VerifyBatch:
    """The sequences that verify drafts, also row by row and all of one width."""
    counts = plan.new_lens[plan.verifies].astype(np.int64)
    width, first = int(counts.max()), np.cumsum(counts) - counts
    padded = first[:, None] + np.minimum(np.arange(width), counts[:, None] - 1)
    owner = np.repeat(np.arange(counts.size), counts)
    place = np.arange(owner.size) - first[owner]
    lens = (plan.context_lens[plan.verifies][owner] + place + 1).astype(np.int32)
    rows, row_lens, padding, packed = staging.upload(owner, lens, padded.reshape(-1), owner * width + place)
    return VerifyBatch(slots, page_table, bounds, context, page_table[rows], row_lens, width, padding, packed)


def _sampled_rows(plan: StepPlan) -> np.ndarray:
    """The rows whose logits are sampled, int64: the last of each sequence in `sampled`, all of one that verifies."""
    ends = np.cumsum(plan.new_lens, dtype=np.int64)
    if not plan.num_verifies:
        return ends[plan.sampled] - 1
    counts = np.ones(plan.num_seqs, np.int64)
    counts[plan.verifies] = plan.new_lens[plan.verifies]
    parts = [np.arange(int(ends[i] - counts[i]), int(ends[i])) for i in plan.sampled.tolist()]
    return np.concatenate(parts)
