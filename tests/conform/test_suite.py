"""What a provider must pass: the checks of an operator, the quick subset, and results as JSON."""

from __future__ import annotations

import dataclasses

import pytest
from torch import Tensor

from k3hal.conform.quick import quick_samples
from k3hal.conform.result import CheckResult
from k3hal.conform.suite import Check, checks_of, run_checks
from k3hal.debug.case import samples_of
from k3hal.debug.invariants import invariants_of
from k3hal.debug.target import Target
from k3hal.dispatch.registry import default_registry, get_operator, operator_names


@pytest.mark.parametrize("name", operator_names())
def test_a_check_knows_its_case_without_making_it(name: str) -> None:
    operator = get_operator(name)
    checks = checks_of(operator, quick=False)
    assert len({check.key for check in checks}) == len(checks)
    assert checks[0].case_id == checks[0].case().id
    assert {check.kind for check in checks} == {"sample", *(f"invariant:{n}" for n in invariants_of(operator))}


@pytest.mark.parametrize("name", operator_names())
def test_quick_takes_something_of_every_class_dtype_and_phase(name: str) -> None:
    operator = get_operator(name)
    small = [s for s in samples_of(operator) if not s.tags & {"k3", "device"}]
    chosen = quick_samples(list(samples_of(operator)))
    for sample in small:
        for tag in sample.tags:
            assert any(tag in s.tags and (s.dtype, s.phase) == (sample.dtype, sample.phase) for s in chosen)
    quick = [check.key for check in checks_of(operator, quick=True)]
    assert set(quick) <= {check.key for check in checks_of(operator, quick=False)}


def test_a_provider_passes_and_its_mutant_fails() -> None:
    operator = get_operator("silu_and_mul")
    provider = next(p for p in default_registry().of(operator.name) if p.backend == "cpu")

    def doubled(x: Tensor) -> Tensor:
        return 2 * provider.fn(x=x)

    checks = checks_of(operator, quick=True)
    right = list(run_checks(Target.of(provider), checks))
    assert right and all(result.ok for result in right)
    wrong = list(run_checks(dataclasses.replace(Target.of(provider), fn=doubled), checks))
    samples = [result for result in wrong if result.kind == "sample"]
    assert samples and all(r.status == "Fail" or not r.tensors[0].peak for r in samples)
    assert any(result.status == "Fail" for result in samples)
    assert {r.case for r in wrong} == {check.case_id for check in checks}


def test_results_survive_json() -> None:
    operator = get_operator("rms_norm")
    for result in run_checks(Target.reference(operator), checks_of(operator, quick=True)[:4]):
        assert CheckResult.from_json(result.to_json()) == dataclasses.replace(result, seconds=round(result.seconds, 6))


@pytest.mark.parametrize(
    "changes", [{"status": "Fine"}, {"shape_class": "huge"}, {"op": 3}, {"seconds": "soon"}, {"tensors": [{}]}]
)
def test_a_malformed_result_is_refused(changes: dict[str, object]) -> None:
    operator = get_operator("rms_norm")
    data = Check(operator, next(operator.samples())).result("x.y").to_json()
    with pytest.raises((ValueError, KeyError, TypeError)):
        CheckResult.from_json(data | changes)
