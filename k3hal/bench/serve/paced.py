"""Answers that a server without a model gives at a steady pace, and whether they came through whole."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from k3hal.bench.serve.answers import Answer
from k3hal.model.synthetic_vocab import synthetic_ranks, synthetic_vocab_bytes
from k3hal.tokenizer import Tokenizer

_CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


class PacedAnswers:
    """One answer for each request, all of them different; a token is one character.

    A token lost, doubled or put into another stream makes a text that is none of them.
    """

    def __init__(self, count: int, length: int, seed: int) -> None:
        drawn = np.random.default_rng(seed).integers(0, len(_CHARACTERS), (count, length))
        self.texts = ["".join(_CHARACTERS[i] for i in row) for row in drawn.tolist()]

    def write(self, folder: Path, pace: float) -> list[str]:
        """Write replay file and vocabulary into `folder`: the flags of `k3hal serve` that use them."""
        (folder / "tiktoken.model").write_bytes(synthetic_vocab_bytes())
        tokenizer = Tokenizer(synthetic_ranks())
        ids = {character: tokenizer.encode_ordinary(character)[0] for character in _CHARACTERS}
        lines = [json.dumps({"ids": [ids[c] for c in text], "step_ms": 1000 / pace}) for text in self.texts]
        (folder / "replay.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return ["--engine", f"replay:{folder / 'replay.jsonl'}", "--tokenizer", str(folder)]

    def wrong(self, answers: Sequence[Answer]) -> int:
        """How many answers that came whole are none of the texts, or the same one as another."""
        got = Counter(answer.text for answer in answers if not answer.error)
        expected = set(self.texts)
        return sum(count - (text in expected) for text, count in got.items())
