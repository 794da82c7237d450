"""The process that judges providers: `python -m k3hal.conform.worker FD`, a task a line on standard input.

What it does goes to file descriptor FD, an event a line, always before it is done: should the process die or hang,
the last event says where.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from k3hal.conform.failures import fails, keep_case, shrink_case
from k3hal.conform.result import BAD, SAMPLE, CheckResult
from k3hal.conform.selection import Ask, Candidate, Selection, asker, composing, registry_with
from k3hal.conform.suite import Check, Workpiece, run_check
from k3hal.debug.target import Target, find_target, peer_of
from k3hal.dispatch.probe import probe
from k3hal.dispatch.runtime import runtime_for
from k3hal.dispatch.select import COMPOSED


@dataclass(frozen=True, slots=True)
class Task:
    """One operator's checks with its candidates, or only those of some `cases` (by id; none named: all).

    `done` holds, by provider, the keys of checks not to run again. `folder` is where cases of failures go, at most
    `most_cases` of a provider.
    """

    op: str
    selection: Selection
    candidates: tuple[Candidate, ...]
    folder: str
    cases: tuple[str, ...] = ()
    done: Mapping[str, list[str]] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    threads: int = 1
    most_cases: int = 4

    def checks(self) -> list[Check]:
        """What is to be done, the checks of one case together."""
        checks = self.selection.checks(self.op)
        return [check for check in checks if check.case_id in self.cases] if self.cases else checks

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Task:
        made = {
            "selection": Selection(**data["selection"]),
            "candidates": tuple(Candidate(**one) for one in data["candidates"]),
            "cases": tuple(data["cases"]),
            "plugins": tuple(data["plugins"]),
        }
        return cls(**{**data, **made})


class Judge:
    """Works through one task."""

    def __init__(self, task: Task, emit: Any) -> None:
        self._task, self._emit = task, emit
        self._registry = registry_with(task.plugins)
        self._device = probe(task.selection.device)
        self._host = self._device if self._device.vendor == "cpu" else probe("cpu")
        self._asks = {one.provider: self._ask(one.provider) for one in task.candidates}
        self._kept: dict[str, int] = {}
        self._at = Workpiece()
        self.spent = False
        """Whether the device no longer answers, so that only a new process can go on."""

    def run(self) -> None:
        """Every check with every candidate that has not been done, until the device is spent."""
        for check in self._task.checks():
            todo = [c for c in self._task.candidates if check.key not in self._task.done.get(c.provider, ())]
            if not todo:
                continue
            self._emit(event="prepare", key=check.key)
            self._at.case(check)
            if check.kind == SAMPLE and any(check.case_id not in one.refused for one in todo):
                self._at.golden(check)
            for one in todo:
                self._emit(event="begin", provider=one.provider, key=check.key)
                self._judge(check, one)
                if self.spent:
                    return

    def _judge(self, check: Check, one: Candidate) -> None:
        result = self._checked(check, one)
        if result is None:
            self._emit(event="skip", provider=one.provider, key=check.key)
            return
        path = None
        if result.status == "Fail" and self._kept.get(one.provider, 0) < self._task.most_cases:
            path = keep_case(self._at.case(check), one.provider, check.kind, Path(self._task.folder))
            self._kept[one.provider] = self._kept.get(one.provider, 0) + bool(path)
        self._emit(event="result", key=check.key, result=result.to_json(), case_file=path.name if path else "")
        self.spent = result.status in BAD and not self._answers()
        if path and not self.spent:
            self._emit(event="shrink", provider=one.provider, key=check.key)
            shrink_case(self._at.case(check), fails(self._target(one, check), check.kind), path)

    def _checked(self, check: Check, one: Candidate) -> CheckResult | None:
        """None for an invariant that does not apply, or of a case the provider says No to."""
        said, expected = self._asks[one.provider](self._call(check)), one.refused.get(check.case_id)
        empty = check.result(one.provider)
        if (said is None) != (expected is None):
            before, now = ("Yes" if answer is None else "No" for answer in (expected, said))
            return dataclasses.replace(empty, status="Fail", problems=(f"said {before} when first asked, now {now}",))
        if said is not None:
            return dataclasses.replace(empty, problems=tuple(said)) if check.kind == SAMPLE else None
        if problem := self._crashing_answer(check, one):
            return dataclasses.replace(empty, status="Fail", problems=(problem,))
        target, peer = self._target(one, check), None
        if self._device.vendor != "cpu":  # there a peer would be the CPU provider itself: caps and floors judge alone
            peer = peer_of(self._at.case(check), target, self._host, self._registry)
        result = run_check(target, check, peer=peer, at=self._at)
        return result and dataclasses.replace(result, provider=one.provider)

    def _target(self, one: Candidate, check: Check) -> Target:
        for provider in self._registry.of(self._task.op):
            if provider.id == one.provider:
                return Target.of(provider, self._device.torch_device)
        return find_target(self._at.case(check), one.provider, self._device, self._registry)

    def _call(self, check: Check) -> Any:
        return self._at.case(check).call(self._device)

    def _ask(self, name: str) -> Ask:
        if name == COMPOSED:
            return composing(self._device, self._registry)
        return asker(next(p for p in self._registry.of(self._task.op) if p.id == name))

    def _crashing_answer(self, check: Check, one: Candidate) -> str:
        """What `supports` raises, in words: an error there is no No."""
        for provider in self._registry.of(self._task.op):
            if provider.id == one.provider:
                try:
                    provider.answer(self._call(check))
                except Exception as error:  # noqa: BLE001 - what a provider raises is its result
                    return f"supports() raised {type(error).__name__}: {error}"
        return ""

    def _answers(self) -> bool:
        """Whether the device still does: one bad kernel may have ended its context."""
        if self._device.vendor == "cpu":
            return True
        try:
            runtime_for(self._device).synchronize()
            torch.ones(1, device=self._device.torch_device).add_(1).cpu()
        except Exception:  # noqa: BLE001 - whatever it says, it does not answer
            return False
        return True


def _end_with(parent: int) -> None:
    """A run that was killed cannot end a worker that hangs, which may hold a device: it ends itself."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def serve(events: int) -> None:
    """Do tasks until standard input ends, the run is gone or the device is spent."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with os.fdopen(events, "w", buffering=1) as out:

        def emit(**event: Any) -> None:
            out.write(json.dumps(event) + "\n")

        for line in sys.stdin:
            task = Task.from_json(json.loads(line))
            torch.set_num_threads(task.threads)
            judge, begun = None, time.perf_counter()
            try:
                judge = Judge(task, emit)
                judge.run()
            except Exception as error:
                emit(event="broken", message=f"{type(error).__name__}: {error}")
                raise
            if judge.spent:
                return
            emit(event="end", seconds=time.perf_counter() - begun)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
