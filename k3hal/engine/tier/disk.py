"""Objects in files, one each, that survive the process and every way in which it may end."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from k3hal.engine.cache.keys import PrefixNames
from k3hal.engine.tier.backing import ObjectDamagedError, ObjectLostError
from k3hal.engine.tier.interface import ObjectMeta
from k3hal.engine.tier.object_file import FIRST_READ, Header, ObjectFormat
from k3hal.errors import UsageError

logger = logging.getLogger(__name__)

_ENDING, _UNFINISHED = ".k3obj", ".tmp"
_SEED_BYTES = 32
_FOLDER_NAME = re.compile(r"[0-9a-f]{32}")


class DiskStore:
    """`Backing` in `root`/FINGERPRINT: `objects` by the first two digits of their keys, the names' `seed`, a `lock`.

    A file is written under another name, forced to the disk and then renamed, so that it is there whole or not at all.
    The folder serves one process at a time. What other models or versions left in `root` counts against `capacity` when
    it is opened, and goes first. Raises `UsageError` when the folder cannot be used.
    """

    shared = False

    def __init__(self, root: Path, form: ObjectFormat, capacity: int) -> None:
        self.form, self.capacity = form, capacity
        self.dropped = 0
        self._folder = root / form.fingerprint
        self._objects = self._folder / "objects"
        try:
            root.mkdir(parents=True, exist_ok=True)
            for folder in (self._folder, self._objects):
                folder.mkdir(mode=0o700, exist_ok=True)
            self._lock = _locked(self._folder / "lock")
            if self._lock is None:
                raise UsageError(
                    f"the prefix cache in {root} is in use by another process",
                    hint="give every engine a folder of its own",
                )
            self.seed = self._read_seed()
            self._sync(self._folder)
        except OSError as error:
            raise UsageError(
                f"the prefix cache cannot use {root}: {error.strerror or error}", hint="give a writable folder"
            ) from error
        self._make_room_from_others(root)

    def scan(self) -> list[ObjectMeta]:
        found: list[tuple[float, ObjectMeta]] = []
        why = ""
        for path in sorted(self._objects.glob("*/*")):
            try:
                if path.suffix == _UNFINISHED:
                    path.unlink(missing_ok=True)
                    continue
                if not path.is_file():  # to open a pipe would wait for its writer
                    raise ObjectDamagedError("it is no file")
                with path.open("rb") as file:
                    meta = self._open(file.fileno(), path).meta
                found.append((path.stat().st_mtime, meta))
            except (ObjectDamagedError, OSError) as error:
                self.dropped += 1
                why = why or str(error)
                with contextlib.suppress(OSError):
                    path.unlink()
        if why:
            logger.warning("%d files of the prefix cache in %s were of no use: %s", self.dropped, self._folder, why)
        return [meta for _, meta in sorted(found, key=lambda one: one[0])]

    def resolve(self, names: PrefixNames, limit: int, floor: int) -> list[ObjectMeta]:
        """Nobody else writes here: what there is was found by `scan` or written since."""
        return []

    def size(self, meta: ObjectMeta) -> int:
        return self.form.size(meta)

    def write(self, meta: ObjectMeta, sums: np.ndarray, pages: Sequence[memoryview]) -> None:
        path = self._path(meta.key)
        try:
            self._write(path, [self.form.header(meta, sums), *pages])
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error

    def read(self, meta: ObjectMeta, first: int, out: Sequence[memoryview]) -> np.ndarray:
        path = self._path(meta.key)
        try:
            file = path.open("rb", buffering=0)
        except FileNotFoundError:
            raise ObjectLostError from None
        with file:
            header = self._open(file.fileno(), path)
            if header.meta != meta:
                raise ObjectDamagedError(f"{path.name} holds another object")
            page_bytes = self.form.shape.page_bytes
            for place, target in enumerate(out):
                got = os.preadv(file.fileno(), [target], header.data + (first + place) * page_bytes)
                if got != page_bytes:
                    raise ObjectDamagedError(f"{path.name} became shorter while it was read")
            os.utime(file.fileno())
        return header.sums[first : first + len(out)]

    def remove(self, meta: ObjectMeta) -> None:
        self._path(meta.key).unlink(missing_ok=True)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _write(self, path: Path, parts: Sequence[bytes | memoryview]) -> None:
        if not path.parent.exists():
            path.parent.mkdir(mode=0o700)
            self._sync(self._objects)
        unfinished = path.with_suffix(_UNFINISHED)
        try:
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(path)
            self._sync(path.parent)
        except BaseException:
            for left in (unfinished, path):  # a renamed file that may not survive counts for nothing
                with contextlib.suppress(OSError):  # the next start removes it
                    left.unlink(missing_ok=True)
            raise

    def _open(self, fd: int, path: Path) -> Header:
        """A file's header. Raises `ObjectDamagedError`, with the file's name."""
        size = os.fstat(fd).st_size
        start = os.pread(fd, FIRST_READ, 0)
        try:
            whole = self.form.header_bytes(start)
            if whole > len(start):
                start = os.pread(fd, whole, 0)
            header = self.form.parse(start, size)
            if header.meta.key.hex() != path.stem:
                raise ObjectDamagedError("it holds another object")
        except ObjectDamagedError as error:
            raise ObjectDamagedError(f"{path.name} in the prefix cache: {error}") from error
        return header

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._objects / name[:2] / (name + _ENDING)

    def _read_seed(self) -> bytes:
        """What all names here start from. Without it they mean nothing, so it is made anew with an empty folder."""
        path = self._folder / "seed"
        if path.exists():
            seed = path.read_bytes()
            if len(seed) == _SEED_BYTES:
                return seed
            logger.warning("the seed of the prefix cache in %s is damaged; the cache starts empty", self._folder)
        shutil.rmtree(self._objects)
        self._objects.mkdir(mode=0o700)
        seed = secrets.token_bytes(_SEED_BYTES)
        unfinished = path.with_suffix(_UNFINISHED)
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(seed)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
        return seed

    def _make_room_from_others(self, root: Path) -> None:
        """Remove other models' and versions' folders, oldest first, as far as all together are more than allowed."""
        sizes = {folder: _bytes_in(folder) for folder in _folders(root)}
        excess = sum(sizes.values()) - self.capacity
        for folder in sorted(sizes, key=_modified):
            if excess <= 0:
                break
            if folder == self._folder:
                continue
            try:
                removed = _remove_unused(folder)
            except OSError as error:  # another user's, or another engine that starts is removing it too
                logger.warning("the prefix cache in %s cannot make room: %s", folder, error.strerror or error)
                continue
            if removed:
                excess -= sizes[folder]
                logger.warning("the prefix cache of another model or version in %s made room", folder)

    def _sync(self, folder: Path) -> None:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _locked(path: Path) -> int | None:
    """A file that this process alone has locked, until it is closed; None when another has."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _remove_unused(folder: Path) -> bool:
    """Remove a `DiskStore`'s folder unless a process uses it. Raises `OSError`."""
    lock = _locked(folder / "lock")
    if lock is None:
        return False
    try:
        shutil.rmtree(folder)
    finally:
        os.close(lock)
    return True


def _modified(folder: Path) -> float:
    """When it was; 0 where it is gone by now."""
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _folders(root: Path) -> list[Path]:
    """Folders that `DiskStore` made, as far as this user may look into them."""
    named = [folder for folder in root.iterdir() if _FOLDER_NAME.fullmatch(folder.name) and not folder.is_symlink()]
    return [folder for folder in named if os.path.isfile(folder / "lock") and os.path.isdir(folder / "objects")]


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total
