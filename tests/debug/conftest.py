"""Cases and targets that the tests of the workbench share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from k3hal.debug.case import Case, sample_case, samples_of
from k3hal.debug.target import Target
from k3hal.dispatch.registry import get_operator

MakeCase = Callable[..., Case]


@pytest.fixture(scope="session")
def case_of() -> MakeCase:
    """`case_of("rms_norm", "sample name", "float32")`; without a dtype the first there is."""

    def make(op: str, name: str, dtype: str = "", seed: int = 0) -> Case:
        operator = get_operator(op)
        found = list(samples_of(operator, names=[name], dtypes=[dtype] if dtype else ()))
        assert found, f"{op} has no sample {name}"
        return sample_case(operator, found[0], seed)

    return make


@pytest.fixture(scope="session")
def reference_of() -> Callable[[str], Target]:
    return lambda op: Target.reference(get_operator(op))
