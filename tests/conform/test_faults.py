"""Every seeded fault is found, in its own operator; right providers pass what found them."""

from __future__ import annotations

import json

import pytest

from k3hal.cli import main
from k3hal.conform.faults import Fault, base_of, catalogue
from k3hal.conform.faults.fault import clean_composition
from k3hal.conform.result import SAMPLE
from k3hal.conform.selftest import SelfTest, faults_matching, ordered
from k3hal.conform.suite import run_checks
from k3hal.dispatch.registry import default_registry, get_operator, operator_names
from k3hal.errors import UsageError

OPERATORS = sorted({fault.op for fault in catalogue()})
COMPOSED = ("kda_decode", "kda_prefill", "latent_moe")
ONE_RANK = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
"""Collectives: their samples are those of one rank, where there is nothing to get wrong."""


@pytest.mark.parametrize("op", OPERATORS)
def test_every_fault_is_found_in_its_operator(op: str) -> None:
    test = SelfTest()
    outcomes = list(test.run(fault for fault in catalogue() if fault.op == op))
    assert [outcome.fault.id for outcome in outcomes if not outcome.caught] == []
    assert {outcome.found.op for outcome in outcomes if outcome.found} == {op}
    assert test.false_alarms == []


def test_every_operator_has_faults() -> None:
    assert set(operator_names()) - set(OPERATORS) == set(ONE_RANK)
    provided = {p.op for p in default_registry().providers if p.backend != "null"}
    assert provided <= set(OPERATORS)


def test_every_fault_says_what_it_stands_for() -> None:
    assert len(catalogue()) >= 48
    assert len({fault.id for fault in catalogue()}) == len(catalogue())
    assert [fault.id for fault in catalogue() if len(fault.bug) < 8 or "\n" in fault.bug] == []


@pytest.mark.parametrize("op", COMPOSED)
def test_what_faults_of_parts_are_planted_in_is_right(op: str) -> None:
    """The composition itself, without a fault, is not what is found."""
    fault = Fault("none", op, "", clean_composition(op))
    checks = [check for check in ordered(fault) if check.kind == SAMPLE and "k3" not in check.sample.tags]
    results = list(run_checks(fault.planted(base_of(op)), checks))
    assert results and [(r.case, r.kind, r.reasons) for r in results if not r.ok] == []


def test_an_expected_check_comes_first() -> None:
    fault = next(fault for fault in catalogue() if fault.id == "kda_recurrent.l2_eps_on_mean")
    assert ordered(fault)[0].sample.name == fault.first == "faint"
    assert len(ordered(fault)) == len({check.key for check in ordered(fault)})


def test_a_harmless_change_is_not_caught() -> None:
    harmless = Fault("renamed", "rms_norm", "Nothing is wrong", lambda right, args: right(args))
    outcome = SelfTest().one(harmless)
    assert not outcome.caught and outcome.found is None
    assert outcome.checks == len(ordered(harmless))


def test_a_right_provider_that_fails_is_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = next(fault for fault in catalogue() if fault.id == "sigmoid_gate.operands_swapped")
    wrong = broken.planted(base_of("sigmoid_gate"))
    monkeypatch.setattr("k3hal.conform.selftest.base_of", lambda op: wrong)
    test = SelfTest()
    list(test.run([Fault("twice", "sigmoid_gate", "Twice wrong", broken.mutant)]))
    swapped_back = SelfTest()
    list(swapped_back.run([Fault("once", "sigmoid_gate", "Wrong underneath", lambda right, args: right(args))]))
    assert swapped_back.false_alarms and not test.false_alarms


def test_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "selftest", "--fault", "embed.*"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == f"caught {len(out) - 1} of {len(faults_matching('embed.*'))} seeded faults"
    assert main(["conform", "selftest", "--fault", "embed.negative_id_wraps", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["faults"]
    assert row["caught"] and row["named_op"] == "embed" and row["case"].startswith("embed-negative_ids")


def test_a_fault_that_is_not_caught_fails_the_verb(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    harmless = Fault("harmless", "embed", "Nothing is wrong", lambda right, args: right(args))
    monkeypatch.setattr("k3hal.conform.selftest.catalogue", lambda: (harmless,))
    assert main(["conform", "selftest"]) == 1
    out = capsys.readouterr().out
    assert "NOT CAUGHT" in out and out.endswith("caught 0 of 1 seeded faults\n")


def test_an_unknown_fault_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no seeded fault matches 'no_such'"):
        faults_matching("no_such")


def test_weights_are_seen_as_the_operator_has_them() -> None:
    """A provider that lays weights out anew still gets a mutant's own weights."""
    operator = get_operator("linear_fp32")
    assert base_of("linear_fp32").prepare is not None
    seen = []
    fault = Fault("look", "linear_fp32", "Looks", lambda right, args: seen.append(args["weight"].dtype) or right(args))
    check = next(check for check in ordered(fault) if check.sample.dtype == "bfloat16")
    (result,) = run_checks(fault.planted(base_of("linear_fp32")), [check])
    assert result.ok and {str(dtype) for dtype in seen} == {"torch.bfloat16"}
    assert operator.weights == ("weight",)
