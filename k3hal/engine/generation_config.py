"""A checkpoint's generation_config.json: sampling defaults and end-of-sequence ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k3hal.engine.sampling import GenerationDefaults
from k3hal.errors import ConfigError, RequestError
from k3hal.model.layout import GENERATION_CONFIG
from k3hal.sampling_params import SamplingParams

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")


def read_generation_config(folder: Path, vocab_size: int) -> tuple[GenerationDefaults, tuple[int, ...]]:
    """Defaults and end ids of a checkpoint; our own defaults and no ids where the file is absent.

    Keys that are absent or null keep the default, keys unknown here are other engines' matter. Raises `ConfigError`.
    """
    path = folder / GENERATION_CONFIG
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return GenerationDefaults(), ()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return _defaults(data, path), _end_ids(data.get("eos_token_id"), path, vocab_size)


def _defaults(data: dict[str, Any], path: Path) -> GenerationDefaults:
    given = {key: data[key] for key in _SAMPLING_KEYS if data.get(key) is not None}
    try:
        SamplingParams(**given)
    except RequestError as error:
        raise ConfigError(f"{path}: {error.message}") from error
    return GenerationDefaults(**given)


def _end_ids(value: Any, path: Path, vocab_size: int) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ConfigError(f"{path}: eos_token_id holds {token!r}, which is no id of the {vocab_size} in the model")
    return tuple(ids)
