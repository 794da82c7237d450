"""The file of a replay engine: one JSON object a line, `{"ids": […], "per_step": 1, "step_ms": 0}`.

A first line `{"takes_images": true}` says what the engine that is replayed takes, and is no answer.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3hal.errors import InputError


@dataclass(frozen=True, slots=True)
class ReplayLine:
    """The tokens of one answer, how many come per step, and the seconds a step takes."""

    ids: tuple[int, ...]
    per_step: int = 1
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplayFile:
    """The answers of a file, and whether requests for them may have images."""

    lines: list[ReplayLine]
    takes_images: bool = False


TELL_IMAGES = 'a first line {"takes_images": true} in its file changes that'


def read_replay_file(path: str | Path, vocab_size: int) -> ReplayFile:
    """The whole file. Raises `InputError` naming the line, the field and what was expected."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read the replay file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"the replay file {path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    lines = text.removesuffix("\n").split("\n") if text else []
    answers: list[ReplayLine] = []
    takes_images = False
    for number, line in enumerate(lines, start=1):
        where = f"{path} line {number}"
        value = _read_json(line, where)
        if number == 1 and isinstance(value, dict) and "takes_images" in value:
            takes_images = _read_head(value, where)
        else:
            answers.append(_read_line(value, where, vocab_size))
    if not answers:
        lack = "has no answer" if lines else "is empty"
        raise InputError(f"the replay file {path} {lack}", hint='a line is {"ids": [1, 2, 3]}')
    return ReplayFile(answers, takes_images)


def _read_json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from None


def _read_head(value: dict[str, Any], where: str) -> bool:
    """What the first line says about the engine."""
    if set(value) != {"takes_images"} or not isinstance(value["takes_images"], bool):
        raise InputError(f'{where}: a line that says takes_images must be {{"takes_images": true}} and nothing else')
    return value["takes_images"]


def _read_line(value: Any, where: str, vocab_size: int) -> ReplayLine:
    if not isinstance(value, dict) or "ids" not in value:
        raise InputError(f'{where}: expected an object with "ids"')
    unknown = sorted(set(value) - {"ids", "per_step", "step_ms"})
    if unknown:
        raise InputError(f"{where}: unknown field {unknown[0]!r}; known are ids, per_step and step_ms")
    ids = value["ids"]
    if not isinstance(ids, list) or not all(_is_int(token) for token in ids):
        raise InputError(f"{where}: ids must be a list of token ids")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise InputError(f"{where}: token id {outside[0]} is outside the vocabulary of {vocab_size}")
    per_step, step_ms = value.get("per_step", 1), value.get("step_ms", 0)
    if not _is_int(per_step) or per_step < 1:
        raise InputError(f"{where}: per_step must be a whole number of at least 1, got {per_step!r}")
    if not (_is_int(step_ms) or isinstance(step_ms, float)) or not 0 <= step_ms < math.inf:
        raise InputError(f"{where}: step_ms must be a number of at least 0, got {step_ms!r}")
    return ReplayLine(tuple(ids), per_step, step_ms / 1000)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
