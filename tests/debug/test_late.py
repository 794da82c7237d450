"""What a provider's threads write after its call has returned is found, and threads that write nothing are let be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from k3hal.debug.case import Case
from k3hal.debug.check import check
from k3hal.debug.invariants import check_invariant
from k3hal.debug.late import LATE, thread_ids, waited_for_new
from k3hal.debug.target import Target
from k3hal.dispatch.registry import get_operator

MakeCase = Callable[..., Case]
AFTER = 0.01


def _with(op: str, effect: Callable[[dict[str, Any], Any], object]) -> Target:
    """The reference, and then `effect` of its arguments and its result."""
    reference = get_operator(op).reference

    def fn(**args: Any) -> Any:
        out = reference(**args)
        effect(args, out)
        return out

    return replace(Target.reference(get_operator(op)), id="evil", fn=fn)


def _zero(tensor: Tensor) -> None:
    with torch.inference_mode():
        tensor.zero_()


def _later(tensor: Tensor) -> None:
    threading.Timer(AFTER, _zero, (tensor,)).start()


@pytest.mark.parametrize(
    ("op", "sample", "effect", "problem"),
    [
        ("sigmoid_gate", "plain", lambda args, out: _later(out), "out was written after the call had returned"),
        ("sigmoid_gate", "plain", lambda args, out: _later(args["gate"]), "argument gate was modified"),
        ("kda_decode", "one", lambda args, out: _later(args["state"]), "state was written after the call had returned"),
    ],
)
def test_what_a_thread_writes_late_is_found(
    case_of: MakeCase, op: str, sample: str, effect: Callable[[dict[str, Any], Any], object], problem: str
) -> None:
    case = case_of(op, sample, "float32")
    verdict = check(case, _with(op, effect))
    assert verdict.status == "Fail" and problem in verdict.problems


def test_and_so_it_is_within_an_invariant(case_of: MakeCase) -> None:
    verdict = check_invariant(
        "batch", case_of("sigmoid_gate", "plain", "float32"), _with("sigmoid_gate", lambda args, out: _later(out))
    )
    assert verdict is not None and verdict.problems == ("out was written after the call had returned",)


def test_a_result_that_the_next_call_writes_is_found(case_of: MakeCase) -> None:
    """By no thread of its own, and in memory of its own: as by a worker that is there from before."""
    last: list[Tensor] = []

    def effect(args: dict[str, Any], out: Tensor) -> None:
        for tensor in last:
            tensor.zero_()
        last[:] = [out]

    verdict = check(case_of("sigmoid_gate", "plain", "float32"), _with("sigmoid_gate", effect))
    assert verdict.problems == ("out was written after the call had returned",)


def test_threads_that_write_nothing_pass(case_of: MakeCase) -> None:
    case = case_of("sigmoid_gate", "plain", "float32")
    with ThreadPoolExecutor(1) as pool:
        assert check(case, _with("sigmoid_gate", lambda args, out: pool.submit(float, 1))).ok
    sleeps = _with("sigmoid_gate", lambda args, out: threading.Timer(AFTER, float, (1,)).start())
    assert check(case, sleeps).ok


def test_only_new_threads_are_waited_for_and_not_for_ever() -> None:
    begun, end = time.monotonic(), threading.Event()
    assert not waited_for_new(thread_ids())
    before = thread_ids()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert waited_for_new(before) and thread.is_alive()
    assert not waited_for_new(thread_ids())
    end.set()
    thread.join()
    assert time.monotonic() - begun >= LATE
