"""Objects in a Mooncake store: the same contract against the package, where it is installed, and against a stand-in."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3hal.engine.cache.keys import NO_CONTEXT, PrefixNames, UnitKeys
from k3hal.engine.tier.backing import ObjectDamagedError, ObjectLostError
from k3hal.engine.tier.checks import page_sums
from k3hal.engine.tier.interface import ObjectMeta, ObjectShape, TierStats
from k3hal.engine.tier.mooncake import MooncakeStore
from k3hal.engine.tier.mooncake_config import MooncakeConfig
from k3hal.engine.tier.object_file import ObjectFormat
from k3hal.errors import ConfigError, UnsupportedError, UsageError
from k3hal.llm import LLM
from k3hal.sampling_params import SamplingParams

from .mooncake_fake import FakeClient, FakeServer, install

SHAPE = ObjectShape(page_tokens=4, page_bytes=4096, run=3, unit=4)
FORM = ObjectFormat(SHAPE, "0123456789abcdef" * 2)
TOKENS = np.arange(40, dtype=np.int64)


def port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    """The address of a real master."""
    program = shutil.which("mooncake_master", path=str(Path(sys.executable).parent)) or shutil.which("mooncake_master")
    if program is None or importlib.util.find_spec("mooncake") is None:
        pytest.skip("needs the package mooncake-transfer-engine and its mooncake_master")
    at, metrics = port(), port()
    command = [program, f"-rpc_port={at}", f"-metrics_port={metrics}", "-rpc_address=127.0.0.1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                with socket.socket() as sock:
                    if sock.connect_ex(("127.0.0.1", at)) == 0:
                        break
                time.sleep(0.1)
            yield f"127.0.0.1:{at}"
        finally:
            process.terminate()


Connect = Callable[[ObjectFormat, np.ndarray], MooncakeStore]


@pytest.fixture(params=["fake", "real"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes stores that see each other's objects."""
    made: list[MooncakeStore] = []
    server = FakeServer()
    address = request.getfixturevalue("master") if request.param == "real" else ""

    def one(form: ObjectFormat, memory: np.ndarray) -> MooncakeStore:
        if address:
            config = MooncakeConfig(master_server_address=address, global_segment_size=64 << 20)
            made.append(MooncakeStore.connect(config, form, memory))
        else:
            made.append(MooncakeStore(FakeClient(server), form, memory))
        return made[-1]

    yield one
    for store in made:
        for key in {name(NAMES, end) for end in range(1, 41)}:
            store.remove(ObjectMeta(key, b"", b"", 0, 1))
        store.close()


def memory() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (64, SHAPE.page_bytes)).astype(np.uint8)


NAMES = PrefixNames(UnitKeys(NO_CONTEXT, 4, b"seed"), TOKENS)


def name(names: PrefixNames, end: int) -> bytes:
    return names.at(end)


def meta_of(end: int, start: int = 0, names: PrefixNames = NAMES) -> ObjectMeta:
    parent = name(names, start) if start else b""
    return ObjectMeta(name(names, end), parent, names.whole(end // 4), start, end)


def rows(memory: np.ndarray, pages: np.ndarray) -> list[memoryview]:
    return [memory[page].data for page in pages.tolist()]


def put(store: MooncakeStore, memory: np.ndarray, meta: ObjectMeta) -> np.ndarray:
    """Write the first pages of `memory`."""
    pages = np.arange(FORM.pages(meta))
    store.write(meta, page_sums(memory, pages), rows(memory, pages))
    return memory[pages].copy()


def test_what_one_engine_writes_another_reads_whole_and_in_part(connect: Connect) -> None:
    mine, yours = memory(), np.zeros((64, SHAPE.page_bytes), np.uint8)
    writer, reader = connect(FORM, mine), connect(FORM, yours)
    meta = meta_of(40)
    bytes_in = put(writer, mine, meta)
    target = np.arange(20, 20 + FORM.pages(meta))[::-1].copy()
    sums = reader.read(meta, 0, rows(yours, target))
    assert (yours[target] == bytes_in).all()
    assert (page_sums(yours, target) == sums).all()
    sums = reader.read(meta, 9, rows(yours, np.array([1, 50])))
    assert (yours[[1, 50]] == bytes_in[9:11]).all()
    assert (page_sums(yours, np.array([1, 50])) == sums).all()
    assert writer.seed == reader.seed
    reader.remove(meta)
    with pytest.raises(ObjectLostError):
        writer.read(meta, 0, rows(mine, np.arange(1)))
    reader.remove(meta)


def test_the_longest_prefix_is_found_with_all_it_builds_on(connect: Connect) -> None:
    mine = memory()
    writer, reader = connect(FORM, mine), connect(FORM, memory())
    assert reader.resolve(NAMES, 39, 0) == []
    chain = [meta_of(8), meta_of(19, 8), meta_of(30, 19)]
    for meta in chain:
        put(writer, mine, meta)
    for limit, found in ((39, 3), (30, 3), (29, 2), (19, 2), (18, 1), (8, 1), (7, 0)):
        assert reader.resolve(NAMES, limit, 0) == chain[:found], limit
    assert reader.resolve(NAMES, 39, 30) == []
    assert reader.resolve(NAMES, 39, 29) == chain
    other = PrefixNames(UnitKeys(NO_CONTEXT, 4, b"seed"), np.append(TOKENS[:28], [7, 7, 7, 7, 7, 7]))
    assert reader.resolve(other, 33, 0) == chain[:2]
    writer.remove(chain[1])
    assert reader.resolve(NAMES, 39, 0) == chain[:1]
    assert connect(ObjectFormat(SHAPE, "fedcba9876543210" * 2), memory()).resolve(NAMES, 39, 0) == []


def test_notes_of_objects_that_are_gone_make_room(connect: Connect) -> None:
    mine = memory()
    store = connect(FORM, mine)
    tails = []
    for seed in range(7):
        tokens = np.append(TOKENS[:8], [20 + seed] * 3)
        names = PrefixNames(UnitKeys(NO_CONTEXT, 4, b"seed"), tokens)
        meta = meta_of(10, 0, names)
        put(store, mine, meta)
        found = store.resolve(names, 11, 0)
        assert found == ([meta] if seed < 4 or seed == 6 else []), seed
        tails.append(meta)
        if seed == 5:
            store.remove(tails[2])
    for meta in tails:
        store.remove(meta)


class Damaging(FakeClient):
    """One that gives other bytes than it got: of the header, if `where` is small."""

    where = 0
    value = 0

    def put(self, key: str, value: bytes) -> int:
        if len(value) > 100:
            at = self.where
            value = value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]
        return super().put(key, value)


@pytest.mark.parametrize("where", [0, 9, 13, 17, 25, 100])
def test_a_damaged_header_is_no_object(where: int) -> None:
    mine = memory()
    client = Damaging(FakeServer())
    client.where = where
    store = MooncakeStore(client, FORM, mine)
    put(store, mine, meta_of(8))
    assert store.resolve(NAMES, 39, 0) == []
    with pytest.raises(ObjectDamagedError):
        store.read(meta_of(8), 0, rows(mine, np.arange(2)))


def test_a_store_that_does_not_answer_is_an_os_error() -> None:
    mine, server = memory(), FakeServer()
    store = MooncakeStore(FakeClient(server), FORM, mine)
    put(store, mine, meta_of(8))
    server.down = True
    for call in (
        lambda: store.resolve(NAMES, 39, 0),
        lambda: store.read(meta_of(8), 0, []),
        lambda: put(store, mine, meta_of(12)),
        lambda: store.remove(meta_of(8)),
    ):
        with pytest.raises(OSError, match=r"Mooncake .*-900"):
            call()


def test_an_object_too_long_for_its_header_is_not_written() -> None:
    mine = memory()
    store = MooncakeStore(FakeClient(FakeServer()), FORM, mine)
    long = ObjectMeta(bytes(16), b"", bytes(16), 0, 400_000)
    with pytest.raises(OSError, match="too long"):
        store.write(long, np.zeros(FORM.pages(long), np.uint32), [])


BAD_CONFIGS = {
    "no JSON": ("{", "not valid JSON"),
    "a list": ("[]", "expected an object"),
    "no master": ("{}", "master_server_address is missing"),
    "an empty master": ('{"master_server_address": ""}', "master_server_address is missing"),
    "unknown": ('{"master_server_adress": "x"}', "unknown key 'master_server_adress'.*master_server_address"),
    "a size in words": ('{"master_server_address": "x", "local_buffer_size": "4GB"}', "is '4GB'; it is a number"),
    "a negative size": ('{"master_server_address": "x", "global_segment_size": -1}', "is -1; it is a number"),
    "a true size": ('{"master_server_address": "x", "global_segment_size": true}', "is True; it is a number"),
    "a number for a text": ('{"master_server_address": 5}', "is 5; it is a text"),
}


@pytest.mark.parametrize("kind", BAD_CONFIGS)
def test_a_bad_configuration_is_refused(tmp_path: Path, kind: str) -> None:
    text, message = BAD_CONFIGS[kind]
    path = tmp_path / "mooncake.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        MooncakeConfig.read(path)


def test_a_configuration_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read: No such file"):
        MooncakeConfig.read(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid JSON"):
        MooncakeConfig.read(tmp_path / "binary.json")


# The whole engine.

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SIZES: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "prefix_match_unit": 64,
    "prefix_host_cache_gb": 0.1,
}


@pytest.fixture(params=["fake", "real"])
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration file of a store that is there."""
    address = "nowhere"
    if request.param == "real":
        address = request.getfixturevalue("master")
    else:
        install(monkeypatch, FakeServer())
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"master_server_address": address, "global_segment_size": 256 << 20}))
    return path


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 300, count).tolist()


def answer(llm: LLM, prompt: list[int]) -> tuple[list[int], int]:
    (output,) = llm.generate([prompt], GREEDY)
    return output.outputs[0].token_ids, output.num_cached_tokens


def stats(llm: LLM) -> TierStats:
    found = llm._engine.engine.stats().tier
    assert found is not None
    return found


def written(llm: LLM) -> None:
    """Wait until what was stored is in the store."""
    deadline = time.monotonic() + 20
    while stats(llm).written < stats(llm).stores:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_engine_goes_on_with_what_another_computed(nano_dir: Path, config: Path) -> None:
    history = tokens(1, 150)
    with LLM(nano_dir, **SIZES, prefix_mooncake=config) as one, LLM(nano_dir, **SIZES, prefix_mooncake=config) as two:
        known = 0
        for turn in range(4):
            talking, checking = (one, two) if turn % 2 else (two, one)
            said, hit = answer(talking, history)
            assert hit >= known
            written(talking)
            again, hit = answer(checking, history)
            assert again == said
            assert hit >= (len(history) - 1) // 64 * 64
            written(checking)
            known = len(history) + len(said) - 1
            history = [*history, *said, *tokens(turn + 2, 41)]
        assert stats(one).hits > 0 and stats(two).hits > 0
        assert known > 300


def test_a_store_that_goes_away_leaves_the_engine_running(
    nano_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer()
    install(monkeypatch, server)
    path = tmp_path / "mooncake.json"
    path.write_text('{"master_server_address": "nowhere"}')
    prompt = tokens(2, 200)
    with LLM(nano_dir, **SIZES, prefix_mooncake=path) as llm:
        first = answer(llm, prompt)[0]
        written(llm)
        server.down = True
        said, hit = answer(llm, tokens(3, 200))
        assert hit == 0
        assert stats(llm).failures["error"] == 1
        assert answer(llm, prompt)[0] == first
        assert answer(llm, tokens(5, 200))[1] == 0
        assert stats(llm).failures["error"] == 1, "it was asked again at once"
        server.down = False
        core: Any = llm._engine.engine.core
        core.scheduler.cache.index.clear()
        assert answer(llm, tokens(3, 200))[0] == said
    with LLM(nano_dir, **SIZES, prefix_mooncake=path) as llm:
        assert answer(llm, prompt) == (first, 192)


def test_a_damaged_object_is_computed_anew_and_replaced(
    nano_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeServer()
    install(monkeypatch, server)
    path = tmp_path / "mooncake.json"
    path.write_text('{"master_server_address": "nowhere"}')
    prompt = tokens(4, 200)
    with LLM(nano_dir, **SIZES, prefix_mooncake=path) as llm:
        first = answer(llm, prompt)[0]
    for key, value in server.values.items():
        if len(value) > 100:
            server.values[key] = value[:-5000] + bytes([value[-5000] ^ 1]) + value[-4999:]
    with LLM(nano_dir, **SIZES, prefix_mooncake=path) as llm:
        assert answer(llm, prompt) == (first, 0)
        assert stats(llm).failures["corrupt"] == 1
    with LLM(nano_dir, **SIZES, prefix_mooncake=path) as llm:
        assert answer(llm, prompt)[0] == first
        assert stats(llm).hits > 0


def test_without_the_package_the_flag_says_what_to_install(
    nano_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    path = tmp_path / "mooncake.json"
    path.write_text('{"master_server_address": "nowhere"}')
    with pytest.raises(UnsupportedError, match=r"Mooncake store cannot be used.*install mooncake-transfer-engine"):
        LLM(nano_dir, **SIZES, prefix_mooncake=path)


def test_a_store_that_is_not_there_is_refused(nano_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeServer(down=True))
    path = tmp_path / "mooncake.json"
    path.write_text('{"master_server_address": "nowhere:1"}')
    with pytest.raises(UsageError, match=r"no Mooncake store at nowhere:1.*mooncake_master"):
        LLM(nano_dir, **SIZES, prefix_mooncake=path)
