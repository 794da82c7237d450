"""Steps in pieces around attention: the same as whole, whatever the step, and nothing of padding in it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from k3hal.engine.graphs import Around
from k3hal.engine.pieces import TOKENS, StepPieces
from k3hal.engine.staging import Staging
from k3hal.errors import BackendError
from k3hal.model.batch import CacheViews, PrefillBatch, StepBatch

from .recorded_runtime import Recorded, RecordedRuntime

CPU = torch.device("cpu")
DIM, LAYERS = 6, 3
NOTHING = CacheViews((), (), ())


class Toy:
    """Three layers of a product, an attention that sums each sequence's tokens so far, and another product."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(300, DIM, generator=generator)
        self.weights = [[torch.randn(DIM, DIM, generator=generator) / 2 for _ in range(2)] for _ in range(LAYERS)]
        self.attended = 0

    def forward(self, batch: StepBatch, cache: CacheViews) -> Tensor:
        x = self.embedding[batch.token_ids]
        for first, second in self.weights:
            y = torch.tanh(x @ first)
            width = 2 * DIM
            out = batch.attend(self._attend, (y, x), cache, width)
            x = x + out[:, :DIM] @ second + out[:, DIM:]
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def _attend(self, inputs: tuple[Tensor, ...], batch: StepBatch, cache: CacheViews) -> Tensor:
        self.attended += 1
        assert batch.prefill is not None
        bounds = batch.prefill.cu_seqlens.tolist()
        assert {len(t) for t in inputs} == {bounds[-1]}, "rows of nobody"
        sums = [inputs[0][a:b].cumsum(0) / 4 for a, b in pairwise(bounds)]
        return torch.cat((torch.cat(sums), inputs[1].sin()), 1)


def step(*lengths: int) -> StepBatch:
    total = sum(lengths)
    ids = torch.randint(0, 300, (total,), generator=torch.Generator().manual_seed(total))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    none = torch.zeros(len(lengths), dtype=torch.int32)
    prefill = PrefillBatch(none, none.unsqueeze(1), bounds, none, none > 0)
    return StepBatch(ids, ids, ids, None, prefill)


def pieces_of(model: Any, runtime: RecordedRuntime) -> StepPieces:
    return StepPieces(Around(model, NOTHING, lambda: None, 4, None, Staging(CPU, runtime), runtime))  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy()


@pytest.fixture(scope="module")
def pieces(toy: Toy) -> StepPieces:
    runtime = RecordedRuntime()
    made = pieces_of(toy, runtime)
    assert made.most == 0
    made.prepare(runtime.graph_pool())
    assert toy.attended == 0, "nobody attends while graphs are captured"
    return made


@pytest.mark.parametrize("lengths", [(1,), (5, 1, 9), (16,), (1,) * 17, (40, 56), (1, 95, 1), (250,), (256,)])
def test_a_step_in_pieces_is_the_step(toy: Toy, pieces: StepPieces, lengths: tuple[int, ...]) -> None:
    batch, before = step(*lengths), toy.attended
    with torch.inference_mode():
        whole = toy.forward(batch, NOTHING)
        got = pieces.forward(batch, NOTHING)
    assert got.shape == whole.shape and toy.attended == before + 2 * LAYERS
    torch.testing.assert_close(got, whole)


def test_steps_follow_each_other_in_any_order(toy: Toy, pieces: StepPieces) -> None:
    before = pieces.replays
    for lengths in ((256,), (3,), (200, 20), (16,), (3,)):
        batch = step(*lengths)
        with torch.inference_mode():
            torch.testing.assert_close(pieces.forward(batch, NOTHING), toy.forward(batch, NOTHING))
    assert pieces.replays == before + 5 and pieces.most == TOKENS[-1]


class Stale(RecordedRuntime):
    def capture_parts(self, work: Any, pool: Any) -> list[Recorded]:
        parts = super().capture_parts(work, pool)
        parts[1].calls = []
        return parts


def test_pieces_that_give_something_else_are_refused(toy: Toy) -> None:
    runtime = Stale()
    with pytest.raises(BackendError, match=r"steps of 256 tokens, around attention, gives something else.*--no-graphs"):
        pieces_of(toy, runtime).prepare(runtime.graph_pool())
