"""The engine on a thread of its own: `Engine` over an `EngineCore`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from k3hal.engine.core import EngineCore
from k3hal.engine.interface import EngineInfo, EngineOutput, EngineRequest, EngineStats, OutputCallback
from k3hal.engine.request import Request
from k3hal.errors import DrainingError, RequestError, UsageError

logger = logging.getLogger(__name__)


class AsyncEngine:
    """Implements `interface.Engine`. Requests are checked on the caller's thread, everything else runs on the engine's.

    Before `start` the core may be driven directly (`core`), which the synchronous Python API does.
    """

    def __init__(self, core: EngineCore, release: Callable[[], None] | None = None) -> None:
        """`release` is called when the engine has been closed."""
        self.core = core
        self._release = release
        self._wake = threading.Condition()
        self._submitted: list[Request] = []
        self._aborted: list[str] = []
        self._live: set[str] = set()
        self._draining = False
        self._stopping = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._on_outputs: OutputCallback | None = None

    @property
    def info(self) -> EngineInfo:
        return self.core.info

    def start(self, on_outputs: OutputCallback) -> None:
        if self._thread is not None or self._draining:
            raise UsageError("an engine is started once")
        self._on_outputs = on_outputs
        self._thread = threading.Thread(target=self._run, name="k3hal-engine", daemon=True)
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        self._refuse_if_draining()
        checked = self.core.check(request)
        with self._wake:
            self._refuse_if_draining()
            if request.request_id in self._live:
                raise RequestError(f"request id {request.request_id!r} is already in use", param="request_id")
            self.core.scheduler.check_room(len(self._submitted))
            self._live.add(request.request_id)
            self._submitted.append(checked)
            self._wake.notify_all()

    def abort(self, request_ids: Sequence[str]) -> None:
        with self._wake:
            self._aborted.extend(request_ids)
            self._wake.notify_all()

    def stats(self) -> EngineStats:
        return self.core.stats(len(self._submitted))

    def close(self, drain_timeout: float = 0.0) -> None:
        """As `Engine.close`. Not from the engine's own thread; a second call does nothing."""
        deadline = time.monotonic() + drain_timeout
        with self._wake:
            self._draining = True
            if self._thread is not None:
                self._wake.wait_for(lambda: not self._live, max(deadline - time.monotonic(), 0.0))
            self._stopping = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()
        if not self._closed:
            self._closed = True
            self.core.close()
            if self._release is not None:
                self._release()

    def _refuse_if_draining(self) -> None:
        if self._draining:
            raise DrainingError("the engine is shutting down and takes no new requests")

    def _run(self) -> None:
        """Turns until `close`; a failure of the engine itself ends every request and is told to later ones."""
        while True:
            with self._wake:
                self._wake.wait_for(self._something_to_do)
                submitted, self._submitted = self._submitted, []
                aborted, self._aborted = self._aborted, []
                stopping = self._stopping
            outputs: list[EngineOutput] = []
            try:
                self._turn(submitted, aborted, stopping, outputs)
            except Exception as error:
                logger.exception("the engine failed")
                ended = {output.request_id for output in outputs if output.finish_reason is not None}
                lost = [request for request in submitted if request.id not in ended]
                outputs += self.core.die(self.core.dead or f"{type(error).__name__}: {error}", lost)
            self._deliver(outputs)
            if stopping:
                return

    def _something_to_do(self) -> bool:
        return bool(self._submitted or self._aborted or self._stopping or self.core.has_work)

    def _turn(self, submitted: list[Request], aborted: list[str], stopping: bool, outputs: list[EngineOutput]) -> None:
        """Take in what came, then run a step; outputs are added as they come about."""
        for request in submitted:
            self.core.enqueue(request)
        outputs += self.core.abort_all() if stopping else self.core.abort(aborted)
        if not stopping:
            outputs += self.core.step()

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        """Hand outputs up. A receiver that raises can no longer be trusted with any request: the engine dies."""
        if not outputs:
            return
        assert self._on_outputs is not None
        try:
            self._on_outputs(outputs)
        except Exception as error:
            logger.exception("the receiver of outputs failed")
            outputs = [*outputs, *self.core.die(f"the receiver of outputs failed: {error}")]
        with self._wake:
            self._live.difference_update(o.request_id for o in outputs if o.finish_reason is not None)
            self._wake.notify_all()
