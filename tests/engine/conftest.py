"""The small model that tests of the whole engine share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from k3hal.llm import LLM


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small models gain nothing from threads, and threads that wait for each other lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def llm(nano_dir: Path) -> Iterator[LLM]:
    """The nano model in float32, with room for eight sequences of 512 tokens."""
    with LLM(nano_dir, device="cpu", dtype="float32", max_model_len=512, max_num_seqs=8) as model:
        yield model


@pytest.fixture
def unlogged(caplog: pytest.LogCaptureFixture) -> None:
    """For tests of very many steps that fail on purpose: a record holds the traceback, and that the whole engine."""
    caplog.set_level(logging.CRITICAL + 1)
