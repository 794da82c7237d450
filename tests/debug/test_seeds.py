"""No false alarm: whatever a seed's values, what is right passes, composed or not, at each dtype's smallest shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from k3hal.debug.case import Case, sample_case, samples_of
from k3hal.debug.check import check
from k3hal.debug.golden import golden
from k3hal.debug.target import Target, find_target, peer_of
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import default_registry, get_operator, operator_names
from k3hal.dispatch.select import COMPOSED

OPERATORS = [name for name in operator_names() if get_operator(name).family != "collective"]
NIGHTLY_SEEDS = 1000


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for one another cost more than these shapes do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _smallest_cases(op: str, seeds: Iterable[int]) -> Iterator[Case]:
    """The smallest tiny sample of each dtype, with every seed."""
    operator = get_operator(op)
    for dtype in sorted({sample.dtype for sample in operator.samples()}):
        tiny = list(samples_of(operator, tags=("tiny",), dtypes=(dtype,)))
        if tiny:
            sample = min(tiny, key=lambda sample: sample_case(operator, sample).nbytes)
            yield from (sample_case(operator, sample, seed) for seed in seeds)


def _statuses(op: str, seeds: Iterable[int]) -> tuple[Counter[str], list[str]]:
    """How often each status came out, and what was no pass. One golden and one case serve all providers."""
    operator, cpu = get_operator(op), probe("cpu")
    counts, alarms = Counter[str](), []
    for case in _smallest_cases(op, seeds):
        expected = golden(operator, case.args)
        claimed = [p for p in default_registry().of(op) if p.backend == "cpu" and p.answer(case.call(cpu))]
        composed = [find_target(case, COMPOSED, cpu)] if operator.lowering else []
        for target in (Target.reference(operator), *map(Target.of, claimed), *composed):
            verdict = check(case, target, peer=peer_of(case, target, cpu), repeat=False, expected=expected)
            counts[verdict.status] += 1
            if not verdict.ok:
                alarms.append(f"{target.id} {case.id}: {'; '.join(verdict.reasons)}")
    return counts, alarms


@pytest.mark.parametrize("op", OPERATORS)
def test_a_few_seeds_pass(op: str) -> None:
    counts, alarms = _statuses(op, range(1, 4))
    assert alarms == []
    assert counts.total() >= 3


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("op", OPERATORS)
def test_a_thousand_seeds_pass(op: str, record_property: Callable[[str, object], None]) -> None:
    counts, alarms = _statuses(op, range(NIGHTLY_SEEDS))
    record_property("seen", f"{counts.total()} checks, {dict(counts)}")
    assert alarms == []
    assert counts.total() >= NIGHTLY_SEEDS
