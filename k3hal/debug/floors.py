"""`python -m k3hal.debug.floors`: the errors of right providers by tolerance class, on which floors and caps rest."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Annotated

import typer

from k3hal.debug.case import Case, sample_cases
from k3hal.debug.execute import execute
from k3hal.debug.golden import golden
from k3hal.debug.judge import judge
from k3hal.debug.target import Target
from k3hal.debug.verdict import TensorNumbers
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import default_registry, get_operator, operator_names
from k3hal.dispatch.tolerance import CLASSES

ELEMENTS = 1000
"""Of the smallest output that counts: what a few elements round to is no property of a class."""

NUMBERS: tuple[str, ...] = ("tensor", "slice", "peak")


@dataclass(frozen=True, slots=True)
class Measured:
    """The largest error of a class, and the output it comes from."""

    value: float = 0.0
    where: str = "nothing"

    def larger(self, value: float, where: str) -> Measured:
        return Measured(value, where) if value > self.value else self


def measure(*, tags: Collection[str] = (), seeds: int = 1) -> dict[str, dict[str, Measured]]:
    """For each class that is not exact the largest `tensor`, `slice` and `peak` of the references and CPU providers.

    On all samples a CPU holds, or those with one of `tags`.
    """
    found: dict[str, dict[str, Measured]] = {
        name: {number: Measured() for number in NUMBERS} for name, caps in CLASSES.items() if not caps.exact
    }
    for case, target, numbers in _judged(tags, seeds):
        where = f"{case.id} {numbers.name}, {target.id}"
        if numbers.tolerance in found:
            row = found[numbers.tolerance]
            row |= {name: row[name].larger(getattr(numbers, name), where) for name in row}
    return found


def _judged(tags: Collection[str], seeds: int) -> Iterator[tuple[Case, Target, TensorNumbers]]:
    cpu = probe("cpu")
    for operator in map(get_operator, operator_names()):
        cases = (case for seed in range(seeds) for case in sample_cases(operator, tags=tags, seed=seed))
        for case in cases if operator.family != "collective" else ():
            expected = golden(operator, case.args)
            large = {name for name, value in expected.items() if value.numel() >= ELEMENTS}
            claimed = [
                p for p in default_registry().of(operator.name) if p.backend == cpu.id and p.answer(case.call(cpu))
            ]
            for target in (Target.reference(operator), *map(Target.of, claimed)) if large else ():
                outputs = execute(operator, target, case.args).outputs
                for numbers in judge(operator, case.args, outputs, expected):
                    if numbers.name in large:
                        yield case, target, numbers


def main(seeds: Annotated[int, typer.Option("--seeds", help="Seeds 0 to N - 1 of every sample.")] = 3) -> None:
    """Print what was measured beside the floor and the caps of each class."""
    for name, row in measure(seeds=seeds).items():
        caps = CLASSES[name]
        typer.echo(f"{name}  floor {caps.floor:g}")
        for number, got in row.items():
            typer.echo(f"    {number:<7} {got.value:<9.2g} cap {getattr(caps, number):<7g} {got.where}")


if __name__ == "__main__":
    typer.run(main)
