"""Helpers that several test directories use."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from k3hal.model.synthetic_vocab import synthetic_vocab_bytes
from k3hal.model.write import write_preset

_REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Ctrl-C as in a terminal, here and in child processes: what a shell starts in the background ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """`shared_data(name)`: the path of a data file kept beside the checkout; skips the test where it is absent."""

    def find(name: str) -> Path:
        for folder in (_REPO.parent / "shared" / "data", _REPO / "shared" / "data"):
            if (folder / name).exists():
                return folder / name
        pytest.skip(f"needs ../shared/data/{name}, which is not beside this checkout")

    return find


@pytest.fixture(scope="session")
def synthetic_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds the synthetic `tiktoken.model`."""
    folder = tmp_path_factory.mktemp("synthetic_tokenizer")
    (folder / "tiktoken.model").write_bytes(synthetic_vocab_bytes())
    return folder


@pytest.fixture(scope="session")
def nano_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Preset nano, seed 0. Read-only by agreement."""
    target = tmp_path_factory.mktemp("nano") / "nano"
    write_preset("nano", target)
    return target


@pytest.fixture(autouse=True)
def _untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody tuned on this machine changes no test."""
    monkeypatch.setenv("K3HAL_TACTICS", "off")
