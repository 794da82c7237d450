"""The small byte-BPE vocabulary that generated checkpoints carry, in the published `tiktoken.model` format."""

from __future__ import annotations

import base64

_WORDS = (
    "message", " role", '="', "user", "assistant", "system", "tool", "think", "response", "tools", "call",
    "argument", " key", " type", " name", " index", " tool", "string", "number", "boolean", "null", "object",
    "array", "json", "image", " the", " and", "Hello",
)  # fmt: skip


def byte_order() -> list[int]:
    """The 256 byte values in rank order: printable ASCII, printable Latin-1, then the rest ascending."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return printable + [b for b in range(256) if b not in set(printable)]


def synthetic_ranks() -> list[bytes]:
    """Token bytes by rank: the single bytes, then every prefix (length >= 2) of each markup word, without repeats."""
    ranks = [bytes([b]) for b in byte_order()]
    seen = set(ranks)
    for word in _WORDS:
        raw = word.encode()
        for prefix in (raw[:end] for end in range(2, len(raw) + 1)):
            if prefix not in seen:
                seen.add(prefix)
                ranks.append(prefix)
    return ranks


def synthetic_vocab_bytes() -> bytes:
    """The content of `tiktoken.model`: one `base64(token) rank` line per token, each ended by a line feed."""
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(synthetic_ranks()))
    return "".join(lines).encode()
