"""What the disk under the tier refuses, with real files: only what removing something helps against costs anything."""

from __future__ import annotations

import errno
import logging
import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from k3hal.engine.cache.keys import PrefixContext, PrefixNames, UnitKeys
from k3hal.engine.tier import shelf as shelf_module
from k3hal.engine.tier.disk import DiskStore
from k3hal.engine.tier.host import HostTier
from k3hal.engine.tier.interface import ObjectShape
from k3hal.engine.tier.object_file import ObjectFormat

from .tier_kit import ManualJobs

SHAPE = ObjectShape(page_tokens=4, page_bytes=4096, run=3, unit=4)
FORM = ObjectFormat(SHAPE, "0123456789abcdef" * 2)
ERRORS = ("EIO", "EROFS", "EACCES", "ESTALE", "EFBIG", "EMFILE", "ENODEV")
NO_ROOM = ("ENOSPC", "EDQUOT")


def names_of(seed: int, length: int) -> PrefixNames:
    token_ids = np.random.default_rng(seed).integers(0, 100, length)
    return PrefixNames(UnitKeys(PrefixContext(), SHAPE.unit, b"seed"), token_ids)


def size_of(length: int) -> int:
    """Bytes of the file of an object of its own: one page of header, the KV, the state."""
    return (1 + SHAPE.pages_for(length) + SHAPE.run) * SHAPE.page_bytes


class Engine:
    """A tier over a folder, as an engine's life has it; what it is given to keep is written when `keep` returns."""

    def __init__(self, root: Path, capacity: int) -> None:
        self.disk = DiskStore(root, FORM, capacity)
        self.memory = np.zeros((200, SHAPE.page_bytes), np.uint8)
        self.jobs = ManualJobs(random.Random(0), most_writes=64)
        self.tier = HostTier(self.memory, SHAPE, self.jobs, self.disk)

    def keep(self, seed: int, length: int) -> None:
        room = self.tier.reserve(names_of(seed, length), length)
        assert room is not None
        self.memory[room.host] = seed
        self.tier.commit(room.ticket, ok=True)
        self.jobs.pump()

    def stored(self) -> set[str]:
        """The objects whose files are there, as far as the books say so too."""
        found = {path.stem for path in self.disk._objects.glob("*/*")}
        entries = self.tier._shelf.catalogue.entries.values()
        assert found == {entry.meta.key.hex() for entry in entries if entry.stored}, "the books differ from the disk"
        sizes = sum(path.stat().st_size for path in self.disk._objects.glob("*/*"))
        assert sizes == self.tier.stats.backing_bytes
        assert not any(entry.pins for entry in entries)
        return found


def key(seed: int, length: int) -> str:
    return names_of(seed, length).at(length).hex()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path, 10**6)
    for seed in (1, 2, 3):
        made.keep(seed, 8)
    yield made
    made.tier.close()


OLD = {key(seed, 8) for seed in (1, 2, 3)}


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, times: int = 10**9) -> list[int]:
    """Files cannot be forced to the disk, `times` times; how often it was tried."""
    real, tried = os.fsync, []

    def fsync(fd: int) -> None:
        tried.append(fd)
        if len(tried) <= times:
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return tried


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_costs_nothing_that_is_kept(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    tried = refuse(monkeypatch, name)
    for seed in (4, 5, 6):
        engine.keep(seed, 8)
    assert engine.stored() == OLD
    assert len(tried) == 1, "it is left alone for a while"
    assert engine.tier.stats.write_errors == 1
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and os.strerror(getattr(errno, name)) in record.getMessage()
    assert str(engine.disk._folder) in record.getMessage() and "tried again every 30 seconds" in record.getMessage()


def test_a_disk_that_works_again_is_written_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(monkeypatch, "EIO", times=1)
    engine.keep(4, 8)
    now = shelf_module.time.monotonic()
    monkeypatch.setattr(shelf_module.time, "monotonic", lambda: now + shelf_module.LEFT_ALONE + 1)
    engine.keep(4, 20)
    assert engine.stored() == OLD | {key(4, 8), key(4, 20)}, "and with it what it builds on"
    refuse(monkeypatch, "EIO")
    engine.keep(5, 8)
    assert engine.tier.stats.write_errors == 2 and len(caplog.records) == 1, "the second is only counted"


@pytest.mark.parametrize("name", NO_ROOM)
def test_without_room_the_oldest_goes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    refuse(monkeypatch, name, times=1)
    engine.keep(4, 8)
    assert engine.stored() == OLD - {key(1, 8)} | {key(4, 8)}
    assert engine.tier.stats.write_errors == 1
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "less room than it may take" in record.getMessage()


def test_what_helps_nothing_is_not_done_again_at_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = refuse(monkeypatch, "ENOSPC")
    for seed in (4, 5, 6):
        engine.keep(seed, 8)
    assert len(tried) == 2
    assert engine.stored() == OLD - {key(1, 8)}


def test_an_object_for_which_all_would_have_to_go_costs_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "ENOSPC")
    engine.keep(4, 80)
    assert size_of(80) > 3 * size_of(8) and engine.stored() == OLD


def test_nor_does_one_whose_own_prefix_would_have_to_go(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.keep(4, 40)
    refuse(monkeypatch, "ENOSPC")
    engine.keep(4, 120)
    rest = size_of(120) - size_of(40) + SHAPE.run * SHAPE.page_bytes
    assert 3 * size_of(8) < rest < engine.tier.stats.backing_bytes and engine.stored() == OLD | {key(4, 40)}


def test_an_object_beyond_the_budget_is_refused_and_empties_nothing(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 3 * size_of(8))
    for seed in (1, 2, 3):
        engine.keep(seed, 8)
    engine.keep(4, 80)
    assert engine.stored() == OLD and engine.tier.stats.write_errors == 0
    engine.keep(5, 8)
    assert engine.stored() == OLD - {key(1, 8)} | {key(5, 8)}
    engine.tier.close()
    again = Engine(tmp_path, 3 * size_of(8))
    assert again.stored() == OLD - {key(1, 8)} | {key(5, 8)}
    again.tier.close()


def test_a_device_that_is_full(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file on `/dev/full`, whose every write finds no space."""
    real, opened = os.open, []

    def full(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith(".tmp") and not opened:
            opened.append(path)
            return real("/dev/full", os.O_WRONLY)
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", full)
    engine.keep(4, 8)
    assert engine.stored() == OLD - {key(1, 8)} | {key(4, 8)}


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_longer_than_the_system_allows(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with files_of_at_most(size_of(8)):
        engine.keep(4, 40)
    assert engine.stored() == OLD
    assert f"File too large: '{engine.disk._objects}" in caplog.text


def test_a_file_in_the_place_of_a_folder(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    (engine.disk._objects / key(4, 8)[:2]).write_text("no folder")
    engine.keep(4, 8)
    assert {path.stem for path in engine.disk._objects.glob("*/*")} == OLD
    assert engine.tier.stats.write_errors == 1 and "Not a directory" in caplog.text
