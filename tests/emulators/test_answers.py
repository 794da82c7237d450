"""What a provider runs on an emulated machine, whose evidence counts for the machine, it runs on the machine itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from k3hal.dispatch.call import Call, Yes
from k3hal.dispatch.describe import describe
from k3hal.dispatch.emulated import emulate
from k3hal.dispatch.registry import default_registry, get_operator, operator_names


@pytest.mark.parametrize("name", ["mi300x", "mi355x", "ascend_910b", "ascend_910c", "ascend_950"])
def test_no_provider_says_yes_only_because_a_machine_is_emulated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3hal.dispatch.emulated._machines", {})
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    emulated = emulate(name)
    machine = replace(describe(name), packages=emulated.packages)
    registry = default_registry()
    answers: Counter[bool] = Counter()
    for op in operator_names():
        for sample in get_operator(op).samples():
            asked = Call(op, machine, sample.dtype, sample.phase, sample.dims)
            for provider in registry.of(op):
                real = provider.answer(asked)
                # The other way round may be: without the emulators, which this process lacks, a library cannot load.
                if isinstance(provider.answer(replace(asked, device=emulated)), Yes):
                    assert isinstance(real, Yes), (provider.id, sample.name, real)
                answers[isinstance(real, Yes)] += 1
    assert min(answers[True], answers[False]) > 100, answers
