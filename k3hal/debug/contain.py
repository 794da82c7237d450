"""Keeps what a provider's call does to the process within that call: global state is put back, no exit ends the run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from k3hal.debug.global_state import GlobalState


class EscapeError(Exception):
    """A call raised what would have ended the process: `error`, a SystemExit, say."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


@contextmanager
def contained(device: torch.device) -> Iterator[list[str]]:
    """Around one call: fills the list with the global state that the call changed, in words, and puts that back.

    Exceptions pass through, as does a real Ctrl-C; any other exception that is no `Exception` becomes an `EscapeError`.
    """
    changes: list[str] = []
    state = GlobalState(device.type)
    with _ctrl_c() as pressed:
        try:
            yield changes
        except Exception:
            raise
        except BaseException as error:
            if pressed:
                raise
            raise EscapeError(error) from error
        finally:
            changes += state.restore()


@contextmanager
def _ctrl_c() -> Iterator[list[int]]:
    """The interrupts that arrive meanwhile, which are handled as before. Python delivers them to the main thread."""
    pressed: list[int] = []
    before: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield pressed
        return

    def note(number: int, frame: Any) -> None:
        pressed.append(number)
        before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
