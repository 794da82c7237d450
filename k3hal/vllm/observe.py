"""Seeing into a vLLM worker: the plan is printed, calls are recorded and shadowed, and the front gets counts."""

from __future__ import annotations

import atexit
import dataclasses
import io
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from k3hal.debug import shadow_figures
from k3hal.debug.dump_spec import parse_dump
from k3hal.debug.shadow import Shadow, parse_shadow
from k3hal.dispatch.assemble import OPS_VARIABLE
from k3hal.dispatch.observe import observing
from k3hal.dispatch.overrides import parse_overrides
from k3hal.dispatch.plan_file import plan_json
from k3hal.dispatch.plan_text import plan_summary, plan_table
from k3hal.dispatch.registry import default_registry
from k3hal.errors import InputError, UsageError
from k3hal.vllm.figures import Board, figures_file, sweep

if TYPE_CHECKING:
    from k3hal.debug.record import Recorder
    from k3hal.dispatch.beside import Beside
    from k3hal.dispatch.plan import BoundOps, DispatchPlan
    from k3hal.dispatch.select import Decision

EXTENSION = "k3hal.vllm.observe.WorkerExtension"

_log = logging.getLogger("vllm.k3hal")
_COMPARED, _DIVERGED = "shadow_compared/", "shadow_diverged/"


class WorkerPlace(NamedTuple):
    """Which worker of which server: `instance` is vLLM's id of it, `engine` the data-parallel rank, `rank` of `world`
    tensor-parallel ones."""

    instance: str
    engine: int
    rank: int
    world: int

    @classmethod
    def of(cls, vllm_config: Any, rank: int) -> WorkerPlace:
        parallel = vllm_config.parallel_config
        return cls(vllm_config.instance_id, parallel.data_parallel_rank or 0, rank, parallel.tensor_parallel_size)


class WorkerWatch:
    """One model in one worker. Make it when the plan is made, `bind` the plan through it, and tell it of every step.

    Raises `UsageError` for a malformed `K3HAL_DUMP` or `K3HAL_SHADOW`.
    """

    def __init__(self, plan: DispatchPlan, place: WorkerPlace, environ: Mapping[str, str] = os.environ) -> None:
        self.plan = plan
        self._steps = self._tokens = 0
        self._recorder = _recorder(environ, place)
        shadow = environ.get("K3HAL_SHADOW")
        self._shadow = Shadow(parse_shadow(shadow)) if shadow else None
        shadowed = self._shadow.spec.ops if self._shadow is not None else ""
        self._shadowed = [op for op in sorted(set(_operators(plan))) if fnmatchcase(op, shadowed)]
        self._board = _board(place, list(self.figures()), plan)
        if place.engine == 0 and place.rank == 0:
            _log.info("dispatch plan, %s\n%s", plan_summary(plan), plan_text(plan))
        global _watch
        _watch = self

    def bind(self, beside: Beside | None = None) -> BoundOps:
        """The plan's functions, seen by what the environment asks for."""
        with ExitStack() as stack:
            for observer in (self._recorder, self._shadow):
                if observer is not None:
                    stack.enter_context(observing(observer))
            return self.plan.bind(beside)

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Around a forward pass over so many tokens."""
        self._steps += 1
        self._tokens += tokens
        if self._recorder is not None:
            self._recorder.step += 1
        yield
        if self._board is not None:
            for name, value in self.figures().items():
                self._board[name] = value

    def figures(self) -> dict[str, int]:
        """The counts so far in this process, by name."""
        counts = {"steps": self._steps, "tokens": self._tokens}
        counts["dumped"] = len(self._recorder.files) if self._recorder is not None else 0
        for op in self._shadowed:
            counts[_COMPARED + op], counts[_DIVERGED + op] = shadow_figures.compared[op], shadow_figures.diverged[op]
        return counts


_watch: WorkerWatch | None = None
"""Of the model loaded last in this process; a worker has one."""


class WorkerExtension:
    """What vLLM adds to a worker, for `collective_rpc`: `llm.collective_rpc("k3hal_plan")`. Each raises `UsageError`
    in a worker that runs no model of K3HAL's."""

    def k3hal_plan(self) -> dict[str, Any]:
        """The dispatch plan, as `op plan --json` prints it."""
        return plan_json(_loaded().plan)

    def k3hal_explain(self, op: str) -> list[str]:
        """What every provider of an operator answered for each entry of the plan."""
        return explained(_loaded().plan, op)

    def k3hal_figures(self) -> dict[str, int]:
        """Steps, tokens, recorded cases and shadowed calls so far."""
        return _loaded().figures()


def extend_worker(vllm_config: Any) -> None:
    """Have vLLM add `WorkerExtension` to its workers, unless the user has an extension of their own."""
    if not vllm_config.parallel_config.worker_extension_cls:
        vllm_config.parallel_config.worker_extension_cls = EXTENSION


def check_asked(environ: Mapping[str, str] = os.environ) -> None:
    """Raise `UsageError` for what a worker would refuse of the environment, minutes later."""
    parse_overrides(environ.get(OPS_VARIABLE, ""), OPS_VARIABLE, default_registry())
    if dump := environ.get("K3HAL_DUMP"):
        parse_dump(dump)
    if shadow := environ.get("K3HAL_SHADOW"):
        parse_shadow(shadow)


def plan_text(plan: DispatchPlan) -> str:
    """The plan's table without colour, as wide as it needs to be."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=160, color_system=None)
    console.print(plan_table(plan))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def explained(plan: DispatchPlan, op: str) -> list[str]:
    """Lines on each entry of the plan for `op`. Raises `UsageError` where it has none."""
    entries = [entry for entry in plan.entries if entry.request.op == op]
    if not entries:
        known = ", ".join(sorted({entry.request.op for entry in plan.entries}))
        raise UsageError(f"the plan has no operator {op}", hint=f"it has {known}")
    lines = []
    for entry in entries:
        decision = entry.decision
        how = f"{decision.policy}; {entry.level}"
        lines.append(f"{op}, {entry.request.phase}, {decision.call.dtype} -> {decision.provider} ({how})")
        for answer in decision.trace:
            verdict = "Yes" if answer.accepted else "No "
            lines.append(f"    {answer.provider:<24} {verdict} {'; '.join(answer.reasons)}".rstrip())
    return lines


def _operators(plan: DispatchPlan) -> Iterator[str]:
    """Of every entry, and of what it is composed of."""

    def with_parts(op: str, decision: Decision) -> Iterator[str]:
        yield op
        for name, part in decision.parts.items():
            yield from with_parts(name, part)

    for entry in plan.entries:
        yield from with_parts(entry.request.op, entry.decision)


def _loaded() -> WorkerWatch:
    if _watch is None:
        raise UsageError("this worker runs no model of k3hal's", hint="is K3HAL_VLLM=0 set?")
    return _watch


def _recorder(environ: Mapping[str, str], place: WorkerPlace) -> Recorder | None:
    """What `K3HAL_DUMP` asks for; every rank in a folder of its own where there are several."""
    asked = environ.get("K3HAL_DUMP")
    if not asked:
        return None
    from k3hal.debug.record import Recorder

    spec = parse_dump(asked)
    if place.world > 1:
        spec = dataclasses.replace(spec, folder=spec.folder / f"rank{place.rank}")
    return Recorder(spec, steps=False)


def _board(place: WorkerPlace, names: list[str], plan: DispatchPlan) -> Board | None:
    """None, with a warning, where the counts have no place to be: they are not worth failing for."""
    about = {
        "rank": place.rank,
        "operators": [
            {
                "op": entry.request.op,
                "phase": entry.request.phase,
                "provider": entry.decision.provider,
                "level": entry.level,
                "layers": len(entry.request.layers) or 1,
            }
            for entry in plan.entries
        ],
    }
    try:
        sweep()
        board = Board(figures_file(place.instance, place.engine, place.rank), names, about)
    except InputError as error:
        _log.warning("/metrics will have no k3hal_* figures: %s", error)
        return None
    atexit.register(board.close)
    return board
