"""Runs jobs in processes of their own, and makes one report of what they gave."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from k3hal.conform.cross.budgets import problems
from k3hal.conform.cross.compile import Done, Job, run
from k3hal.dispatch.errors import BackendError, UsageError
from k3hal.dispatch.packages import INSTALLED

SCHEMA = "k3hal.conform_cross/1"
FUSION = "TRITON_DEFAULT_FP_FUSION"


@dataclass(frozen=True, slots=True)
class Report:
    """What was compiled, in the jobs' order."""

    done: tuple[Done, ...]
    seconds: float

    @property
    def broken(self) -> list[str]:
        """A line for every failure and broken budget."""
        lines = [f"{_where(one.job)}: {one.problem}" for one in self.done if one.problem]
        return lines + [
            f"{_where(one.job)}: {made.kernel} ({made.samples[0]}) {what}"
            for one in self.done
            for made in one.kernels
            for what in problems(made)
        ]

    def to_json(self) -> dict[str, Any]:
        kernels = [
            {
                **asdict(one.job), "kernel": made.kernel, "samples": made.samples, "decodes": made.decodes,
                **asdict(made.figures), "problems": list(problems(made)),
            }
            for one in self.done
            for made in one.kernels
        ]  # fmt: skip
        refused = [
            {**asdict(one.job), "sample": sample, "reasons": reasons}
            for one in self.done
            for sample, reasons in one.refused
        ]
        failed = [{**asdict(one.job), "problem": one.problem} for one in self.done if one.problem]
        return {
            "triton": INSTALLED.get("triton"), "seconds": self.seconds, "kernels": kernels, "refused": refused,
            "failed": failed, "broken": self.broken,
        }  # fmt: skip


def _where(job: Job) -> str:
    tactic = "" if job.tactic == "default" else f":{job.tactic}"
    return f"{job.op}, {job.provider}{tactic} on {job.target}"


def check_cache() -> None:
    """Raise `UsageError` where Triton cannot keep what it compiles: else every kernel would seem broken."""
    from triton import knobs

    folder = Path(knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        hint = "name another folder in TRITON_CACHE_DIR"
        raise UsageError(f"Triton's cache {folder} cannot be written: {error.strerror}", hint=hint) from error


def compile_all(todo: Sequence[Job], processes: int, note: Callable[[int, int, str], None]) -> tuple[Done, ...]:
    """Every job's result, in order; `note` is told how many of how many are done, and the last one's operator.

    Raises `BackendError` where a process does not live to give its result.
    """
    context = multiprocessing.get_context("spawn")
    found: dict[Job, Done] = {}
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare) as pool:
        # The longest take as long as all others of their target: they come first.
        order = sorted(todo, key=lambda job: job.op not in _LONG)
        waiting = {pool.submit(run, job) for job in order}
        try:
            while waiting:
                ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for one in (future.result() for future in ended):
                    found[one.job] = one
                    note(len(found), len(todo), f"{one.job.op} {one.job.target}")
        except BrokenProcessPool as error:
            began = [_where(job) for job in order if job not in found][:processes]
            message = f"a process ended while it compiled {', or '.join(began)}"
            raise BackendError(message, hint="memory ran out, or the compiler crashed; --jobs 1 tells which") from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return tuple(found[job] for job in todo)


_LONG = ("mla_decode", "kda_prefill", "attn_res_mix", "mla_prefill", "kda_chunk")


def _prepare() -> None:
    """In a child: one thread, and the fusion of products and sums that every release up to 3.9 has by default."""
    import torch

    torch.set_num_threads(1)
    os.environ.setdefault(FUSION, "1")


def table(done: Iterable[Done]) -> list[str]:
    """A Markdown table: the most that any of a kernel's forms takes on each target."""
    rows: dict[tuple[str, str], dict[str, tuple[int, int, int]]] = {}
    targets: dict[str, None] = {}
    for made in (made for one in done for made in one.kernels):
        key, figures, target = (made.job.op, made.kernel), made.figures, made.job.target
        taken = (figures.registers, figures.scratch, figures.shared)
        targets[target] = None
        old = rows.setdefault(key, {}).get(target, (0, 0, 0))
        rows[key][target] = (max(old[0], taken[0]), max(old[1], taken[1]), max(old[2], taken[2]))
    lines = ["| operator | kernel | " + " | ".join(targets) + " |", "|---" * (len(targets) + 2) + "|"]
    for (op, kernel), of in rows.items():
        cells = [_cell(of.get(target)) for target in targets]
        lines.append(f"| `{op}` | `{kernel}` | " + " | ".join(cells) + " |")
    return lines


def _cell(taken: tuple[int, int, int] | None) -> str:
    if taken is None:
        return ""
    registers, scratch, shared = taken
    return f"{registers}, {shared / 1024:.3g} K" + (f", **{scratch} B**" if scratch else "")
