"""Where each packed token of a step sits: its position and its cache row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.operator import Cost, Operator, Sample
from k3hal.dispatch.ops._paged import GARBAGE_PAGE


def step_metadata(
    context_lens: Tensor, new_lens: Tensor, page_table: Tensor, page_tokens: int, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """positions int64 [T], kv_rows int64 [T], cu_seqlens int32 [N + 1], seq_lens int32 [N], T = `num_tokens`.

    context_lens, new_lens int32 [N] (tokens cached before and added by this step), page_table int32 [N, maxpages].
    Token i of sequence n has position p = context_lens[n] + i and cache row page_table[n, p // page_tokens] *
    page_tokens + p % page_tokens. cu_seqlens are the offsets of the packed sequences, seq_lens = context + new. Rows at
    and beyond the sum of new_lens (at most T) are padding: position 0, kv_row -1. Page-table entries that no new token
    needs are never read. Nothing mutated. Exact.
    """
    positions = torch.zeros(num_tokens, dtype=torch.int64, device=page_table.device)
    kv_rows = torch.full_like(positions, -1)
    cu_seqlens = torch.zeros(new_lens.shape[0] + 1, dtype=torch.int32, device=page_table.device)
    row = 0
    for n, (context, new) in enumerate(zip(context_lens.tolist(), new_lens.tolist(), strict=True)):
        for position in range(context, context + new):
            page = int(page_table[n, position // page_tokens])
            positions[row] = position
            kv_rows[row] = page * page_tokens + position % page_tokens
            row += 1
        cu_seqlens[n + 1] = row
    return positions, kv_rows, cu_seqlens, context_lens + new_lens


def _sample(
    name: str, contexts: list[int], news: list[int], page_tokens: int, padding: int, tags: set[str], pages_from: int = 1
) -> Sample:
    def make(g: torch.Generator) -> dict[str, Any]:
        ends = [a + b for a, b in zip(contexts, news, strict=True)]
        pages = max([-(-end // page_tokens) for end in ends], default=0) + 1
        table = torch.full((len(ends), pages), GARBAGE_PAGE, dtype=torch.int32)
        for n, (context, end) in enumerate(zip(contexts, ends, strict=True)):
            first, last = context // page_tokens, -(-end // page_tokens)
            if end > context:
                drawn = torch.randint(1, 5000, (last - first,), dtype=torch.int32, generator=g)
                table[n, first:last] = drawn + pages_from - 1
        return {
            "context_lens": torch.tensor(contexts, dtype=torch.int32),
            "new_lens": torch.tensor(news, dtype=torch.int32),
            "page_table": table,
            "page_tokens": page_tokens,
            "num_tokens": sum(news) + padding,
        }

    return Sample(name, make, {"page_tokens": page_tokens}, tags=frozenset(tags))


def samples() -> Iterator[Sample]:
    """Decodes, prefills and both, page edges, empty sequences, padding, nothing at all, and a full step."""
    yield _sample("one", [5], [1], 4, 0, {"tiny"})
    yield _sample("mixed", [9, 0, 3], [1, 6, 5], 4, 0, {"tiny"})
    yield _sample("page_edges", [3, 4, 7, 8, 0], [1, 1, 2, 4, 4], 4, 0, {"edge"})
    yield _sample("empty", [3, 0, 7], [0, 0, 2], 4, 3, {"edge", "adversarial"})
    yield _sample("padding_only", [0, 0], [0, 0], 16, 5, {"edge", "adversarial"})
    yield _sample("nothing", [], [], 16, 0, {"edge", "adversarial"})
    yield _sample("large_pages", [5, 130], [3, 1], 128, 1, {"edge", "adversarial"}, pages_from=1 << 25)
    yield _sample("decode_64", [100 + 37 * n for n in range(64)], [1] * 64, 128, 0, {"k3"})
    yield _sample("full_step", [*range(1, 64), 100_000], [1] * 63 + [2049], 128, 64, {"k3"})
    for batch in (1, 64, 256):
        contexts = [30_000 + 371 * n % 100_000 for n in range(batch)]
        yield _sample(f"bench_decode_{batch}", contexts, [1] * batch, 128, 0, {"device", "bench"})


def cost(context_lens: Tensor, new_lens: Tensor, page_table: Tensor, page_tokens: int, num_tokens: int) -> Cost:
    """Two int64 written and one page read for each token."""
    return Cost(0.0, 20.0 * num_tokens + 16.0 * context_lens.numel())


OPERATOR = Operator(
    reference=step_metadata,
    family="engine",
    outputs={"positions": "exact", "kv_rows": "exact", "cu_seqlens": "exact", "seq_lens": "exact"},
    samples=samples,
    cost=cost,
    invariants=("chunk_split",),
)
