"""What verbs print on stdout under `--json`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

ERROR_SCHEMA = "k3hal.error/1"
_reserved: list[TextIO] = []


def print_json(schema: str, payload: Mapping[str, Any]) -> None:
    """Print one JSON object with `schema` (`k3hal.<name>/<major>`) as its first key.

    A verb prints its JSON once, when it has all of it, so that stdout is either one document or empty.
    """
    document = {"schema": schema, **payload}
    text = json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a name that is not UTF-8 is shown by escapes
        text = json.dumps(document, indent=2, allow_nan=False)
    stdout().write(text + "\n")


def stdout() -> TextIO:
    """The process's standard output, also where it is reserved for the document."""
    return _reserved[-1] if _reserved else sys.stdout


@contextlib.contextmanager
def stdout_reserved(*, for_good: bool) -> Iterator[None]:
    """Only what is written to `stdout()` reaches standard output: what else prints there, libraries of backends say,
    in Python or to the file descriptor, is on standard error.

    With `for_good` that stays so after the document is out, for what a library prints as the process ends.
    """
    printed = sys.stdout
    printed.flush()
    saved = os.dup(1)
    real = _is_descriptor_1(printed)
    document = open(saved, "w", encoding="utf-8", closefd=False) if real else printed  # noqa: SIM115
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    _reserved.append(document)
    try:
        yield
        document.flush()
    finally:
        _reserved.pop()
        if not for_good:
            printed.flush()
            os.dup2(saved, 1)
            sys.stdout = printed
        if real:
            # A reader that went away has been noticed above.
            with contextlib.suppress(BrokenPipeError):
                document.close()
        os.close(saved)


def _is_descriptor_1(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 1
    except io.UnsupportedOperation:  # a stand-in in memory
        return False
