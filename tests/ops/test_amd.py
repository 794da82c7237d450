"""AMD's machines: what their plan binds, and AMD's own providers, whose torch calls mean the same on a CPU."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from k3hal.cli.app import app
from k3hal.debug.case import sample_case, samples_of
from k3hal.debug.check import check
from k3hal.debug.target import Target
from k3hal.dispatch.call import Call
from k3hal.dispatch.describe import describe
from k3hal.dispatch.operator import Sample
from k3hal.dispatch.provider import Provider
from k3hal.dispatch.registry import default_registry, get_operator

from .interpreter import found_wrong

MACHINES = ("mi300x", "mi325x", "mi355x")
PRODUCTS = ("linear", "linear_fp32")


def _provider(op: str, name: str) -> Provider:
    return next(p for p in default_registry().of(op) if p.id == name)


def _everything_bound(entry: dict[str, Any]) -> Iterator[str]:
    yield entry["provider"]
    for part in entry.get("parts", {}).values():
        yield from _everything_bound(part)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kv", [(), ("--kv-cache-dtype", "fp8")], ids=["bf16", "fp8"])
def test_full_size_k3_runs_no_reference(machine: str, kv: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, ["op", "plan", "--device", machine, "--fallback", "strict", "--json", *kv])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert {"kda_decode", "mla_decode", "latent_moe", "linear", "linear_fp32"} <= {e["op"] for e in plan["entries"]}
    for entry in plan["entries"]:
        assert not entry["reference"], entry
        assert entry["reasons"], entry
        assert {name.partition(".")[0] for name in _everything_bound(entry)} <= {"amd", "triton", "composed"}


@pytest.mark.parametrize(
    ("op", "sample"),
    [
        pytest.param(op, sample, id=f"{op}-{sample.name}-{sample.dtype}")
        for op in PRODUCTS
        for sample in samples_of(get_operator(op), tags=("tiny", "edge", "adversarial"))
        if op == "linear" or sample.dtype == "float32"
    ],
)
def test_products_by_torch_are_the_operators(op: str, sample: Sample) -> None:
    case = sample_case(get_operator(op), sample)
    verdict = check(case, Target.of(_provider(op, "amd.torch")))
    assert verdict.ok, verdict.reasons


def test_tf32_is_off_within_an_fp32_product_and_as_it_was_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    matmul = torch.backends.cuda.matmul

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(matmul.allow_tf32)
        raise RuntimeError("as of a library")

    monkeypatch.setattr("k3hal.backends.amd.linear.library", product)
    x, before = torch.ones(1, 1), matmul.allow_tf32
    try:
        for allowed in (True, False):
            matmul.allow_tf32 = allowed
            with pytest.raises(RuntimeError, match="as of a library"):
                _provider("linear", "amd.torch").fn(x, x)
            assert matmul.allow_tf32 is allowed
    finally:
        matmul.allow_tf32 = before
    assert seen == [False, False]


@pytest.mark.parametrize("machine", MACHINES)
def test_a_bf16_product_with_an_fp32_result_is_none_of_torchs_on_rocm(machine: str) -> None:
    said = _provider("linear_fp32", "amd.torch").answer(Call("linear_fp32", describe(machine), "bfloat16"))
    assert "torch on ROCm has no product of bfloat16 with an fp32 result" in getattr(said, "reasons", ())
    assert _provider("linear_fp32", "amd.torch").answer(Call("linear_fp32", describe(machine), "float32"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_products_with_an_fp32_result_are_right_under_the_interpreter() -> None:
    names = ("one_row", "no_rows", "odd", "row_strided")
    checks = [("linear_fp32", "triton.tiled", name, dtype, "") for name in names for dtype in ("float32", "bfloat16")]
    # Its depth is split among programs.
    split = [
        ("linear_fp32", p, "k3_depth", "bfloat16", i)
        for p in ("triton.tiled", "triton.tiled:m64_n64")
        for i in ("", "batch")
    ]
    assert found_wrong([*checks, *split]) == []


@pytest.mark.parametrize("machine", MACHINES)
def test_the_runtime_is_the_one_of_torchs_gpus(machine: str) -> None:
    backend = default_registry().backends["amd"]
    assert (backend.vendors, backend.runtime) == (("amd",), default_registry().backends["nvidia"].runtime)
    assert describe(machine).vendor in backend.vendors
