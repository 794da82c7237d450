"""Typed access to a configuration file's keys, where every mistake is one line naming key, value and expectation."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from k3hal.dispatch.errors import ConfigError


class Fields:
    """One JSON object of a configuration file.

    `where` is the path of the object in the file (`"text_config."`). Every reader takes the keys under which a value
    may stand, preferred one first; the first that is present wins, and a JSON null counts as absent. A reader without
    a default raises `ConfigError` when its keys are absent.
    """

    def __init__(self, data: Mapping[str, Any], where: str = "") -> None:
        self.data = data
        self.where = where

    def has(self, *keys: str) -> bool:
        return any(self.data.get(key) is not None for key in keys)

    def value(self, *keys: str) -> Any:
        """The first non-null value under `keys`, else None."""
        return next((self.data[key] for key in keys if self.data.get(key) is not None), None)

    def fail(self, key: str, expected: str) -> ConfigError:
        """The error for the value that stands under `key`."""
        if self.data.get(key) is None:
            return ConfigError(f"{self.where}{key} is missing; expected {expected}")
        return ConfigError(f"{self.where}{key} is {_short(self.data[key])}; expected {expected}")

    def _found(self, keys: tuple[str, ...]) -> str:
        return next((key for key in keys if self.data.get(key) is not None), keys[0])

    def integer(self, *keys: str, low: int = 1, high: int = 2**31 - 1) -> int:
        found = self._found(keys)
        value = self.data.get(found)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            bound = f"an integer of at least {low}" if high == 2**31 - 1 else f"an integer from {low} to {high}"
            raise self.fail(found, bound)
        return value

    def optional_integer(self, *keys: str, low: int = 1, high: int = 2**31 - 1) -> int | None:
        return self.integer(*keys, low=low, high=high) if self.has(*keys) else None

    def number(self, *keys: str, low: float = -math.inf, high: float = math.inf, default: float | None = None) -> float:
        """A finite number strictly between `low` and `high`."""
        found = self._found(keys)
        value = self.data.get(found)
        if value is None and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and _in_range(value, low, high):
            return float(value)
        raise self.fail(found, _range_text(low, high))

    def boolean(self, *keys: str, default: bool | None = None) -> bool:
        found = self._found(keys)
        value = self.data.get(found)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise self.fail(found, "true or false")
        return value

    def choice(self, *keys: str, among: Sequence[str], default: str | None = None) -> str:
        found = self._found(keys)
        value = self.data.get(found)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or value not in among:
            raise self.fail(found, " or ".join(repr(name) for name in among))
        return value

    def child(self, key: str) -> Fields:
        value = self.data.get(key)
        if not isinstance(value, Mapping):
            raise self.fail(key, "an object")
        return Fields(value, f"{self.where}{key}.")

    def integers(self, key: str, *, low: int, high: int) -> tuple[int, ...]:
        """A list of integers, each in `low..high`."""
        value = self.data.get(key)
        if not isinstance(value, list) or any(isinstance(item, bool) or not isinstance(item, int) for item in value):
            raise self.fail(key, "a list of integers")
        outside = next((item for item in value if not low <= item <= high), None)
        if outside is not None:
            raise ConfigError(f"{self.where}{key} holds {outside}; expected integers from {low} to {high}")
        return tuple(value)

    def require_absent(self, key: str, why: str) -> None:
        if self.data.get(key) is not None:
            raise self.fail(key, f"no such key: {why}")


def _in_range(value: int | float, low: float, high: float) -> bool:
    """Compared as given: an integer too large for a float is out of range, not an overflow."""
    return low < value < high and abs(value) <= sys.float_info.max


def _range_text(low: float, high: float) -> str:
    if math.isinf(low) and math.isinf(high):
        return "a finite number"
    if math.isinf(high):
        return f"a finite number above {low:g}"
    if math.isinf(low):
        return f"a finite number below {high:g}"
    return f"a number between {low:g} and {high:g}"


def _short(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def read_json_object(path: Path, *, limit: int = 64 << 20) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises `ConfigError` when the file is absent, larger than `limit` bytes, not UTF-8, not JSON or not an object.
    """
    try:
        if path.stat().st_size > limit:
            raise ConfigError(f"{path} is {path.stat().st_size} bytes; expected at most {limit}")
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a JSON {type(data).__name__}; expected an object")
    return data
