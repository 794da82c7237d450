"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from k3hal.engine.interface import TokenLogprob
from k3hal.tokenizer import Tokenizer

# JSON has no minus infinity; the API's own floor for an impossible token.
_FLOOR = -9999.0


def chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of a chat choice: one entry per content token, `bytes` exact even inside a character."""
    content = [
        _entry(e.token_id, e.logprob, tokenizer)
        | {"top_logprobs": [_entry(token, logprob, tokenizer) for token, logprob in e.top]}
        for e in entries
    ]
    return {"content": content, "refusal": None}


def text_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer, offset: int) -> dict[str, Any]:
    """`logprobs` of a plain completion; `offset` is where the first token's text begins."""
    offsets: list[int] = []
    for entry in entries:
        offsets.append(offset)
        offset += len(_raw(entry.token_id, tokenizer).decode("utf-8", "replace"))
    return {
        "tokens": [_text(e.token_id, tokenizer) for e in entries],
        "token_logprobs": [max(e.logprob, _FLOOR) for e in entries],
        "top_logprobs": [{_text(t, tokenizer): max(p, _FLOOR) for t, p in e.top} for e in entries],
        "text_offset": offsets,
    }


def _entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = _raw(token, tokenizer)
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, _FLOOR), "bytes": list(raw)}


def _text(token: int, tokenizer: Tokenizer) -> str:
    """The text that names a token among others; bytes that are no text stay apart, as `bytes:\\xe2`."""
    raw = _raw(token, tokenizer)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _raw(token: int, tokenizer: Tokenizer) -> bytes:
    """A token's bytes; none for an id that only padded embeddings have."""
    return tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""
