"""Small input builders that the operators' samples share: seeded values, strided views, padding, ragged lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import prod

import torch
from torch import Generator, Tensor

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
ACTIVATION_DTYPES = ("float32", "bfloat16")

RAGGED: Mapping[str, tuple[int, ...]] = {
    "one_token": (1,),
    "empty_first_and_last": (0, 3, 0, 1, 0),
    "around_tile": (15, 16, 17),
    "around_chunk": (63, 64, 65),
    "mixed": (1, 70, 2, 0, 130),
}
"""Sequence lengths of packed batches, by what they try."""


MOST_DRAWN = 1 << 26
"""Elements drawn for one tensor: drawing takes one core, 5 ns each."""


def randn(gen: Generator, *shape: int, dtype: str = "float32", scale: float = 1.0) -> Tensor:
    """Normal values times `scale`, drawn in fp32 and cast, so that one seed gives one set of values in every dtype.

    Of more than `MOST_DRAWN` elements the vectors on the last axis repeat, each time scaled by another factor.
    """
    if prod(shape) <= MOST_DRAWN:
        return (torch.randn(shape, generator=gen) * scale).to(DTYPES[dtype])
    drawn = (torch.randn(MOST_DRAWN // shape[-1], shape[-1], generator=gen) * scale).to(DTYPES[dtype])
    return repeated(gen, drawn, prod(shape[:-1])).view(shape)


def repeated(gen: Generator, rows: Tensor, count: int) -> Tensor:
    """`count` rows in the dtype of `rows` [R, ...], which repeat; row i is times a factor in [0.5, 1.5) of its own, so
    that no two are equal and one taken for another shows."""
    factors = 0.5 + torch.rand(count, generator=gen)
    out = torch.empty(count, *rows.shape[1:], dtype=rows.dtype)
    for first in range(0, count, len(rows)):
        part = out[first : first + len(rows)]
        # In fp32: not every torch multiplies fp8.
        part.copy_(rows[: len(part)].float() * factors[first : first + len(part)].view(-1, *[1] * (rows.ndim - 1)))
    return out


def spread(x: Tensor, gap: int = 16) -> Tensor:
    """The same values as a view whose first stride is `gap` elements wider; the gaps are poisoned.

    Stands for a column slice of a fused projection ([T, C]) or a slot or page in an arena ([S, ...]).
    """
    inner = x[0].numel()
    buffer = poison(torch.empty(x.shape[0], inner + gap, dtype=x.dtype))
    view = buffer[:, :inner].unflatten(1, x.shape[1:])
    view.copy_(x)
    return view


def poison(x: Tensor) -> Tensor:
    """Fill a contiguous tensor in place with all-ones bytes: NaN in every float dtype, -1 or 255 in integer ones."""
    x.view(torch.uint8).fill_(0xFF)
    return x


def with_padding(x: Tensor, rows: int) -> Tensor:
    """`x` followed by `rows` poisoned rows that no operator may read."""
    return torch.cat((x, poison(torch.empty(rows, *x.shape[1:], dtype=x.dtype))))


def offsets(lengths: Iterable[int]) -> Tensor:
    """`cu_seqlens`: int32 [N + 1] running totals that start at 0."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def int32(values: Iterable[int]) -> Tensor:
    """A vector of slots, lengths or counts."""
    return torch.tensor(list(values), dtype=torch.int32)
