"""A provider's call leaves the process as it was: what it changes is named and put back, and Ctrl-C stays Ctrl-C."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from k3hal.debug import graph, grid_runs
from k3hal.debug.case import Case
from k3hal.debug.check import check
from k3hal.debug.compare import How
from k3hal.debug.contain import EscapeError, contained
from k3hal.debug.global_state import GlobalState
from k3hal.debug.invariants import check_invariant
from k3hal.debug.target import Target
from k3hal.dispatch.ops.sigmoid_gate import sigmoid_gate
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import get_operator

from .queued_device import QueuedDevice

MakeCase = Callable[..., Case]
CPU = torch.device("cpu")


def _target(effect: Callable[[], Any]) -> Target:
    def fn(**args: Any) -> Any:
        effect()
        return sigmoid_gate(**args)

    return replace(Target.reference(get_operator("sigmoid_gate")), id="evil", fn=fn)


@pytest.mark.parametrize(
    ("effect", "named"),
    [
        (lambda: torch.set_default_dtype(torch.float64), "torch's default dtype from torch.float32 to torch.float64"),
        (lambda: torch.set_default_device("meta"), "torch's default device from cpu to meta"),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "torch's number of threads"),
        (lambda: torch.use_deterministic_algorithms(True), "torch's deterministic mode"),
        (lambda: torch.set_grad_enabled(True), "grad mode from False to True"),
        (lambda: torch.set_autocast_enabled("cpu", True), "autocast on cpu from False to True"),
        (lambda: torch.set_float32_matmul_precision("high"), "torch's float32_matmul_precision"),
        (lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True), "torch.backends.cuda.matmul.fp32_precision"),
        (
            lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
            "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction from True to False",
        ),
        (lambda: os.chdir("/"), "the working directory"),
        (lambda: os.environ.update(EVIL="1"), "environment variables: EVIL"),
        (lambda: torch.rand(1), "the random state of torch"),
        (lambda: torch.manual_seed(0), "the random state of torch"),
        (random.random, "the random state of random"),
        (lambda: numpy.random.rand(1), "the random state of numpy"),
    ],
)
def test_changed_global_state_fails_and_is_put_back(case_of: MakeCase, effect: Callable[[], Any], named: str) -> None:
    random.seed(5)
    state = GlobalState("cpu")
    verdict = check(case_of("sigmoid_gate", "plain", "float32"), _target(effect))
    assert state.restore() == []
    assert verdict.status == "Fail"
    assert any(f"changed {named}" in problem for problem in verdict.problems), verdict.problems


def test_a_call_that_changes_nothing_passes(case_of: MakeCase) -> None:
    assert check(case_of("sigmoid_gate", "plain", "float32"), _target(lambda: None)).ok


def _setting_a_variable(op: str, when: Callable[[dict[str, Any]], bool]) -> Target:
    """The reference, which changes the environment in the calls that `when` says."""
    reference = get_operator(op).reference

    def fn(**args: Any) -> Any:
        if when(args):
            os.environ["EVIL"] = "1"
        return reference(**args)

    return replace(Target.reference(get_operator(op)), id="evil", fn=fn)


@pytest.mark.parametrize(
    ("invariant", "op", "sample", "when"),
    [
        ("batch", "sigmoid_gate", "plain", lambda args: True),
        ("pad", "kda_decode", "null_slots", lambda args: True),
        ("decode", "kda_decode", "null_slots", lambda args: True),
        ("decode", "mla_prefill", "page_edges", lambda args: True),
        ("split", "kda_chunk", "empty_sequences", lambda args: True),
        ("restore", "kda_chunk", "empty_sequences", lambda args: bool(args["state"].isnan().any())),
        ("far", "copy_pages", "", lambda args: args["arena"].nbytes > 2**31),
    ],
)
def test_what_an_invariants_calls_change_fails_it(
    case_of: MakeCase, invariant: str, op: str, sample: str, when: Callable[[dict[str, Any]], bool]
) -> None:
    """As it fails a sample, and in whichever of its calls it happens."""
    case = case_of(op, sample or next(s.name for s in get_operator(op).samples() if "tiny" in s.tags))
    state = GlobalState("cpu")
    verdict = check_invariant(invariant, case, _setting_a_variable(op, when))
    assert state.restore() == []
    assert verdict is not None and verdict.status == "Fail"
    assert verdict.problems == ("changed environment variables: EVIL",)
    fine = check_invariant(invariant, case, _setting_a_variable(op, lambda args: False))
    assert fine is not None and fine.ok, fine


@pytest.mark.parametrize("call", [1, 2, 3])
def test_what_a_captured_call_changes_fails_the_replay(
    case_of: MakeCase, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call before the capture, the captured one, and the eager one it is compared with."""
    device = QueuedDevice(replace(probe("cpu"), id="queued:0", vendor="nvidia"))
    monkeypatch.setattr(graph, "runtime_for", lambda _: device)
    count = itertools.count(1)
    target = replace(_setting_a_variable("sigmoid_gate", lambda args: next(count) == call), graph_safe=True)
    verdict = check_invariant("replay", case_of("sigmoid_gate", "plain", "float32"), target)
    assert verdict is not None and device.captures == 1
    assert (verdict.status, verdict.problems) == ("Fail", ("changed environment variables: EVIL",))


def test_what_a_warming_call_changes_fails_the_case(case_of: MakeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    count, case = itertools.count(1), case_of("sigmoid_gate", "plain", "float32")
    target = _setting_a_variable("sigmoid_gate", lambda args: next(count) == 1)
    monkeypatch.setattr(grid_runs, "find_target", lambda *_: target)
    monkeypatch.setattr(grid_runs, "compare_one", lambda case, *_, **__: check(case, target))
    how = How(probe("cpu"))
    (verdict,) = grid_runs.compare_ways(case, ["evil"], how, {"start": ["warm"]}, None)
    assert (verdict.status, verdict.problems) == ("Fail", ("changed environment variables: EVIL",))


def test_an_argument_written_within_an_invariant_fails_it(case_of: MakeCase) -> None:
    def fn(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        out = sigmoid_gate(x, gate)
        gate.mul_(2)
        return out

    writes = replace(Target.reference(get_operator("sigmoid_gate")), id="evil", fn=fn)
    verdict = check_invariant("batch", case_of("sigmoid_gate", "plain", "float32"), writes)
    assert verdict is not None and (verdict.status, verdict.problems) == ("Fail", ("argument gate was modified",))


def test_an_exit_within_an_invariant_is_its_result(case_of: MakeCase) -> None:
    def leave() -> None:
        raise SystemExit(0)

    verdict = check_invariant("batch", case_of("sigmoid_gate", "plain", "float32"), _target(leave))
    assert verdict is not None and (verdict.status, verdict.problems) == ("Fail", ("raised SystemExit: 0",))


def test_only_a_real_ctrl_c_passes() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), contained(CPU):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(EscapeError, match="KeyboardInterrupt"), contained(CPU):
        raise KeyboardInterrupt
    assert signal.getsignal(signal.SIGINT) is before


def test_nvidias_linear_leaves_torchs_flags_as_they_were() -> None:
    from k3hal.backends.nvidia.linear import linear

    state, matmul = GlobalState("cpu"), torch.backends.cuda.matmul
    try:
        matmul.allow_bf16_reduced_precision_reduction = matmul.allow_tf32 = True
        changed = GlobalState("cpu")
        linear(torch.ones(2, 3), torch.ones(4, 3))
        assert changed.restore() == []
    finally:
        state.restore()
