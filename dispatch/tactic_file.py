"""The file of the tactic cache: read without trusting it, and written so that it is there whole or not at all."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from k3hal.dispatch.cache_dir import HINT, cache_dir
from k3hal.dispatch.call import PHASES, Phase
from k3hal.dispatch.errors import InputError
from k3hal.dispatch.tactics import Fingerprint, Rejection, TacticCache, Tuned

NAME, MAJOR = "k3hal.tactics", 1
CLEAR = "`k3hal op tune --clear` starts it anew"


def tactics_folder() -> Path:
    """Where the cache and the cases of rejected tactics are kept."""
    return cache_dir() / "tactics"


def tactics_file() -> Path:
    """The cache's one file."""
    return tactics_folder() / "tactics.json"


def load_tactics(path: Path | None = None) -> TacticCache:
    """The cache in a file, empty where there is none. Raises `InputError`, one line naming the file."""
    path = path or tactics_file()
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return TacticCache()
    except OSError as error:
        raise InputError(f"{path}: the tactic cache cannot be read: {error.strerror}", hint=HINT) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a JSON file: {error}", hint=CLEAR) from error
    return _Reader(str(path)).cache(data)


def update_tactics(change: Callable[[TacticCache], TacticCache], path: Path | None = None) -> TacticCache:
    """Read the cache, change it and write it back, alone among processes; returns what was written."""
    path = path or tactics_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            cache = change(load_tactics(path))
            partial = path.with_suffix(f".{os.getpid()}.partial")
            partial.write_text(json.dumps(_json(cache), indent=1, allow_nan=False) + "\n", "utf-8")
            os.replace(partial, path)
    except OSError as error:
        raise InputError(f"{path}: the tactic cache cannot be written: {error.strerror}", hint=HINT) from error
    return cache


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _json(cache: TacticCache) -> dict[str, Any]:
    tuned, rejected = ([asdict(entry) for entry in entries] for entries in (cache.tuned, cache.rejected))
    return {"schema": f"{NAME}/{MAJOR}", "tuned": tuned, "rejected": rejected}


class _Reader:
    """Checks one file's values; `where` grows by the entry looked at."""

    def __init__(self, where: str) -> None:
        self._where = where

    def fail(self, what: str) -> NoReturn:
        raise InputError(f"{self._where}: {what}", hint=CLEAR)

    def cache(self, data: Any) -> TacticCache:
        if not isinstance(data, dict) or data.get("schema") != f"{NAME}/{MAJOR}":
            self.fail(f"not a tactic cache of schema {NAME}/{MAJOR}")
        tuned = tuple(reader.tuned(item) for reader, item in self._items(data, "tuned"))
        return TacticCache(tuned, tuple(reader.rejection(item) for reader, item in self._items(data, "rejected")))

    def _items(self, data: dict[str, Any], name: str) -> Iterator[tuple[_Reader, dict[str, Any]]]:
        items = data.get(name)
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            self.fail(f"{name!r} is not a list of objects")
        return ((_Reader(f"{self._where}: {name} {index}"), item) for index, item in enumerate(items))

    def tuned(self, item: dict[str, Any]) -> Tuned:
        dims, cases = item.get("dims"), item.get("cases")
        if not isinstance(dims, dict) or any(isinstance(value, dict | list) for value in dims.values()):
            self.fail("'dims' is not an object of plain values")
        if type(cases) is not int:
            self.fail("'cases' is not a whole number")
        phase = self._phase(self._text(item, "phase"))
        op, provider, dtype, tactic = (self._text(item, key) for key in ("op", "provider", "dtype", "tactic"))
        gain, noise = self._number(item, "gain"), self._number(item, "noise")
        return Tuned(op, provider, dtype, phase, dims, self._made_for(item), tactic, gain, noise, cases)

    def rejection(self, item: dict[str, Any]) -> Rejection:
        op, provider, tactic, dtype = (self._text(item, key) for key in ("op", "provider", "tactic", "dtype"))
        status, reason, case = (self._text(item, key) for key in ("status", "reason", "case"))
        return Rejection(op, provider, tactic, dtype, self._made_for(item), status, reason, case)

    def _made_for(self, item: dict[str, Any]) -> Fingerprint:
        data = item.get("made_for")
        if not isinstance(data, dict):
            self.fail("'made_for' is not an object")
        versions = data.get("versions")
        if not isinstance(versions, dict) or not all(isinstance(version, str) for version in versions.values()):
            self.fail("'versions' is not an object of strings")
        return Fingerprint(self._text(data, "device"), self._text(data, "source"), versions)

    def _phase(self, word: str) -> Phase:
        for phase in PHASES:
            if phase == word:
                return phase
        return self.fail(f"phase is {word!r}, not one of {', '.join(PHASES)}")

    def _text(self, item: dict[str, Any], key: str) -> str:
        value = item.get(key)
        if not isinstance(value, str):
            self.fail(f"{key!r} is {'not a string' if key in item else 'missing'}")
        return value

    def _number(self, item: dict[str, Any], key: str) -> float:
        value = item.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.fail(f"{key!r} is not a finite number")
        return float(value)
