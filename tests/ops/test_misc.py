"""Step metadata, page copies and collectives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.dispatch.ops.all_gather import all_gather
from k3hal.dispatch.ops.all_reduce import all_reduce
from k3hal.dispatch.ops.all_to_all import all_to_all
from k3hal.dispatch.ops.copy_pages import copy_pages
from k3hal.dispatch.ops.reduce_scatter import reduce_scatter
from k3hal.dispatch.ops.step_metadata import step_metadata
from k3hal.dispatch.registry import default_registry

Fn = Callable[..., Any]


def _cpu(op: str) -> Fn:
    return next(p.fn for p in default_registry().of(op) if p.backend == "cpu")


METADATA = pytest.mark.parametrize("metadata", [step_metadata, _cpu("step_metadata")], ids=["reference", "cpu"])
COPY = pytest.mark.parametrize("copy", [copy_pages, _cpu("copy_pages")], ids=["reference", "cpu"])
LENGTHS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=6)


@METADATA
@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, page_tokens=st.integers(1, 8), padding=st.integers(0, 4), seed=st.integers(0, 99))
def test_rows_and_positions(
    metadata: Fn, lengths: list[tuple[int, int]], page_tokens: int, padding: int, seed: int
) -> None:
    """Each token has its own row, in the page of its position; padding has none."""
    pages = 40 // page_tokens + 1
    count, total = len(lengths), sum(new for _, new in lengths)
    table = torch.randperm(max(count * pages, 1), generator=torch.Generator().manual_seed(seed))[: count * pages]
    table = table.view(count, pages).int()
    context, new = (torch.tensor([pair[i] for pair in lengths], dtype=torch.int32) for i in (0, 1))
    positions, rows, offsets, seq_lens = metadata(context, new, table, page_tokens, total + padding)
    assert [t.dtype for t in (positions, rows, offsets, seq_lens)] == [torch.int64] * 2 + [torch.int32] * 2
    expected = [(n, c + i) for n, (c, k) in enumerate(lengths) for i in range(k)]
    assert positions.tolist() == [p for _, p in expected] + [0] * padding
    where = [int(table[n, p // page_tokens]) * page_tokens + p % page_tokens for n, p in expected]
    assert rows.tolist() == where + [-1] * padding
    assert len(set(where)) == total
    assert offsets.tolist() == [0, *new.cumsum(0).tolist()]
    assert torch.equal(seq_lens, context + new)


@METADATA
def test_two_chunks_are_one(metadata: Fn) -> None:
    table = torch.tensor([[5, 9, 2]], dtype=torch.int32)

    def run(context: int, new: int) -> list[int]:
        lengths = (torch.tensor([context], dtype=torch.int32), torch.tensor([new], dtype=torch.int32))
        return metadata(*lengths, table, 4, new)[1].tolist()

    assert run(0, 7) + run(7, 4) == run(0, 11)


@COPY
@settings(max_examples=30, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=10, unique_by=lambda p: p[1]),
    strided=st.booleans(),
)
def test_copies_read_before_they_write(copy: Fn, pairs: list[tuple[int, int]], strided: bool) -> None:
    whole = torch.arange(10 * 24, dtype=torch.uint8).view(10, 24)
    arena = whole[:, :16] if strided else whole[:, :16].clone()
    before, rest = arena.clone(), whole[:, 16:].clone()
    src, dst = (torch.tensor([pair[i] for pair in pairs], dtype=torch.int64) for i in (0, 1))
    copy(arena, src, dst)
    expected = before.clone()
    for source, target in pairs:
        expected[target] = before[source]
    assert torch.equal(arena, expected)
    assert torch.equal(whole[:, 16:], rest)


def test_one_rank_is_the_identity() -> None:
    x = torch.randn(4, 6)
    for result in (all_reduce(x, None), reduce_scatter(x, None, 1), all_gather(x, None, 0), all_to_all(x, None)):
        assert result is x


def test_two_ranks(tmp_path: Path) -> None:
    """Real processes over gloo; inputs stay as they were, strided ones too."""
    program = [sys.executable, str(Path(__file__).with_name("collective_rank.py")), str(tmp_path), "2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [subprocess.Popen([*program, str(rank)], env=environment) for rank in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    outs = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    inputs = [torch.arange(8.0).view(4, 2) + 100 * rank for rank in range(2)]
    total = inputs[0] + inputs[1]
    for rank, out in enumerate(outs):
        assert torch.equal(out["input"], inputs[rank])
        assert torch.equal(out["reduced"], total.t())
        assert torch.equal(out["scattered"], total[2 * rank : 2 * rank + 2])
        assert torch.equal(out["scattered_1"], total.t()[:, 2 * rank : 2 * rank + 2])
        assert torch.equal(out["gathered"], torch.cat([x.t() for x in inputs], dim=1))
        assert torch.equal(out["gathered_0"], torch.cat(inputs))
        expected = torch.cat([x[2 * rank : 2 * rank + 2] for x in inputs])
        assert torch.equal(out["exchanged"], expected)
