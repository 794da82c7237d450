"""From vLLM's view of a step to the model's: nothing of the caches is copied. Knows no vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from k3hal.engine.largest import Bounds, largest_steps
from k3hal.model.batch import DecodeBatch, PrefillBatch, StepBatch


@dataclass(frozen=True, slots=True)
class StepRows:
    """One step over `N` sequences: the first `num_decodes` have one token each and a state, the others a chunk.

    `page_table` int32 [N, pages], `seq_lens` int32 [N] tokens in the cache after the step, `kv_rows` int64 [T] as
    `StepBatch` has them. Of the chunks: `cu_seqlens`, `context_lens`, `has_state` as `PrefillBatch` has them, None
    where there are no chunks.
    """

    num_decodes: int
    page_table: Tensor
    seq_lens: Tensor
    kv_rows: Tensor
    cu_seqlens: Tensor | None
    context_lens: Tensor | None
    has_state: Tensor | None


@dataclass(frozen=True, slots=True)
class StepSlots:
    """State slots int32 [N] of one group of KDA layers, and the `columns` of the block table they were in."""

    slots: Tensor
    columns: Tensor | None = None


def count_decodes(starts: np.ndarray, seq_lens: np.ndarray) -> int:
    """How many leading sequences have one new token and some cached before it.

    `starts` [N + 1] are the offsets of the new tokens, `seq_lens` [N] the tokens after the step. A prompt of one token
    is no decode: its slot holds somebody else's state.
    """
    chunks = (starts[1:] - starts[:-1] != 1) | (seq_lens <= 1)
    first = int(chunks.argmax()) if chunks.size else 0
    return first if chunks.size and chunks[first] else chunks.size


def step_rows(
    starts: Tensor, starts_host: Tensor, seq_lens: Tensor, seq_lens_host: Tensor, page_table: Tensor, kv_rows: Tensor
) -> StepRows:
    """`starts` int32 [N + 1] and `seq_lens` int32 [N], on the device and on the host; see `StepRows` for the others."""
    decodes = count_decodes(starts_host.numpy(), seq_lens_host.numpy())
    if decodes == seq_lens.shape[0]:
        return StepRows(decodes, page_table, seq_lens, kv_rows, None, None, None)
    bounds = starts[decodes:]
    context = seq_lens[decodes:] - bounds.diff()
    return StepRows(decodes, page_table, seq_lens, kv_rows, bounds - decodes, context, context > 0)


def last_columns(seq_lens: Tensor, block_tokens: int) -> Tensor:
    """Where a sequence's state stands in a row of a block table over its whole length: int64 [N, 1]."""
    if seq_lens.device.type == "cpu":  # numpy takes a third of the time
        columns = (seq_lens.numpy().astype(np.int64) - 1) // block_tokens
        return torch.from_numpy(np.maximum(columns, 0, out=columns)[:, None])
    return ((seq_lens - 1) // block_tokens).clamp_(min=0).long().unsqueeze(1)


def slots_of(block_table: Tensor, columns: Tensor | None) -> Tensor:
    """State slots int32 [N] from a block table int32 [N, blocks]; without `columns` there is one block a sequence."""
    return (block_table[:, :1].contiguous() if columns is None else block_table.gather(1, columns)).view(-1)


def _step_batch(token_ids: Tensor, logit_rows: Tensor, rows: StepRows, slots: Tensor) -> StepBatch:
    """The step as the model takes it, for layers whose states are in `slots` int32 [N]."""
    n, decode, prefill = rows.num_decodes, None, None
    if rows.cu_seqlens is None:
        decode = DecodeBatch(slots, rows.page_table, rows.seq_lens)
    else:
        assert rows.context_lens is not None and rows.has_state is not None
        if n:
            decode = DecodeBatch(slots[:n], rows.page_table[:n], rows.seq_lens[:n])
        prefill = PrefillBatch(slots[n:], rows.page_table[n:], rows.cu_seqlens, rows.context_lens, rows.has_state)
    return StepBatch(token_ids, rows.kv_rows, logit_rows, decode, prefill)


def layer_batches(token_ids: Tensor, steps: Sequence[StepRows | StepSlots]) -> list[StepBatch]:
    """The step for each layer, from what the layer's own group has of it. Layers of a group share one object.

    `token_ids` int64 [T]. No row's logits are asked for: vLLM picks the rows itself. All MLA layers are one group:
    where it has the rows, the others have. Their own batch is that of any states.
    """
    rows = next(step for step in steps if isinstance(step, StepRows))
    groups = {id(step): step for step in steps if isinstance(step, StepSlots)}
    none = token_ids[:0]
    batches = {key: _step_batch(token_ids, none, rows, group.slots) for key, group in groups.items()}
    batches[id(rows)] = next(iter(batches.values()))
    return [batches[id(step)] for step in steps]


def scratch_step(
    contexts: Sequence[int], new: Sequence[int], columns: int, pages: int, page_tokens: int, device: torch.device
) -> tuple[StepRows, StepSlots]:
    """A step of sequences with so many cached and `new` tokens, those that decode first, over scratch caches.

    Their block table has `columns`, as vLLM's is as wide as the longest sequence there may be; all their pages are
    among `pages` behind the null page, and all their states in slot 1, so that what comes out means nothing.
    """
    table = torch.arange(columns, dtype=torch.int32) % pages + 1
    starts = torch.tensor([0, *accumulate(new)], dtype=torch.int32)
    seq_lens = torch.tensor([sum(pair) for pair in zip(contexts, new, strict=True)], dtype=torch.int32)
    places = torch.cat([torch.arange(first, first + n) for first, n in zip(contexts, new, strict=True)])
    kv_rows = table[places // page_tokens].long() * page_tokens + places % page_tokens
    rows = step_rows(
        starts.to(device), starts, seq_lens.to(device), seq_lens, table.expand(len(new), -1).contiguous().to(device),
        kv_rows.to(device),
    )  # fmt: skip
    return rows, StepSlots(torch.ones(len(new), dtype=torch.int32, device=device))


def largest_scratch_steps(
    bounds: Bounds, pages: int, page_tokens: int, device: torch.device
) -> Iterator[tuple[int, StepRows, StepSlots]]:
    """Each of the steps that need most memory, and how many tokens it has."""
    # How long the others are changes nothing of what a batch takes, and reading them takes time.
    decodes = [max(bounds.max_model_len - 1, 1), *[1] * (bounds.max_num_seqs - 1)]
    columns = -(-bounds.max_model_len // page_tokens)
    for step in largest_steps(bounds, decodes):
        if step.sampling:  # vLLM's own sampler is tried by vLLM
            yield sum(step.new), *scratch_step(step.contexts, step.new, columns, pages, page_tokens, device)
