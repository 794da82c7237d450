"""The K3 byte-BPE tokenizer: one `tiktoken.model` file, specials resolved by name."""

from __future__ import annotations

import binascii
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import tiktoken

from k3hal.errors import CheckpointError, RequestError

VOCAB_FILE = "tiktoken.model"
NUM_SPECIALS = 256

BOS, EOS, END_OF_MSG = "[BOS]", "[EOS]", "<|end_of_msg|>"
OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END = "<|media_begin|>", "<|media_content|>", "<|media_end|>"
MEDIA_PAD = "<|media_pad|>"

_SPECIAL_OFFSETS = {
    0: BOS,
    1: EOS,
    2: END_OF_MSG,
    3: OPEN,
    4: CLOSE,
    5: SEP,
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: MEDIA_BEGIN,
    19: MEDIA_CONTENT,
    20: MEDIA_END,
    21: MEDIA_PAD,
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENGLISH_TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENGLISH_TAIL}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENGLISH_TAIL}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# Cuts made before the split pattern runs; they change the ids of very long runs, so they are part of the vocabulary.
_MAX_PIECE = 400_000
_MAX_RUN = 25_000
_LONG_RUN = re.compile(rf"\s{{{_MAX_RUN + 1},}}|\S{{{_MAX_RUN + 1},}}")


class Tokenizer:
    """Text to token ids and back. Immutable and thread-safe.

    Ordinary ids are the ranks of the vocabulary file; 256 special ids follow its last rank. Ordinary encoding never
    produces a special id, whatever the text spells.
    """

    def __init__(self, ranks: Sequence[bytes]) -> None:
        base = len(ranks)
        names = [_SPECIAL_OFFSETS.get(i, f"<|reserved_token_{base + i}|>") for i in range(NUM_SPECIALS)]
        self._special_ids = {name: base + i for i, name in enumerate(names)}
        self._bytes = [*ranks, *(name.encode() for name in names)]
        self._num_ranks = base
        self._bpe = tiktoken.Encoding(
            "k3hal",
            pat_str=_PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
            special_tokens=self._special_ids,
        )
        self.eos_ids: frozenset[int] = frozenset((self.special(EOS), self.special(END_OF_MSG)))

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Load `path/tiktoken.model`. Raises `CheckpointError` naming the file, the line and what is wrong there."""
        file = Path(path) / VOCAB_FILE
        try:
            data = file.read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"cannot read the tokenizer {file}: {error.strerror or error}",
                hint=f"a tokenizer directory holds a file named {VOCAB_FILE}",
            ) from None
        return cls(_parse_vocab(data, str(file)))

    @property
    def vocab_size(self) -> int:
        """Number of ids: the ranks and the 256 specials."""
        return len(self._bytes)

    @property
    def special_base(self) -> int:
        """The first special id; every id from here on is special."""
        return self._num_ranks

    def special(self, name: str) -> int:
        """The id of the special token called `name`."""
        if name not in self._special_ids:
            raise CheckpointError(f"the vocabulary has no special token named {name!r}")
        return self._special_ids[name]

    def is_special(self, token_id: int) -> bool:
        return token_id >= self._num_ranks

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of `text` with special tokens disabled: text that spells one is encoded as the characters it is.

        Raises `RequestError` for half a surrogate pair, which is no character and has no UTF-8 form.
        """
        _check_unicode(text)
        if len(text) <= _MAX_RUN:
            return self._bpe.encode_ordinary(text)
        ids: list[int] = []
        for piece in _pieces(text):
            ids.extend(self._bpe.encode_ordinary(piece))
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id stands for; a special's are its name. Raises `RequestError` for an id out of range."""
        if not 0 <= token_id < len(self._bytes):
            raise RequestError(f"token id {token_id} is outside the vocabulary of {len(self._bytes)}")
        return self._bytes[token_id]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self.token_bytes, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")


def _pieces(text: str) -> Iterable[str]:
    """Cut `text` every 400 000 characters, and within that each over-long run of one whitespace class every 25 000."""
    for start in range(0, len(text), _MAX_PIECE):
        part = text[start : start + _MAX_PIECE]
        cuts = [0]
        for run in _LONG_RUN.finditer(part):
            cuts.extend(range(run.start() + _MAX_RUN, run.end(), _MAX_RUN))
        cuts.append(len(part))
        yield from (part[a:b] for a, b in itertools.pairwise(cuts))


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode: half a surrogate pair, U+{ord(text[error.start]):04X}, at {error.start}"
        ) from None


def _parse_vocab(data: bytes, source: str) -> list[bytes]:
    """Token bytes by rank from `base64 SP rank` lines; ranks must be dense and every single byte present."""
    by_rank: dict[int, bytes] = {}
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    for number, line in enumerate(lines, start=1):
        rank, token = _parse_line(line, f"{source} line {number}")
        if rank in by_rank:
            raise CheckpointError(f"{source} line {number}: rank {rank} appears twice")
        if rank >= len(lines):
            raise CheckpointError(
                f"{source} line {number}: rank {rank} in a file of {len(lines)} tokens; ranks are dense from 0"
            )
        by_rank[rank] = token
    ranks = [by_rank[rank] for rank in range(len(by_rank))]
    known = set(ranks)
    if len(known) != len(ranks):
        first = next(rank for rank, token in enumerate(ranks) if ranks.index(token) != rank)
        raise CheckpointError(f"{source}: the token of rank {first} appears twice")
    missing = [byte for byte in range(256) if bytes([byte]) not in known]
    if missing:
        raise CheckpointError(
            f"{source}: no token for {len(missing)} of the 256 single bytes, first 0x{missing[0]:02x}"
        )
    return ranks


def _parse_line(line: bytes, where: str) -> tuple[int, bytes]:
    fields = line.rstrip(b"\r").split(b" ")
    if len(fields) != 2:
        raise CheckpointError(f"{where}: expected `base64 rank`, got {line[:60]!r}")
    try:
        token = binascii.a2b_base64(fields[0], strict_mode=True)
    except binascii.Error as error:
        raise CheckpointError(f"{where}: {fields[0][:60]!r} is not base64 ({error})") from None
    if not token:
        raise CheckpointError(f"{where}: the token is empty")
    if not fields[1].isdigit():
        raise CheckpointError(f"{where}: {fields[1][:60]!r} is not a rank")
    return int(fields[1]), token
