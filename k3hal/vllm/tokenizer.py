"""The K3 vocabulary as vLLM wants a tokenizer: from `tiktoken.model` alone, with no code from the checkpoint."""
# vLLM is installed in environments of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, overload

from k3hal.errors import CheckpointError, RequestError
from k3hal.tokenizer import BOS, CLOSE, EOS, OPEN, SEP, VOCAB_FILE, Tokenizer
from k3hal.vllm.chat import ChatRequest, render

if TYPE_CHECKING:
    from transformers import AddedToken, BatchEncoding

MODE = "kimi_k3"
"""vLLM's name of the tokenizer and renderer of Kimi K3."""

# Markup that stays in the text whatever `skip_special_tokens` says: the parsers read it.
_MARKUP = (OPEN, CLOSE, SEP)
_OWN_FILES = ("tokenizer_config.json", "tokenizer.json")


def brings_only_ranks(folder: str | Path) -> bool:
    """Whether `folder` has a vocabulary but nothing that tells transformers how to use it, as K3HAL's own have."""
    path = Path(folder)
    return (path / VOCAB_FILE).is_file() and not any((path / name).exists() for name in _OWN_FILES)


def choose_tokenizer_mode(model_config: Any) -> None:
    """Give a Kimi-Linear of K3HAL's making the K3 tokenizer. vLLM knows to do so for K3 alone, and would otherwise
    build a tokenizer from the ranks with another split pattern and no special tokens.
    """
    if model_config.tokenizer_mode in ("auto", "hf") and brings_only_ranks(model_config.tokenizer):
        model_config.tokenizer_mode = MODE


class TextError(RequestError, ValueError):
    """A request's text or token ids are none. vLLM answers 400 to a `ValueError`, 500 to an error it does not know."""

    @classmethod
    def of(cls, error: RequestError) -> TextError:
        return cls(error.message, hint=error.hint, param=error.param)


class K3Tokenizer:
    """A `vllm.tokenizers.TokenizerLike`. Immutable and thread-safe.

    As with Hugging Face tokenizers, text given to `encode` may name special tokens; a chat is rendered piece by piece
    and may not. Token strings are in GPT-2's alphabet of one character a byte.
    """

    is_fast = True  # in vLLM: tokens become text without help for added ones
    vocab_files_names: ClassVar[dict[str, str]] = {"vocab_file": VOCAB_FILE}
    """By which xgrammar knows a vocabulary of bytes in GPT-2's alphabet."""
    truncation_side: str

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | Path,
        *args: Any,
        trust_remote_code: bool = False,
        revision: str | None = None,
        download_dir: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """The tokenizer of a folder. A checkpoint's own tokenizer code is used if it is there and trusted, and what is
        no folder, or has another tokenizer, is left to vLLM's loader. Raises `CheckpointError` for a vocabulary that is
        missing or damaged.
        """
        path = Path(path_or_repo_id)
        own = any((path / name).exists() for name in _OWN_FILES)
        if not path.is_dir() or (own and (trust_remote_code or not (path / VOCAB_FILE).is_file())):
            from vllm.tokenizers.hf import CachedHfTokenizer

            return CachedHfTokenizer.from_pretrained(
                path_or_repo_id, *args, trust_remote_code=trust_remote_code, revision=revision,
                download_dir=download_dir, **kwargs,
            )  # fmt: skip
        return cls(Tokenizer.from_dir(path), str(path_or_repo_id), kwargs.get("truncation_side") or "left")

    def __init__(self, tokenizer: Tokenizer, name_or_path: str = "", truncation_side: str = "left") -> None:
        if truncation_side not in ("left", "right"):
            raise CheckpointError(f"truncation_side must be left or right, got {truncation_side!r}")
        self.k3 = tokenizer
        self.name_or_path = name_or_path
        self.truncation_side = truncation_side
        base = tokenizer.special_base
        self._specials = {tokenizer.decode([i]): i for i in range(base, tokenizer.vocab_size)}
        self._named = re.compile("|".join(map(re.escape, self._specials)))

    @property
    def vocab_size(self) -> int:
        return self.k3.vocab_size

    def __len__(self) -> int:
        return self.k3.vocab_size

    @property
    def max_token_id(self) -> int:
        return self.k3.vocab_size - 1

    @cached_property
    def max_chars_per_token(self) -> int:
        return max(len(self.k3.token_bytes(i)) for i in range(self.k3.vocab_size))

    @property
    def bos_token_id(self) -> int:
        return self.k3.special(BOS)

    @property
    def eos_token_id(self) -> int:
        return self.k3.special(EOS)

    @property
    def pad_token_id(self) -> int:
        return self.k3.special("[PAD]")

    @cached_property
    def all_special_tokens(self) -> list[str]:
        """Those that `skip_special_tokens` leaves out."""
        return [name for name in self._specials if name not in _MARKUP]

    @cached_property
    def all_special_ids(self) -> list[int]:
        return [self._specials[name] for name in self.all_special_tokens]

    @cached_property
    def _skipped(self) -> frozenset[int]:
        return frozenset(self.all_special_ids)

    def num_special_tokens_to_add(self) -> int:
        return 0

    @cached_property
    def _vocab(self) -> dict[str, int]:
        ordinary = {_spelled(self.k3.token_bytes(i)): i for i in range(self.k3.special_base)}
        return ordinary | self._specials

    def get_vocab(self) -> dict[str, int]:
        return dict(self._vocab)

    def get_added_vocab(self) -> dict[str, int]:
        return dict(self._specials)

    @cached_property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """All are special here, markup too: vLLM leaves these tokens out of JSON."""
        from transformers import AddedToken

        return {i: AddedToken(name, special=True, normalized=False) for name, i in self._specials.items()}

    def encode(
        self,
        text: str,
        truncation: bool | None = None,
        max_length: int | None = None,
        add_special_tokens: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids; nothing is added at either end, whatever `add_special_tokens` says. Raises `TextError`."""
        try:
            ids = self._encoded(text)
        except RequestError as error:
            raise TextError.of(error) from None
        if truncation and max_length is not None and len(ids) > max_length:
            return ids[len(ids) - max_length :] if self.truncation_side == "left" else ids[:max_length]
        return ids

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = []
        at = 0
        for match in self._named.finditer(text):
            ids += self.k3.encode_ordinary(text[at : match.start()])
            ids.append(self._specials[match.group()])
            at = match.end()
        return ids + self.k3.encode_ordinary(text[at:])

    def __call__(
        self,
        text: str | list[str],
        text_pair: str | None = None,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        **kwargs: Any,
    ) -> BatchEncoding:
        from transformers import BatchEncoding

        if text_pair is not None:
            raise CheckpointError("K3's tokenizer takes one text, not a pair")
        if isinstance(text, str):
            ids: Any = self.encode(text, truncation, max_length)
            return BatchEncoding({"input_ids": ids, "attention_mask": [1] * len(ids)})
        ids = [self.encode(item, truncation, max_length) for item in text]
        return BatchEncoding({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})

    def decode(self, ids: Sequence[int] | int, skip_special_tokens: bool = False, **kwargs: Any) -> str:
        """Text of token ids. Raises `TextError`."""
        wanted = [ids] if isinstance(ids, int) else ids
        try:
            return self.k3.decode(i for i in wanted if not (skip_special_tokens and i in self._skipped))
        except RequestError as error:
            raise TextError.of(error) from None

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int: ...

    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]: ...

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int]:
        """Ids of token strings; of what is none, the id of `[UNK]`."""
        unknown = self.k3.special("[UNK]")
        if isinstance(tokens, str):
            return self._vocab.get(tokens, unknown)
        return [self._vocab.get(token, unknown) for token in tokens]

    def convert_ids_to_tokens(self, ids: Sequence[int], skip_special_tokens: bool = False) -> list[str]:
        """Token strings. Raises `TextError`."""
        kept = (i for i in ids if not (skip_special_tokens and i in self._skipped))
        try:
            return [_spelled(self.k3.token_bytes(i)) for i in kept]
        except RequestError as error:
            raise TextError.of(error) from None

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return b"".join(map(_unspelled, tokens)).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: list[Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        *,
        conversation: list[Any] | None = None,
        tokenize: bool = False,
        **kwargs: Any,
    ) -> str | list[int]:
        """The chat as K3's markup: token ids, or text that is for reading only. Raises `RequestError`."""
        asked = conversation if messages is None else messages
        prompt = render(ChatRequest(asked or [], tools=tools, **_chat_fields(kwargs)))
        return prompt.ids(self.k3) if tokenize else prompt.text()


def _chat_fields(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: kwargs[name] for name in ("tool_choice", "response_format") if name in kwargs}
    return {**fields, "template": {name: value for name, value in kwargs.items() if name not in fields}}


def _gpt2_alphabet() -> list[str]:
    """The character of each byte: itself where Latin-1 shows it, else the next one from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(0x100 + hidden.index(byte)) for byte in range(256)]


_ALPHABET = _gpt2_alphabet()
_BYTES = {character: byte for byte, character in enumerate(_ALPHABET)}


def _spelled(token: bytes) -> str:
    return "".join(map(_ALPHABET.__getitem__, token))


def _unspelled(token: str) -> bytes:
    """The bytes of a token string; characters that are in no token string stand for themselves."""
    return b"".join(bytes([_BYTES[c]]) if c in _BYTES else c.encode() for c in token)
