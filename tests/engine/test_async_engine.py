"""The engine's thread: order, aborts, refusals, draining, and failures that must not hang anybody."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from k3hal.engine.async_engine import AsyncEngine
from k3hal.engine.interface import EngineImage, EngineOutput, EngineRequest
from k3hal.errors import DrainingError, EngineDeadError, QueueFullError, RequestError, UsageError
from k3hal.sampling_params import SamplingParams

from .harness import Harness, greedy_by_hand

SHORT = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)


class Sink:
    """Collects outputs; `wait` blocks until given requests have ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.outputs: dict[str, list[EngineOutput]] = {}

    def __call__(self, outputs: Sequence[EngineOutput]) -> None:
        with self._changed:
            for output in outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
            self._changed.notify_all()

    def ended(self, *names: str) -> bool:
        return all(self.outputs.get(n) and self.outputs[n][-1].finish_reason for n in names)

    def wait(self, *names: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.ended(*names), 30), f"{names} did not end: {self.outputs}"

    def tokens(self, name: str) -> list[int]:
        return [t for output in self.outputs[name] for t in output.token_ids]

    def reason(self, name: str) -> str | None:
        return self.outputs[name][-1].finish_reason


@pytest.fixture
def harness() -> Harness:
    return Harness(max_num_seqs=2, max_queue=3)


@pytest.fixture
def engine(harness: Harness) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(harness.core)
    yield engine
    engine.close()


def test_requests_from_several_threads_are_answered_in_order(engine: AsyncEngine) -> None:
    sink = Sink()
    engine.start(sink)
    names = [f"t{i}" for i in range(4)]
    threads = [
        threading.Thread(target=engine.submit, args=(EngineRequest(name, [2 + i, 3], SHORT),))
        for i, name in enumerate(names)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.wait(*names)
    for i, name in enumerate(names):
        assert sink.tokens(name) == greedy_by_hand([2 + i, 3], SHORT, 62)[0]
        last = sink.outputs[name][-1]
        assert last.timing is not None
        assert last.timing.arrival <= last.timing.scheduled <= last.timing.first_token <= last.timing.finished


def test_abort_ends_with_one_last_output(engine: AsyncEngine) -> None:
    sink = Sink()
    engine.start(sink)
    engine.submit(EngineRequest("a", [2, 3], LONG))
    engine.abort(["a", "unknown"])
    sink.wait("a")
    assert sink.reason("a") == "abort"
    assert "unknown" not in sink.outputs
    engine.submit(EngineRequest("a", [2, 3], SHORT))
    sink.wait("a")


def test_a_full_queue_refuses_before_anything_is_queued(engine: AsyncEngine) -> None:
    for i in range(5):
        engine.submit(EngineRequest(f"r{i}", [2], SHORT))
    with pytest.raises(QueueFullError):
        engine.submit(EngineRequest("r5", [2], SHORT))
    assert engine.stats().num_waiting == 5
    sink = Sink()
    engine.start(sink)
    sink.wait(*(f"r{i}" for i in range(5)))
    assert "r5" not in sink.outputs


def test_bad_requests_are_refused_on_the_callers_thread(engine: AsyncEngine) -> None:
    engine.submit(EngineRequest("a", [2], SHORT))
    with pytest.raises(RequestError, match="already in use"):
        engine.submit(EngineRequest("a", [2], SHORT))
    image = EngineImage(b"", b"", "image/png", 1, 1, position=0, tokens=1)
    with pytest.raises(RequestError, match="the served model takes text only"):
        engine.submit(EngineRequest("i", [2], SHORT, images=(image,)))
    with pytest.raises(RequestError, match="the prompt is empty"):
        engine.submit(EngineRequest("b", [], SHORT))


def test_close_drains_what_runs_and_refuses_what_comes(harness: Harness) -> None:
    engine, sink = AsyncEngine(harness.core), Sink()
    engine.start(sink)
    engine.submit(EngineRequest("a", [2, 3], LONG))
    engine.close(drain_timeout=30)
    assert sink.tokens("a") == greedy_by_hand([2, 3], LONG, 62)[0]
    with pytest.raises(DrainingError):
        engine.submit(EngineRequest("b", [2], SHORT))
    engine.close()


def test_close_without_patience_aborts() -> None:
    harness = Harness(max_num_seqs=1)
    held = threading.Event()
    engine, sink = AsyncEngine(harness.core), Sink()

    def hold(outputs: Sequence[EngineOutput]) -> None:
        sink(outputs)
        held.wait(30)

    engine.start(hold)
    for name in ("a", "b"):
        engine.submit(EngineRequest(name, [2, 3], LONG))
    closing = threading.Thread(target=engine.close)
    closing.start()
    held.set()
    closing.join(30)
    assert not closing.is_alive()
    assert sink.ended("a", "b")
    assert sink.reason("b") == "abort"


def test_an_engine_that_was_never_started_closes() -> None:
    engine = AsyncEngine(Harness().core)
    engine.close()
    with pytest.raises(UsageError, match="started once"):
        engine.start(Sink())


def test_a_receiver_that_raises_kills_the_engine_honestly(harness: Harness) -> None:
    engine = AsyncEngine(harness.core)
    seen = threading.Event()

    def broken(outputs: Sequence[EngineOutput]) -> None:
        seen.set()
        raise ValueError("broken receiver")

    engine.start(broken)
    engine.submit(EngineRequest("a", [2, 3], LONG))
    assert seen.wait(30)
    engine.close(drain_timeout=30)
    assert harness.core.dead is not None
    assert "broken receiver" in harness.core.dead


def test_a_scheduler_that_fails_ends_every_request(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sink = AsyncEngine(harness.core), Sink()

    def fail() -> None:
        raise RuntimeError("an invariant broke")

    monkeypatch.setattr(harness.scheduler, "schedule", fail)
    engine.submit(EngineRequest("a", [2, 3], LONG))
    engine.submit(EngineRequest("b", [2, 3], LONG))
    engine.start(sink)
    sink.wait("a", "b")
    assert {sink.reason("a"), sink.reason("b")} == {"error"}
    with pytest.raises(EngineDeadError, match="an invariant broke"):
        engine.submit(EngineRequest("c", [2], SHORT))
    engine.close()


def test_a_request_that_slips_in_while_the_engine_dies_is_answered(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sink = AsyncEngine(harness.core), Sink()
    for name in ("a", "b"):
        engine.submit(EngineRequest(name, [2, 3], LONG))
    harness.core.die("it died after the check")
    engine.start(sink)
    sink.wait("a", "b")
    assert [sink.outputs[name][-1].error for name in ("a", "b")] == ["it died after the check"] * 2
    engine.close()
