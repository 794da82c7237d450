"""One generation run as every engine under test reports it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from k3hal.bench.steps import Step


@dataclass(frozen=True, slots=True)
class Run:
    """Greedy continuations of prompts of one length, and when what happened. Durations in seconds.

    `first_tokens` hold each prompt's time from submission to its first token. `decode_tokens` were produced within
    `decode_seconds` by steps in which every sequence decoded one token; nothing else happened in that time.
    """

    tokens: list[list[int]]
    first_tokens: list[float]
    decode_tokens: int
    decode_seconds: float
    steps: list[Step] = field(default_factory=list)

    @property
    def decode_rate(self) -> float:
        """Tokens a second."""
        return self.decode_tokens / self.decode_seconds

    def prefill_rate(self, prompt_tokens: int) -> float:
        """Prompt tokens a second until every prompt has its first token."""
        return len(self.tokens) * prompt_tokens / max(self.first_tokens)


class Contender(Protocol):
    """An engine under test, loaded."""

    name: str

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Run:
        """Continue every prompt greedily by exactly `num_tokens` tokens, all prompts at once."""
        ...


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two runs' tokens differ."""

    prompt: int
    position: int
    ours: int
    theirs: int

    def __str__(self) -> str:
        where = f"prompt {self.prompt}, output token {self.position}"
        return f"{where}: k3hal gives {self.ours}, the peer {self.theirs}"


def first_difference(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Difference | None:
    """Where greedy outputs of the same prompts part; None when they are equal. A missing token is -1."""
    for prompt, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        length = max(len(mine), len(other))
        for position in range(length):
            a = mine[position] if position < len(mine) else -1
            b = other[position] if position < len(other) else -1
            if a != b:
                return Difference(prompt, position, a, b)
    return None
