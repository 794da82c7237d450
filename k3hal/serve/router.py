"""Brings engine outputs from the engine's thread to the requests that wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from k3hal.engine.interface import Engine, EngineOutput, EngineRequest
from k3hal.errors import QueueFullError, RequestError
from k3hal.serve.http_errors import HttpError
from k3hal.serve.pace import Pace


class DisconnectedError(Exception):
    """The client went away; what it asked for has been aborted."""


class Increment(NamedTuple):
    """An output of sequence number `sequence` of a generation."""

    sequence: int
    output: EngineOutput


class Generation:
    """The sequences of one HTTP request. Close it whatever happens: that aborts what still runs."""

    def __init__(self, router: Router, request_ids: Sequence[str]) -> None:
        self._router = router
        self._unfinished = dict(zip(request_ids, range(len(request_ids)), strict=True))
        self._arrived: list[EngineOutput | None] = []
        self._wake: asyncio.Future[None] | None = None
        self._end: Exception = DisconnectedError()

    @property
    def unfinished(self) -> bool:
        return bool(self._unfinished)

    async def next(self) -> list[Increment]:
        """Wait for outputs and return all there are, in order.

        Raises `DisconnectedError` once the client is gone, and a 504 once the time is over.
        """
        if not self._arrived:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        outputs, self._arrived = self._arrived, []
        increments: list[Increment] = []
        for output in outputs:
            if output is None:
                raise self._end
            index = self._unfinished.get(output.request_id)
            if index is None:
                continue
            if output.finish_reason is not None:
                del self._unfinished[output.request_id]
            increments.append(Increment(index, output))
        return increments

    def put(self, output: EngineOutput | None) -> None:
        """Deliver an output, or None once the client is gone; runs on the event loop."""
        self._arrived.append(output)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def stop(self, index: int) -> None:
        """Abort one sequence because its answer is complete; nothing more of it is delivered."""
        ids = [name for name, number in self._unfinished.items() if number == index]
        for name in ids:
            del self._unfinished[name]
        self._router.drop(ids)

    def disconnect(self) -> None:
        """The client is gone: abort now and wake whoever waits in `next`."""
        self.close()
        self.put(None)

    def expire_after(self, seconds: float) -> asyncio.TimerHandle:
        """Abort after that time, unless the handle is cancelled before."""
        return asyncio.get_running_loop().call_later(seconds, self._expire, seconds)

    def _expire(self, seconds: float) -> None:
        self._end = HttpError(504, f"the answer took longer than {seconds:g} s", kind="timeout_error", code="timeout")
        self.disconnect()

    def close(self) -> None:
        self._router.drop(list(self._unfinished))
        self._unfinished.clear()
        self._router.leave(self)


class Router:
    """One table from request id to the waiting generation; the engine's thread hands over once per step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[str, Generation] = {}
        self._open: set[Generation] = set()
        self._pace = Pace()
        self._empty = asyncio.Event()
        self._empty.set()

    def start(self) -> None:
        """Start the engine, delivering into the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._engine.start(self._on_outputs)

    def submit(self, requests: Sequence[EngineRequest]) -> Generation:
        """Queue all of `requests` or none; raises what `Engine.submit` raises, and `RequestError` for too many.

        A `QueueFullError` says when the requests that wait by now will have been answered, as far as one can tell.
        """
        room = self._engine.info.max_num_seqs + self._engine.info.max_queue
        if len(requests) > room:
            raise RequestError(f"{len(requests)} choices of one request; the server holds {room} at most", param="n")
        ids = [request.request_id for request in requests]
        generation = Generation(self, ids)
        submitted: list[str] = []
        if not self._waiting:
            self._pace.began()
        try:
            for request in requests:
                self._waiting[request.request_id] = generation
                self._engine.submit(request)
                submitted.append(request.request_id)
        except BaseException as error:
            self.drop(submitted)
            for name in ids:
                self._waiting.pop(name, None)
            if isinstance(error, QueueFullError):
                error.retry_after = self._pace.until(max(1, self._engine.stats().num_waiting))
            raise
        self._open.add(generation)
        self._empty.clear()
        return generation

    def drop(self, request_ids: Sequence[str]) -> None:
        """Abort these in the engine and ignore what it still says about them."""
        for name in request_ids:
            self._waiting.pop(name, None)
        if request_ids:
            self._engine.abort(request_ids)

    def leave(self, generation: Generation) -> None:
        self._open.discard(generation)
        if not self._open:
            self._empty.set()

    @property
    def open_requests(self) -> int:
        """HTTP requests that are being answered."""
        return len(self._open)

    def abort_all(self) -> None:
        """Abort everything that runs; each request still gets its last output."""
        self._engine.abort(list(self._waiting))

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until no request is open; False if some still are after `timeout` seconds."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def _on_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        """Runs on the engine's thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, tuple(outputs))

    def _deliver(self, outputs: tuple[EngineOutput, ...]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._pace.ended()
            generation = self._waiting.get(output.request_id)
            if generation is None:
                continue
            if output.finish_reason is not None:
                del self._waiting[output.request_id]
            generation.put(output)
