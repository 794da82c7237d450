"""A batch: every line of a file answered, in any order, into another file that says what is done."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from k3hal.errors import EngineDeadError, InputError
from k3hal.offline.batch_input import BatchInput, BatchLine
from k3hal.offline.batch_output import BatchOutput
from k3hal.offline.settings import GenerateSettings
from k3hal.offline.text import note

# Lines in work per sequence the engine runs at a time: it never waits for the next one to be read.
_AHEAD = 2

Advance = Callable[[int], None]


@dataclass(slots=True)
class BatchResult:
    """What a batch did: `answered` now, `skipped` because they were done before, `failed` of all its lines."""

    lines: int
    skipped: int
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0


def run_batch(settings: GenerateSettings) -> BatchResult:
    """Answer the lines of `settings.input` that `settings.output` has no answer of yet.

    Everything that is wrong with either file is found before the model is loaded. Raises `InputError`, what loading
    raises, and `EngineDeadError` when no further line can be answered; what is written then stays and counts.
    """
    assert settings.input is not None and settings.output is not None
    requests = BatchInput(settings.input, settings)
    if settings.output.exists() and settings.output.samefile(settings.input):
        raise InputError(f"--input and --output are both {settings.input}")
    with BatchOutput(settings.output) as output:
        if output.repaired:
            note(f"k3hal: removed an unfinished last line of {output.path}")
        if settings.retry_failed:
            output.drop_failed()
        _check_same(requests, output)
        result = BatchResult(len(requests.ids), skipped=len(requests.ids & output.recorded.keys()))
        try:
            if result.skipped < result.lines:
                asyncio.run(_run(settings, requests, output, result))
        except KeyboardInterrupt:
            done = result.skipped + result.answered
            note(f"k3hal: interrupted with {done} of {result.lines} lines done; the same command goes on from there")
            raise
        result.failed = sum(not output.recorded[name].ok for name in requests.ids)
    return result


def _check_same(requests: BatchInput, output: BatchOutput) -> None:
    """Refuse to take the answer to another request for that of a line."""
    for line in requests:
        recorded = output.recorded.get(line.custom_id)
        if recorded is not None and recorded.digest != line.digest:
            raise InputError(
                f"{output.path} answers another request with custom_id {line.custom_id!r} than {requests.path} has now",
                hint="name another --output, or restore the input and the flags",
            )


async def _run(settings: GenerateSettings, requests: BatchInput, output: BatchOutput, result: BatchResult) -> None:
    from k3hal.offline.local_server import LocalServer, local_server

    todo = (line for line in requests if line.custom_id not in output.recorded)

    async def work(server: LocalServer, advance: Advance) -> None:
        for line in todo:
            record = await _answer(server, line)
            output.append(record)
            result.answered += 1
            usage = record["response"]["body"]["usage"] if record["response"] else {}
            result.prompt_tokens += usage.get("prompt_tokens", 0)
            result.completion_tokens += usage.get("completion_tokens", 0)
            advance(usage.get("completion_tokens", 0))

    async with local_server(settings) as server:
        begun = time.monotonic()
        try:
            with _progress(result) as advance:
                async with asyncio.TaskGroup() as group:
                    for _ in range(_AHEAD * server.max_num_seqs):
                        group.create_task(work(server, advance))
        except BaseExceptionGroup as errors:
            # One worker's failure ends them all; the first says why.
            raise errors.exceptions[0] from None
        finally:
            result.seconds = time.monotonic() - begun


async def _answer(server: Any, line: BatchLine) -> dict[str, Any]:
    """The record of one line. Raises `EngineDeadError` when it is not the line that is wrong."""
    record: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id}
    response, error = None, None
    if line.body is None:
        error = {"status_code": 400, "message": line.error, "type": "invalid_request_error", "code": "bad_request"}
    else:
        status, body = await server.post(line.endpoint, line.body)
        if status == 200:
            response = {"status_code": status, "request_id": body["id"], "body": body}
        elif body["error"]["code"] == EngineDeadError.code:
            raise EngineDeadError(body["error"]["message"])
        else:
            error = {"status_code": status, **body["error"]}
    return record | {"response": response, "error": error, "request": line.digest}


@contextmanager
def _progress(result: BatchResult) -> Iterator[Advance]:
    """What to call with each line's tokens: a bar on standard error, for a person."""
    if not sys.stderr.isatty():
        yield lambda tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    begun = time.monotonic()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=result.lines, completed=result.skipped, rate="")

        def advance(tokens: int) -> None:
            rate = result.completion_tokens / max(time.monotonic() - begun, 1e-9)
            bar.update(task, advance=1, rate=f"{rate:.1f} tokens/s")

        yield advance
