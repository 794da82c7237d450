"""Lossless acceptance of drafted tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch.errors import InputError
from k3hal.dispatch.operator import Cost, Operator, Sample

METHODS = ("standard", "block")


def verify_draft(
    draft_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, uniform: Tensor, method: str
) -> tuple[Tensor, Tensor]:
    """How many drafts to keep, int64 [N], and the token that follows them, int64 [N].

    draft_ids int64 [N, Q] (a negative id ends a row's drafts early), draft_probs fp32 [N, Q, V] the distribution each
    draft was drawn from, or None for drafts chosen greedily (all mass on the draft), target_probs fp32 [N, Q + 1, V],
    uniform fp64 [N, Q + 1] in [0, 1): the first Q decide acceptance, the last draws the next token. Both distributions
    come after the same temperature and filters; temperature 0 is a one-hot target. `method` "standard" accepts draft i
    with probability min(1, target / draft) and stops at the first rejection; "block" verifies the whole block (Sun et
    al.). Either way the emitted tokens are distributed as the target. fp64 inside. Nothing mutated.
    Raises `InputError` for another method. Source: k3_architecture.md §8.5.
    """
    if method not in METHODS:
        raise InputError(f"verify_draft: method {method!r} is unknown", hint=f"one of {', '.join(METHODS)}")
    accepted, following = [], []
    for n in range(draft_ids.shape[0]):
        drafts = draft_ids[n].tolist()
        drafts = drafts[: next((i for i, d in enumerate(drafts) if d < 0), len(drafts))]
        target = target_probs[n].double()
        if draft_probs is None:
            draft = torch.zeros_like(target[: len(drafts)])
            draft[torch.arange(len(drafts)), drafts] = 1.0
        else:
            draft = draft_probs[n].double()
        accept = _accept_block if method == "block" else _accept_standard
        kept, mass = accept(drafts, draft, target, uniform[n].tolist())
        rest = target[kept] if kept == len(drafts) else (mass * target[kept] - draft[kept]).clamp_min(0.0)
        accepted.append(kept)
        following.append(_draw(rest if float(rest.sum()) > 0 else target[kept], float(uniform[n, -1])))
    device = draft_ids.device
    return torch.tensor(accepted, device=device), torch.tensor(following, device=device)


def _accept_standard(drafts: list[int], draft: Tensor, target: Tensor, u: list[float]) -> tuple[int, float]:
    """Tokens kept, and the factor of the target in the residual."""
    for i, token in enumerate(drafts):
        if u[i] * float(draft[i, token]) >= float(target[i, token]):
            return i, 1.0
    return len(drafts), 1.0


def _accept_block(drafts: list[int], draft: Tensor, target: Tensor, u: list[float]) -> tuple[int, float]:
    """Tokens kept: the largest prefix whose own draw accepts it; and that prefix's probability `p`."""
    p, kept, mass = 1.0, 0, 1.0
    for i, token in enumerate(drafts):
        ratio = float(target[i, token]) / max(float(draft[i, token]), 1e-300)
        p, threshold = min(1.0, p * ratio), 0.0
        if i + 1 == len(drafts):
            threshold = p
        else:
            residual = float((p * target[i + 1] - draft[i + 1]).clamp_min(0.0).sum())
            threshold = residual / (residual + 1.0 - p) if residual + 1.0 - p > 0 else 1.0
        if u[i] < threshold:
            kept, mass = i + 1, p
    return kept, mass


def _draw(mass: Tensor, u: float) -> int:
    """The first index whose cumulative mass exceeds u of the total."""
    cumulative = mass.cumsum(0)
    return int((cumulative > u * cumulative[-1]).int().argmax())


def _sample(name: str, rows: int, drafts: int, vocab: int, tags: set[str]) -> Iterator[Sample]:
    def maker(method: str) -> Any:
        def make(g: torch.Generator) -> dict[str, Any]:
            target = (torch.randn(rows, drafts + 1, vocab, generator=g) * 2).softmax(dim=-1)
            probs = (target[:, :drafts].log() + torch.randn(rows, drafts, vocab, generator=g)).softmax(dim=-1)
            ids = torch.multinomial(probs.reshape(-1, vocab), 1, generator=g).view(rows, drafts)
            if "greedy" in name:
                ids = probs.argmax(dim=-1)
            if name == "greedy_one_hot":
                target = torch.nn.functional.one_hot(target.argmax(dim=-1), vocab).float()
                ids[::2] = target[::2, :drafts].argmax(dim=-1)
            elif name == "equal":
                target[:, :drafts] = probs
            elif name == "ragged":
                ids[0, 1:], ids[1, :] = -1, -1
            elif name == "disjoint":
                target[..., : vocab // 2], probs[..., vocab // 2 :] = 0.0, 0.0
                ids = probs.argmax(dim=-1)
            uniform = torch.rand(rows, drafts + 1, dtype=torch.float64, generator=g)
            return {
                "draft_ids": ids,
                "draft_probs": None if "greedy" in name else probs,
                "target_probs": target,
                "uniform": uniform,
                "method": method,
            }

        return make

    for method in METHODS:
        yield Sample(f"{name}_{method}", maker(method), {"vocab": vocab}, "float32", "verify", frozenset(tags))


def samples() -> Iterator[Sample]:
    """Both methods on drawn and greedy drafts, temperature 0, equal and disjoint distributions, ragged drafts."""
    yield from _sample("tiny", 3, 2, 8, {"tiny"})
    yield from _sample("greedy", 16, 3, 12, {"tiny"})
    yield from _sample("greedy_one_hot", 6, 4, 12, {"tiny"})
    yield from _sample("equal", 9, 4, 12, {"edge", "adversarial"})
    yield from _sample("disjoint", 9, 4, 12, {"edge", "adversarial"})
    yield from _sample("ragged", 4, 3, 12, {"must", "edge", "adversarial"})
    yield from _sample("k3", 4, 7, 163_840, {"k3", "device"})


def cost(draft_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, uniform: Tensor, method: str) -> Cost:
    """One pass over both distributions."""
    moved = target_probs.nbytes + (draft_probs.nbytes if draft_probs is not None else 0)
    return Cost(3.0 * target_probs.numel(), float(moved))


OPERATOR = Operator(
    reference=verify_draft,
    family="engine",
    outputs={"num_accepted": "exact", "next_id": "exact"},
    samples=samples,
    cost=cost,
    invariants=("lossless",),
)
