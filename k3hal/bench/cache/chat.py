"""A seeded trace of chats: popular and rare shared prompts, conversations of a few turns, many questions asked once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from k3hal.bench.cache.drawing import IdSource, in_order
from k3hal.bench.cache.trace import Span, Trace, TraceRequest, ends


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """What a trace is drawn from. Sizes in tokens are lognormal (median, sigma), gaps in seconds.

    Every conversation begins with one of `prompts` shared prompts, chosen by Zipf's law of exponent `zipf`, or
    (`alone`) with a document of its own. It has a geometric number of turns of mean `turns`; the client sends answers
    again, cut by `strip` tokens (a hidden reasoning part) when that is positive.
    """

    requests: int = 4_000
    prompts: int = 200
    zipf: float = 0.9
    alone: float = 0.35
    turns: float = 2.5
    prompt: tuple[float, float] = (4_000, 1.0)
    document: tuple[float, float] = (9_000, 0.9)
    message: tuple[float, float] = (400, 1.2)
    answer: tuple[float, float] = (250, 0.8)
    strip: int = 0
    gap_seconds: float = 90.0
    sessions_per_second: float = 0.5

    @classmethod
    def drawn(cls, seed: int) -> ChatShape:
        """A shape of a seed's own: traces of several seeds differ in kind, not only in detail."""
        rng = np.random.Generator(np.random.PCG64([seed, 1]))
        return cls(
            prompts=int(rng.integers(20, 600)),
            zipf=float(rng.uniform(0.6, 1.3)),
            alone=float(rng.uniform(0.1, 0.6)),
            turns=float(rng.uniform(1.3, 6.0)),
            prompt=(float(rng.uniform(1_500, 8_000)), float(rng.uniform(0.5, 1.2))),
            document=(float(rng.uniform(4_000, 16_000)), float(rng.uniform(0.5, 1.0))),
            message=(float(rng.uniform(150, 1_500)), 1.2),
            answer=(float(rng.uniform(120, 500)), 0.8),
            strip=int(rng.choice([0, 0, 100])),
            gap_seconds=float(rng.uniform(20, 300)),
        )


_LONGEST = 120_000
"""Tokens of any piece; a lognormal has no end."""


def chat_trace(seed: int, shape: ChatShape | None = None) -> Trace:
    """The trace of a seed: the same on every machine."""
    shape = shape or ChatShape.drawn(seed)
    rng = np.random.Generator(np.random.PCG64([seed, 2]))
    ids = IdSource()
    shared = [ids.span(_size(rng, shape.prompt)) for _ in range(shape.prompts)]
    weights = np.arange(1, shape.prompts + 1, dtype=np.float64) ** -shape.zipf
    weights /= weights.sum()
    drafts: list[TraceRequest] = []
    clock = 0.0
    while len(drafts) < shape.requests:
        clock += float(rng.exponential(1 / shape.sessions_per_second))
        if rng.random() < shape.alone:
            opening = ids.span(_size(rng, shape.document))
        else:
            opening = shared[int(rng.choice(shape.prompts, p=weights))]
        _conversation(drafts, opening, clock, shape, rng, ids)
    requests = in_order(drafts[: shape.requests])
    details: dict[str, object] = {"format": "chat", "seed": seed}
    return Trace(f"chat:{seed}", requests, details)


def _conversation(
    drafts: list[TraceRequest], opening: Span, clock: float, shape: ChatShape, rng: np.random.Generator, ids: IdSource
) -> None:
    """Append the requests of one conversation."""
    history: tuple[Span, ...] = (opening,)
    after: int | None = None
    decoded: tuple[int, int] | None = None
    for _ in range(int(rng.geometric(1 / shape.turns))):
        pieces = (*history, ids.span(_size(rng, shape.message)))
        answer = ids.span(_size(rng, shape.answer))
        drafts.append(TraceRequest(clock, pieces, answer, ends(pieces), after, decoded))
        after, length = len(drafts) - 1, sum(piece.size for piece in pieces)
        kept = Span(answer.start + shape.strip, max(answer.size - shape.strip, 0))
        history = (*pieces, kept) if kept.size else pieces
        decoded = (length, length + kept.size) if kept.size and not shape.strip else None
        clock += float(rng.exponential(shape.gap_seconds))


def _size(rng: np.random.Generator, law: tuple[float, float]) -> int:
    return int(np.clip(rng.lognormal(np.log(law[0]), law[1]), 16, _LONGEST))
