"""`check` passes what is right and names what is wrong: values, memory, contract, repetition."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from k3hal.debug.case import Case, sample_cases
from k3hal.debug.check import check
from k3hal.debug.golden import golden
from k3hal.debug.memory import GuardedCopy, PoisonedEmpty, byte_span, same_bytes
from k3hal.debug.target import Target, find_target, peer_of
from k3hal.debug.verdict import Verdict, exit_code
from k3hal.dispatch.call import Call
from k3hal.dispatch.describe import describe
from k3hal.dispatch.errors import DispatchError, UsageError
from k3hal.dispatch.ops.rms_norm import rms_norm
from k3hal.dispatch.probe import probe
from k3hal.dispatch.registry import default_registry, get_operator, operator_names
from k3hal.dispatch.tolerance import compare

MakeCase = Callable[..., Case]
_counter = itertools.count()


@pytest.mark.parametrize("op", operator_names())
def test_reference_and_cpu_provider_pass_their_first_samples(op: str) -> None:
    operator, cpu = get_operator(op), probe("cpu")
    small = (case for case in sample_cases(operator) if case.nbytes < 2e6)
    for case in itertools.islice(small, 2):
        call = Call(op, cpu, case.dtype, case.phase, case.dims)
        claimed = [p for p in default_registry().of(op) if p.backend == "cpu" and p.answer(call)]
        for target in (Target.reference(operator), *map(Target.of, claimed)):
            verdict = check(case, target, peer=peer_of(case, target, cpu))
            assert verdict.ok, verdict


def test_golden_is_computed_in_fp64(case_of: MakeCase) -> None:
    case = case_of("rms_norm", "plain", "float32")
    out = golden(get_operator("rms_norm"), case.args)["out"]
    x, weight = case.args["x"].double(), case.args["weight"].double()
    if case.args["residual"] is not None:
        x = (case.args["x"] + case.args["residual"]).double()
    exact = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + case.args["eps"]) * weight
    assert out.dtype is torch.float64
    assert float((out - exact).abs().max()) < 1e-12


def _target(fn: Callable[..., Any], **changes: Any) -> Target:
    return replace(Target.reference(get_operator("rms_norm")), id="mutant", fn=fn, **changes)


def _wrong_column(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    out = rms_norm(x, weight, eps, residual)
    out[:, -1] = 0
    return out


def _unwritten_column(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    out = torch.empty_like(x)
    out[:, 1:] = rms_norm(x, weight, eps, residual)[:, 1:]
    return out


def _writes_weight(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    out = rms_norm(x, weight, eps, residual)
    weight[0] += 1
    return out


def _writes_past_the_end(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    weight.as_strided((1,), (1,), weight.storage_offset() + weight.numel()).zero_()
    return rms_norm(x, weight, eps, residual)


def _returns_its_input(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    return x


def _raises(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    raise RuntimeError("no kernel image")


def _other_dtype(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    return rms_norm(x, weight, eps, residual).double()


def _transposed(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    return rms_norm(x, weight, eps, residual).t().contiguous().t()


def _two_values(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Any:
    return rms_norm(x, weight, eps, residual), x


def _one_in_a_tuple(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Any:
    return (rms_norm(x, weight, eps, residual),)


def _one_in_a_list(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Any:
    return [rms_norm(x, weight, eps, residual)]


def _requires_grad(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    return rms_norm(x, weight, eps, residual).requires_grad_()


def _exits(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    sys.exit(0)


def _interrupts(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    raise KeyboardInterrupt


def _racy(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    return rms_norm(x, weight, eps, residual) * (1 + 1e-7 * (next(_counter) % 2))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (_wrong_column, "out: slice|out: tensor|out: peak"),
        (_unwritten_column, "out: non-finite values differ"),
        (_writes_weight, "argument weight was modified"),
        (_writes_past_the_end, "bytes just after weight were written"),
        (_returns_its_input, "out lies in the memory of x"),
        (_raises, "raised RuntimeError: no kernel image"),
        (_other_dtype, "out: dtype torch.float64, the contract says torch.float32"),
        (_two_values, "returned 2 values, the contract has 1"),
        (_racy, "two runs differ in out"),
        (_one_in_a_tuple, "returned a tuple of 1, the contract has the tensor itself"),
        (_one_in_a_list, "returned list for out, not a tensor"),
        (_requires_grad, "out requires grad"),
        (_exits, "raised SystemExit: 0"),
        (_interrupts, "raised KeyboardInterrupt"),
    ],
)
def test_a_fault_fails_with_its_reason(case_of: MakeCase, fault: Callable[..., Any], reason: str) -> None:
    verdict = check(case_of("rms_norm", "plain", "float32"), _target(fault))
    assert verdict.status == "Fail"
    assert any(word in text for text in verdict.reasons for word in reason.split("|")), verdict.reasons


def test_a_failure_says_where_the_error_is_largest(case_of: MakeCase) -> None:
    def one_off(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
        out = rms_norm(x, weight, eps, residual)
        out[1, 2] = 77.0
        return out

    (reason,) = check(case_of("rms_norm", "plain", "float32"), _target(one_off)).reasons
    assert "at [1, 2] it is 77 for " in reason
    (reason,) = check(case_of("rms_norm", "plain", "float32"), _target(_unwritten_column)).reasons
    assert re.search(r"; at \[\d+, \d+\] it is nan for ", reason)


def test_an_output_that_is_not_contiguous_fails(case_of: MakeCase) -> None:
    verdict = check(case_of("rms_norm", "plain", "float32"), _target(_transposed))
    assert (verdict.status, verdict.reasons) == ("Fail", ("out is not contiguous",))


def test_a_provider_that_is_declared_nondeterministic_may_differ(case_of: MakeCase) -> None:
    assert check(case_of("rms_norm", "plain", "float32"), _target(_racy, deterministic=False)).ok


def test_peer_ratio_and_floor_catch_what_the_cap_lets_through(case_of: MakeCase) -> None:
    def noisy(size: float) -> Target:
        def fn(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
            return rms_norm(x, weight, eps, residual) * (1 + size)

        return _target(fn)

    case, peer = case_of("rms_norm", "plain", "float32"), Target.reference(get_operator("rms_norm"))
    for given in (peer, None):  # without a peer the floor judges
        found = [check(case, noisy(size), peer=given).status for size in (2e-6, 4e-6, 7e-6)]
        assert found == ["Pass", "QualityWarning", "Fail"]
    # The cap sees what a peer that is as wrong does not.
    assert check(case, noisy(9e-6), peer=noisy(9e-6)).status == "Pass"
    assert check(case, noisy(1.1e-5), peer=noisy(1.1e-5)).status == "Fail"


def test_copies_keep_strides_offsets_and_shared_memory() -> None:
    arena = torch.arange(64, dtype=torch.float32)
    args = {"a": arena[3:].as_strided((2, 3), (8, 1)), "b": arena[20:28], "c": torch.zeros(4), "n": 3}
    copy = GuardedCopy(args)
    a, b = copy.args["a"], copy.args["b"]
    assert (a.stride(), copy.args["n"]) == ((8, 1), 3)
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert byte_span(b)[0] - byte_span(a)[0] == byte_span(args["b"])[0] - byte_span(args["a"])[0]
    assert a.data_ptr() % 64 == args["a"].data_ptr() % 64
    assert same_bytes(a, args["a"])
    a[0, 0] = 7
    assert copy.problems(["a"]) == []
    assert copy.problems([]) == ["argument a was modified"]
    a.as_strided((1,), (1,), a.storage_offset() + 4).fill_(1)
    (problem,) = copy.problems(["a"])
    assert problem.endswith("bytes between the rows of a/b were written")
    assert arena[3] == 3


def test_targets_are_found_by_every_name_and_refused_with_reasons(case_of: MakeCase) -> None:
    case, cpu = case_of("kda_decode", "one", "float32"), probe("cpu")
    provider = next(p for p in default_registry().of("kda_decode") if p.answer(case.call(cpu)))
    for name in (provider.id, provider.name, provider.backend, "current"):
        assert find_target(case, name, cpu).id == provider.id
    assert find_target(case, "composed", cpu).fn is not provider.fn
    assert find_target(case, "reference", cpu).fn is get_operator("kda_decode").reference
    with pytest.raises(UsageError, match="no provider is called 'cpuu'"):
        find_target(case, "cpuu", cpu)
    with pytest.raises(DispatchError, match="needs vendor cpu, this is nvidia"):
        find_target(case, provider.id, describe("h100"))


def test_verdict_survives_json(case_of: MakeCase) -> None:
    verdict = check(case_of("rms_norm", "plain", "float32"), _target(_unwritten_column))
    back = Verdict.from_json(verdict.to_json())
    assert back == verdict
    assert math.isinf(back.tensors[0].tensor)


def test_exit_codes() -> None:
    assert [exit_code([s]) for s in ("Pass", "QualityWarning", "NotSupported", "Fail", "Crash", "Timeout")] == [
        0, 0, 2, 1, 3, 3,
    ]  # fmt: skip
    assert exit_code(["Pass", "NotSupported"]) == 0
    assert exit_code(["Fail", "Crash"]) == 3


@pytest.mark.parametrize(
    "allocate",
    [
        lambda x: torch.empty(3, 4),
        torch.empty_like,
        lambda x: x.new_empty(5),
        lambda x: torch.empty_strided((2, 2), (2, 1)),
        lambda x: torch.empty(4, dtype=torch.float8_e4m3fn).float(),
    ],
)
def test_uninitialised_memory_is_poisoned(allocate: Callable[[Tensor], Tensor]) -> None:
    with PoisonedEmpty():
        assert bool(allocate(torch.zeros(4)).isnan().all())
        assert int(torch.empty(1, dtype=torch.int32)) == 2**31 - 1


def test_a_result_in_memory_that_the_next_call_writes_to_is_found(case_of: MakeCase) -> None:
    case, space = case_of("rms_norm", "plain", "float32"), torch.empty(5, 48)
    target = replace(Target.reference(get_operator("rms_norm")), fn=lambda **args: space.copy_(rms_norm(**args)))
    assert check(case, target).problems == ("out lies where the next call writes its own",)
    assert check(case, target, repeat=False).ok


def test_nan_is_not_infinity_and_infinity_has_a_sign() -> None:
    golden_of = torch.tensor([1.0, math.nan, math.inf, 2.0])
    assert not compare(golden_of.clone(), golden_of).problem
    for odd in ([1.0, math.inf, math.inf, 2.0], [1.0, math.nan, -math.inf, 2.0], [1.0, math.nan, math.nan, 2.0]):
        assert "NaN and the infinities differ" in compare(torch.tensor(odd), golden_of).problem


@pytest.mark.parametrize("shape", [(1, 1), (1,), (), (0, 4), (2, 3)])
def test_one_element_of_any_stride_is_compared(shape: tuple[int, ...]) -> None:
    odd = torch.empty_strided(shape, [3 * (i + 1) for i in range(len(shape))]).fill_(2.5)
    assert compare(odd, odd.clone().contiguous()) == compare(odd, odd)
    assert compare(odd, odd).peak == 0.0
    if odd.numel():
        assert compare(odd, odd + 1).peak > 0


def test_without_a_cpu_provider_the_reference_is_the_peer(case_of: MakeCase) -> None:
    case, cpu = case_of("kda_verify", "one_token", "float32"), probe("cpu")
    target = replace(Target.reference(get_operator("kda_verify")), id="vendor.fused")
    peer = peer_of(case, target, cpu)
    assert peer is not None and peer.id == "reference"
    assert peer_of(case, peer, cpu) is None
