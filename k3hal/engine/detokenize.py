"""Token ids to text as they arrive, without ever splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from k3hal.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """The text of a growing token sequence; each id costs O(1) and at most three bytes are held back.

    The pieces returned join to what decoding the whole sequence at once gives. Special tokens are left out unless
    `skip_special` is false; ids beyond the vocabulary, which a model with padded embeddings can produce, have no text.
    """

    __slots__ = ("_decoder", "_skip_from", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._decoder = _UTF8("replace")
        self._skip_from = tokenizer.special_base if skip_special else tokenizer.vocab_size

    def add(self, token_id: int) -> str:
        """The text that `token_id` completes, often empty in the middle of a character."""
        if token_id >= self._skip_from:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def add_all(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self.add, token_ids))

    def flush(self) -> str:
        """What is held back, as U+FFFD; the decoder starts afresh."""
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        return text
