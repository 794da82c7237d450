"""Checks one case: runs a target, judges what it gave and what it touched, and runs it again."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from k3hal.debug.case import Case
from k3hal.debug.contain import EscapeError
from k3hal.debug.execute import Execution, execute, written_late
from k3hal.debug.golden import Golden, golden
from k3hal.debug.judge import judge
from k3hal.debug.memory import same_bytes
from k3hal.debug.target import Target
from k3hal.debug.verdict import Status, Verdict, worst
from k3hal.dispatch.operator import Operator
from k3hal.dispatch.registry import get_operator


def check(
    case: Case,
    target: Target,
    *,
    peer: Target | None = None,
    repeat: bool = True,
    expected: Mapping[str, Tensor] | None = None,
    where: str = "cpu",
) -> Verdict:
    """Judge `target` on a case against the golden, or against `expected`, on torch device `where`, which both are on.

    Whatever the target raises is a Fail with the exception in words; only an error in the reference itself passes
    through. With `repeat` a target that calls itself deterministic must give the same bits twice.
    """
    operator = get_operator(case.op)
    wanted = golden(operator, case.args, where) if expected is None else expected
    try:
        run = execute(operator, target, case.args, where=where)
        problems, shared = [*run.problems, *_layout_problems(operator, case, run)], []
        if repeat and target.deterministic:
            again = execute(operator, target, case.args, where=where)
            problems += [problem for problem in again.problems if problem not in problems]
            problems += [f"two runs differ in {name}" for name in run.outputs if _differs(name, run, again)]
            shared = _shared_memory(run, again)
            problems += [f"{name} lies where the next call writes its own" for name in shared]
        own = {name: value for name, value in run.returned.items() if name not in shared}
        problems += [problem for problem in written_late(own, run.outputs) if problem not in problems]
    except Exception as error:  # noqa: BLE001 - what a provider raises is its result
        return Verdict(case.op, target.id, case.id, "Fail", (describe(error),))
    peer_outputs = execute(operator, peer, case.args, where=where).outputs if peer else None
    # On the CPU there is no better peer than the provider itself.
    alone = peer is None and isinstance(wanted, Golden) and target.device == "cpu"
    tensors = judge(operator, case.args, run.outputs, wanted, peer_outputs, alone=alone)
    statuses: list[Status] = [t.status for t in tensors]
    if problems:
        statuses.append("Fail")
    return Verdict(case.op, target.id, case.id, worst(statuses), tuple(problems), tensors, run.seconds)


def describe(error: BaseException) -> str:
    """An exception in one line."""
    if isinstance(error, EscapeError):
        error = error.error
    first = next(iter(str(error).splitlines()), "")
    return f"raised {type(error).__name__}: {first}" if first else f"raised {type(error).__name__}"


def _differs(name: str, run: Execution, again: Execution) -> bool:
    return name not in again.outputs or not same_bytes(run.outputs[name], again.outputs[name])


def _shared_memory(run: Execution, again: Execution) -> list[str]:
    """The outputs of a run whose memory a later run, the first one's results being alive, used again."""
    later = again.returned
    return [
        name
        for name, value in run.returned.items()
        if name in later
        and value.numel()
        and value.untyped_storage().data_ptr() == later[name].untyped_storage().data_ptr()
    ]


def _layout_problems(operator: Operator, case: Case, run: Execution) -> list[str]:
    """Returned tensors that lie in an argument's memory, or are not contiguous, where the reference's do and are: the
    first will be overwritten, the second are read wrong by a kernel that takes rows for granted."""
    suspects = {*run.aliases, *(name for name in run.outputs if name not in {*run.dense, *operator.mutates})}
    if not suspects:
        return []
    plain = execute(operator, Target.reference(operator), case.args, poisoned=False)
    aliased = [f"{n} lies in the memory of {a}" for n, a in run.aliases.items() if n not in plain.aliases]
    return [*aliased, *(f"{name} is not contiguous" for name in sorted(suspects & plain.dense - run.dense))]
