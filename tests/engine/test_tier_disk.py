"""Objects in files: what survives, what is refused, and that nothing wrong is ever read."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.engine.tier.backing import ObjectDamagedError, ObjectLostError
from k3hal.engine.tier.checks import page_sums
from k3hal.engine.tier.disk import DiskStore
from k3hal.engine.tier.interface import ObjectMeta, ObjectShape
from k3hal.engine.tier.object_file import MAGIC, ObjectFormat
from k3hal.errors import UsageError

SHAPE = ObjectShape(page_tokens=4, page_bytes=32, run=3, unit=4)
FORM = ObjectFormat(SHAPE, "0123456789abcdef" * 2)
OTHER = ObjectFormat(SHAPE, "fedcba9876543210" * 2)
GB = 10**9


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def meta_of(number: int, start: int = 0, end: int = 8, parent: int | None = None) -> ObjectMeta:
    return ObjectMeta(name(number), name(parent) if parent is not None else b"", name(number), start, end)


def pages_of(meta: ObjectMeta, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, *meta.key])
    return rng.integers(0, 256, (FORM.pages(meta), SHAPE.page_bytes)).astype(np.uint8)


def put(store: DiskStore, meta: ObjectMeta) -> np.ndarray:
    pages = pages_of(meta)
    store.write(meta, page_sums(pages, np.arange(len(pages))), [page.data for page in pages])
    return pages


def get(store: DiskStore, meta: ObjectMeta, first: int = 0, count: int | None = None) -> np.ndarray:
    pages = np.zeros((FORM.pages(meta) - first if count is None else count, SHAPE.page_bytes), np.uint8)
    sums = store.read(meta, first, [page.data for page in pages])
    if (page_sums(pages, np.arange(len(pages))) != sums).any():
        raise ObjectDamagedError("a page does not match its checksum")
    return pages


def file_of(root: Path, meta: ObjectMeta) -> Path:
    return next(root.glob(f"*/objects/*/{meta.key.hex()}.k3obj"))


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path, FORM, GB)


@pytest.mark.parametrize("meta", [meta_of(1), meta_of(2, 8, 9, 1), meta_of(3, 6, 400, 1)])
def test_what_is_written_is_read_in_whole_and_in_part(tmp_path: Path, meta: ObjectMeta) -> None:
    store = DiskStore(tmp_path, FORM, GB)
    pages = put(store, meta)
    assert (get(store, meta) == pages).all()
    assert (get(store, meta, 1, 2) == pages[1:3]).all()
    assert file_of(tmp_path, meta).stat().st_size == store.size(meta)
    store.close()
    again = DiskStore(tmp_path, FORM, GB)
    assert again.seed == store.seed
    assert again.scan() == [meta]
    assert (get(again, meta) == pages).all()
    again.remove(meta)
    with pytest.raises(ObjectLostError):
        get(again, meta)
    assert again.scan() == []


def test_files_are_the_owners_alone(store: DiskStore, tmp_path: Path) -> None:
    put(store, meta_of(1))
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_the_order_of_use_survives(store: DiskStore) -> None:
    metas = [meta_of(number) for number in range(4)]
    for age, meta in enumerate(metas):
        put(store, meta)
        path = store._path(meta.key)
        os.utime(path, (age + 1, age + 1))
    get(store, metas[1])
    assert store.scan() == [metas[0], metas[2], metas[3], metas[1]]


def test_an_unfinished_file_is_removed(store: DiskStore) -> None:
    put(store, meta_of(1))
    path = store._path(meta_of(1).key)
    unfinished = path.with_name(name(2).hex() + ".tmp")
    unfinished.write_bytes(path.read_bytes()[:100])
    assert store.scan() == [meta_of(1)]
    assert not unfinished.exists()
    assert store.dropped == 0


def header_with(changes: dict[str, Any]) -> bytes:
    """A header with a right checksum and wrong fields."""
    whole = FORM.header(meta_of(1), np.zeros(5, np.uint32))
    length = struct.unpack_from("<I", whole, 12)[0]
    fields = json.loads(whole[20 : 20 + length]) | changes
    text = json.dumps({key: value for key, value in fields.items() if value is not ...}).encode()
    return headed(text)


def headed(text: bytes) -> bytes:
    whole = struct.pack("<8sIII", MAGIC, 1, len(text), zlib.crc32(text)) + text
    return whole + bytes(-len(whole) % 4096) + bytes(5 * 32)


BAD = {
    "empty": (b"", "it ends after 0 bytes"),
    "short": (b"K3HALOBJ", "it ends after 8 bytes"),
    "foreign": (b"\x7fELF" * 2000, "does not begin like an object"),
    "version": (b"K3HALOBJ" + struct.pack("<III", 2, 0, 0), "its format is 2"),
    "giant header": (b"K3HALOBJ" + struct.pack("<III", 1, 1 << 31, 0), "claims 2147483648 bytes"),
    "header cut": (header_with({})[:60], "in its header"),
    "header flipped": (header_with({}).replace(b'"end":', b'"enD":'), "does not match its checksum"),
    "no JSON": (headed(b"{"), "is not JSON"),
    "deep JSON": (headed(b"[" * 100_000), "is not JSON"),
    "no object": (headed(b"[1]"), "no JSON object"),
    "no UTF-8": (headed(b'{"key":"\xff"}'), "is not JSON"),
    "foreign model": (header_with({"fingerprint": OTHER.fingerprint}), "another model"),
    "no fingerprint": (header_with({"fingerprint": ...}), "another model"),
    "start a text": (header_with({"start": "0"}), "its start is '0'"),
    "start a truth": (header_with({"start": True}), "its start is True"),
    "end missing": (header_with({"end": ...}), "its end is None"),
    "end negative": (header_with({"end": -8}), "its end is -8"),
    "end huge": (header_with({"end": 1 << 60}), "its end is"),
    "end before start": (header_with({"start": 8, "end": 4, "parent": "00" * 16}), "holds tokens 8 to 4"),
    "key short": (header_with({"key": "ab"}), "wrong lengths"),
    "key no hex": (header_with({"key": "zz" * 16}), "its key is"),
    "key a list": (header_with({"key": []}), "its key is"),
    "parent at the start": (header_with({"parent": "00" * 16}), "wrong lengths"),
    "no parent": (header_with({"start": 4}), "wrong lengths"),
    "pages": (header_with({"pages": 6}), "it has 6 pages"),
    "page bytes": (header_with({"page_bytes": 64}), "pages of 64 bytes"),
    "sums": (header_with({"sums": "00" * 4}), "with 1 checksums"),
    "odd sums": (header_with({"sums": "000"}), "its sums is"),
    "cut": (header_with({})[:-1], "instead of"),
    "too long": (header_with({}) + b"x", "instead of"),
    "another's name": (header_with({"key": name(2).hex()}), "it holds another object"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_malformed_file_is_dropped_with_a_reason(
    store: DiskStore, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, reason = BAD[kind]
    put(store, meta_of(9))
    path = store._path(name(1))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    with pytest.raises(ObjectDamagedError, match=reason):
        get(store, meta_of(1))
    with caplog.at_level(logging.WARNING):
        assert store.scan() == [meta_of(9)]
    assert store.dropped == 1
    assert len(caplog.records) == 1 and reason in caplog.text
    assert not path.exists()


def test_what_is_no_file_is_dropped_too(store: DiskStore, tmp_path: Path) -> None:
    put(store, meta_of(9))
    path = store._path(name(1))
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(tmp_path / "nowhere")
    store._path(name(2)).mkdir()
    os.mkfifo(store._path(name(3)).with_name("pipe.k3obj"))
    store._path(name(4)).with_suffix(".tmp").mkdir()
    assert store.scan() == [meta_of(9)]
    assert store.dropped == 4
    assert not path.is_symlink()


@settings(deadline=None)
@given(st.data())
def test_no_damage_to_a_file_goes_unseen(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.mktemp("damage")
    store = DiskStore(root, FORM, GB)
    meta = meta_of(3, 6, 40, 1)
    pages = put(store, meta)
    path = file_of(root, meta)
    whole = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "zero", "grow"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    if kind == "flip":
        whole[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del whole[at:]
    elif kind == "zero":
        end = data.draw(st.integers(at, len(whole)))
        whole[at:end] = bytes(end - at)
    else:
        whole += data.draw(st.binary(min_size=1, max_size=50))
    path.write_bytes(whole)
    try:
        read = get(store, meta)
    except ObjectDamagedError:
        return
    assert (read == pages).all(), "damage that changed a page was not seen"


def test_a_full_disk_leaves_no_trace(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        put(store, meta_of(1))
    monkeypatch.undo()
    assert not list(store._objects.glob("*/*"))
    put(store, meta_of(1))
    assert store.scan() == [meta_of(1)]


def test_a_folder_serves_one_process(store: DiskStore, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="in use by another process"):
        DiskStore(tmp_path, FORM, GB)
    store.close()
    DiskStore(tmp_path, FORM, GB).close()


@pytest.mark.parametrize("kind", ["file", "below a file"])
def test_a_path_that_is_no_folder_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    path.write_text("hello")
    with pytest.raises(UsageError, match=r"cannot use.*writable"):
        DiskStore(path if kind == "file" else path / "folder", FORM, GB)
    assert path.read_text() == "hello"


def test_other_models_make_room_when_the_budget_asks(tmp_path: Path) -> None:
    other = DiskStore(tmp_path, OTHER, GB)
    for number in range(20):
        put(other, meta_of(number))
    mine = tmp_path / "photos"
    mine.mkdir()
    (mine / "one.jpg").write_bytes(bytes(10**6))
    DiskStore(tmp_path, FORM, 1000).close()
    assert len(other.scan()) == 20, "in use, so it stays"
    other.close()
    DiskStore(tmp_path, FORM, GB).close()
    assert (tmp_path / OTHER.fingerprint).exists()
    DiskStore(tmp_path, FORM, 1000).close()
    assert not (tmp_path / OTHER.fingerprint).exists()
    assert (mine / "one.jpg").exists()


def test_what_cannot_be_removed_for_room_stops_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for form in (FORM, OTHER):
        DiskStore(tmp_path, form, GB).close()

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    DiskStore(tmp_path, FORM, 1).close()
    assert "cannot make room: Permission denied" in caplog.text
    monkeypatch.undo()
    DiskStore(tmp_path, FORM, 1).close()
    assert not (tmp_path / OTHER.fingerprint).exists(), "and nobody holds its lock"


def test_a_damaged_seed_empties_the_folder(store: DiskStore, tmp_path: Path) -> None:
    put(store, meta_of(1))
    store.close()
    (tmp_path / FORM.fingerprint / "seed").write_bytes(b"short")
    again = DiskStore(tmp_path, FORM, GB)
    assert again.scan() == []
    assert len(again.seed) == 32 and again.seed != store.seed
