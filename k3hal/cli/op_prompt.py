"""The prompt of the verbs that run a model: a file of text, or of token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from k3hal.errors import InputError

if TYPE_CHECKING:
    from k3hal.tokenizer import Tokenizer


def read_prompt(path: Path) -> str:
    """The file's text. Raises `InputError` for one that cannot be read or is no text."""
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def token_ids(text: str, path: Path, tokenizer: Tokenizer) -> list[int]:
    """Ids of the text; of a text that begins with `[`, the JSON list of ids that it is."""
    if not text.lstrip().startswith("["):
        return tokenizer.encode_ordinary(text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a JSON list of token ids: {error}") from None
    if any(type(token) is not int for token in value):
        raise InputError(f"{path} is not a JSON list of token ids")
    return value
