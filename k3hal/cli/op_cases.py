"""The cases a verb works on: an operator's samples, or files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3hal.errors import UsageError

if TYPE_CHECKING:
    from k3hal.debug.case import Case
    from k3hal.debug.verdict import Verdict
    from k3hal.dispatch.device import DeviceDescription
    from k3hal.dispatch.operator import Operator

PresentDevice = Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:1, rocm, npu.")]
SampleNames = Annotated[
    list[str] | None, typer.Option("--sample", metavar="NAME", help="Only samples of this name; may be repeated.")
]
Tags = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="TAG", help="Only samples with a tag: tiny, edge, adversarial, k3, device, bench."),
]
DTypes = Annotated[
    list[str] | None, typer.Option("--dtype", metavar="float32|bfloat16", help="Only samples of this dtype.")
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", min=0, max=(1 << 63) - 1, help="Seed of the samples' values.")
]
CaseFiles = Annotated[
    list[Path] | None, typer.Option("--case", metavar="FILE", help="A .k3case instead of samples; may be repeated.")
]


def cases_of(
    op: str,
    *,
    names: Sequence[str] | None,
    tags: Sequence[str] | None,
    dtypes: Sequence[str] | None,
    files: Sequence[Path] | None = None,
    seeds: Sequence[int] = (0,),
) -> Iterator[Case]:
    """The cases that the flags name. Raises `UsageError` when they name none, or a file is of another operator."""
    from k3hal.debug.case import sample_case, samples_of
    from k3hal.debug.case_file import load_case
    from k3hal.dispatch.registry import get_operator

    operator = get_operator(op)
    if files:
        cases = [load_case(file) for file in files]
        for file, case in zip(files, cases, strict=True):
            if case.op != op:
                raise UsageError(f"{file} is a case of {case.op}, not of {op}")
        return iter(cases)
    samples = list(samples_of(operator, names=names or (), tags=tags or (), dtypes=dtypes or ()))
    if not samples:
        raise no_sample(operator)
    return (sample_case(operator, sample, seed) for sample in samples for seed in seeds)


def no_sample(operator: Operator) -> UsageError:
    """The error that no sample of an operator is meant; it lists them."""
    known = sorted({f"{s.name} ({', '.join(sorted(s.tags))})" for s in operator.samples()})
    return UsageError(f"no sample of {operator.name} matches", hint=f"samples: {'; '.join(known)}")


def present(device: str) -> DeviceDescription:
    """The device of this machine that a flag names."""
    from k3hal.dispatch.probe import probe

    return probe(device)


def print_verdict(verdict: Verdict) -> None:
    """One line for a verdict, and one more for each reason."""
    numbers = " ".join(f"{t.name} {t.tensor:.2g}/{t.slice:.2g}/{t.peak:.2g}" for t in verdict.tensors)
    typer.echo(f"{verdict.status:<14} {verdict.provider:<20} {verdict.case:<52} {numbers}".rstrip())
    for reason in verdict.reasons:
        typer.echo(f"    {reason}")
