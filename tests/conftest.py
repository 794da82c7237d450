"""Helpers that several test directories use."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from k3hal.model.synthetic_vocab import synthetic_vocab_bytes
from k3hal.model.write import write_preset

_REPO = Path(__file__).resolve().parents[1]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What long tests counted, by `record_property("seen", …)`: a log of theirs says more than that they passed."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    said = [(report.nodeid, value) for report in reports for name, value in report.user_properties if name == "seen"]
    if said:
        terminalreporter.section("seen")
    for nodeid, value in sorted(said, key=lambda one: one[0]):
        terminalreporter.line(f"{nodeid}: {value}")


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Ctrl-C as in a terminal, here and in child processes: what a shell starts in the background ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _young_heap() -> Iterator[None]:
    """Collecting garbage looks at what a module's tests make, and not over and over at all that is imported.

    What a module leaves open is found at its end, and not in the middle of another.
    """
    gc.freeze()
    yield
    gc.collect()


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
def _drawn_alike(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without a seed gets in each run of a test what it got in the last: what fails once, fails again."""
    drawn = random.Random(request.node.nodeid)
    monkeypatch.setattr("k3hal.engine.sampling.secrets", SimpleNamespace(randbits=drawn.getrandbits))


@pytest.fixture(autouse=True)
def _untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody tuned on this machine changes no test."""
    monkeypatch.setenv("K3HAL_TACTICS", "off")


_BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium of this machine, driven by playwright; skips without either."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install k3hal[browser]")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        pytest.skip(f"needs a Chromium: none of {', '.join(_BROWSERS)} is on the path, and CHROMIUM names none")
    # As root Chromium has no sandbox; the pages are our own and load nothing from elsewhere.
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def low_contrast() -> Callable[[Any], list[str]]:
    """`low_contrast(page)`: the elements whose text has less than 4.5 : 1 to its own or its parents' ground."""
    return lambda page: page.evaluate(_LOW_CONTRAST)


_LOW_CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const low = new Set();
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || e.matches(":disabled, script, noscript, noscript *, option") || !e.checkVisibility()) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.add(`${e.tagName} ${e.className} ${ratio.toFixed(2)}`);
  }
  return [...low];
}"""
