"""The model text on several ranks: threads that meet stand for processes; together they are the model on one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.plan import make_plan
from k3hal.dispatch.probe import probe
from k3hal.errors import UnsupportedError
from k3hal.model.batch import CacheViews, DecodeBatch, PrefillBatch, StepBatch
from k3hal.model.config import ModelConfig
from k3hal.model.config_parts import ExpertActivations
from k3hal.model.generated import GeneratedModel, GeneratedReader
from k3hal.model.k3 import K3Model
from k3hal.model.parallel import ParallelPlan, Shard
from k3hal.model.presets import preset_config
from k3hal.model.requests import model_requests

CPU, WORLD, PAGE = torch.device("cpu"), 2, 128


class Meeting:
    """Where the threads of all ranks bring their tensors."""

    def __init__(self, world: int) -> None:
        self._barrier, self._brought = threading.Barrier(world, timeout=60), [torch.empty(0)] * world

    def plan(self, rank: int, world: int) -> ParallelPlan:
        def all_of(x: Tensor) -> list[Tensor]:
            self._brought[rank] = x.clone()
            self._barrier.wait()
            seen = list(self._brought)
            self._barrier.wait()
            return seen

        def put_together(x: Tensor) -> Tensor:
            return torch.cat(all_of(x), -1)

        return ParallelPlan(rank, world, lambda x: torch.stack(all_of(x)).sum(0), put_together)


class Cut:
    """A reader that cuts each tensor as a rank asks for it."""

    def __init__(self, whole: GeneratedReader) -> None:
        self.whole = whole

    def get(self, name: str, dtype: torch.dtype | None = None, *, shard: Shard | None = None) -> Tensor:
        full = self.whole.get(name, dtype)
        return full if shard is None else full.chunk(shard.world, shard.dim)[shard.rank].contiguous()

    def fill(self, out: Tensor, name: str, *, shard: Shard | None = None) -> None:
        out.copy_(self.get(name, out.dtype, shard=shard).view(out.shape))


def config(preset: str, vocab: int) -> ModelConfig:
    return replace(ModelConfig.from_json(preset_config(preset)), vocab_size=vocab, num_layers=5, kda_layers=(0, 1, 3))


def load(cfg: ModelConfig, parallel: ParallelPlan) -> K3Model:
    requests = model_requests(cfg, "float32", "float32", parallel.world, ranks=parallel.world > 1)
    plan = make_plan(requests, build_selector(), model="ranks", device=probe("cpu"), dtype="float32")
    reader = Cut(GeneratedReader(GeneratedModel.of("ranks", cfg), CPU, torch.float32))
    return K3Model.load(cfg, plan.bind(), reader, dtype=torch.float32, parallel=parallel)


def run(model: K3Model, world: int) -> Tensor:
    """Logits of a prompt's last token and of one decoded after it."""
    cfg = model.cfg
    heads, dim = cfg.kda_heads // world, cfg.kda_head_dim
    latents = [torch.zeros(3, PAGE, cfg.kv_lora_rank + cfg.qk_rope_head_dim) for _ in cfg.mla_layers]
    conv = [torch.zeros(2, cfg.conv_width - 1, 3 * heads * dim) for _ in cfg.kda_layers]
    state = [torch.zeros(2, heads, dim, dim) for _ in cfg.kda_layers]
    cache = CacheViews(tuple(latents), tuple(conv), tuple(state))
    slots, table, length = torch.tensor([1], dtype=torch.int32), torch.tensor([[2]], dtype=torch.int32), 9
    prefill = PrefillBatch(
        slots, table, torch.tensor([0, length], dtype=torch.int32), torch.tensor([0], dtype=torch.int32),
        torch.tensor([False]),
    )  # fmt: skip
    rows, last = torch.arange(length) + 2 * PAGE, torch.tensor([length - 1])
    first = StepBatch(torch.arange(length) * 7, rows, last, None, prefill)
    decode = DecodeBatch(slots, table, torch.tensor([length + 1], dtype=torch.int32))
    then = StepBatch(torch.tensor([100]), rows[-1:] + 1, torch.tensor([0]), decode, None)
    return torch.cat([model.logits(model.forward(batch, cache)[batch.logit_rows]) for batch in (first, then)])


@pytest.mark.parametrize(
    ("preset", "vocab", "activations"),
    [("nano", 625, "auto"), ("nano", 626, "auto"), ("kl-tiny", 626, "auto"), ("nano", 626, "mxfp8")],
)
def test_two_ranks_are_one(preset: str, vocab: int, activations: ExpertActivations) -> None:
    """With a latent space and without, a vocabulary that divides and one that does not, activations rounded or not."""
    cfg, meeting = config(preset, vocab).with_expert_activations(activations), Meeting(WORLD)
    wanted = run(load(cfg, ParallelPlan()), 1)
    models = [load(cfg, meeting.plan(rank, WORLD)) for rank in range(WORLD)]
    with ThreadPoolExecutor(WORLD) as threads:
        found = list(threads.map(lambda model: run(model, WORLD), models))
    assert wanted.shape == (2, vocab) and wanted.abs().max() > 0.1
    for logits in found:
        torch.testing.assert_close(logits, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        (lambda: ParallelPlan(0, 2), "own engine runs a model on one rank only"),
        (lambda: ParallelPlan(2, 2), "there is no rank 2 of 2"),
        (lambda: Meeting(4).plan(0, 4).check(config("nano", 625)), "2 attention heads do not divide over 4 ranks"),
    ],
)
def test_what_ranks_cannot_share_is_refused(parallel: Callable[[], object], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        parallel()


def test_the_final_norm_may_be_left_for_later() -> None:
    """What vLLM's adapter does: hidden states before the norm, the norm on the rows whose logits are wanted."""
    model = load(config("nano", 625), ParallelPlan())
    wanted = run(model, 1)

    def forward(batch: StepBatch, cache: CacheViews) -> Tensor:
        hidden = model.forward_unnormed(batch.token_ids, [batch] * len(model.layers), cache)
        return model.normed(hidden)

    model.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(run(model, 1), wanted, rtol=1e-4, atol=1e-4)
