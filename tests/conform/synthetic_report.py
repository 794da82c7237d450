"""Reports made from a seed, for the page's tests: any size, with or without failures, with hostile text."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k3hal.conform.policy import policy_classes
from k3hal.conform.result import CheckResult, ResultStatus, ShapeClass
from k3hal.debug.verdict import Status, TensorNumbers
from k3hal.dispatch.registry import get_operator, operator_names

SHAPES: tuple[ShapeClass, ...] = ("tiny", "edge", "adversarial", "k3")
DTYPES = ("float32", "bfloat16")
HOSTILE = "</script><img src=x onerror=\"window.broken='yes'\"><!-- {{data}} \u2028 & 'quoted' \U0001f600"
PROVIDERS = ("cpu.native", "cpu.library", "triton.fused", "nvidia.flashinfer")


def synthetic_report(
    checks: int = 400, *, failing: bool = True, seed: int = 0, providers: Sequence[str] = PROVIDERS, dirty: bool = False
) -> dict[str, Any]:
    """A report of about `checks` checks over all operators; its providers have two thirds of the operators each."""
    rng = random.Random(seed)
    pairs = [(op, provider) for op in operator_names() for provider in providers if rng.random() < 0.66]
    results = [_result(rng, *pairs[i % len(pairs)], i, failing) for i in range(checks)]
    return {
        "schema": "k3hal.conform/1",
        "statement": {
            "product": "k3hal",
            "version": "0.1.0",
            "commit": "9f3c1d2e7ab04c55e1f0a1b2c3d4e5f60718293a",
            "dirty": dirty,
            "created": "2026-11-30T01:00:00Z",
        },
        "device": {
            "device": "cuda",
            "title": "NVIDIA H200",
            "vendor": "nvidia",
            "arch": "sm_90",
            "memory_bytes": 150_754_820_096,
            "driver": "570.86.10",
            "system": "Linux 6.8.0",
        },
        "versions": {"python": "3.11.7", "torch": "2.13.0", "compiler": "g++ 12.2.0", "triton": "3.5.0"},
        "env": {"K3HAL_OPS": "linear=cpu.native", "NVIDIA_TF32_OVERRIDE": "0"},
        "selection": {"backend": None, "device": "cuda", "ops": "*", "quick": False, "large": True, "graphs": True},
        "must_pass": {"hash": "b1946ac92492d2347c6235b4d2611184", "count": checks},
        "policy": {"hash": "7d793037a0760186574b0282f2f435e7", "classes": policy_classes()},
        "providers": [_provider(op, provider, results) for op, provider in pairs],
        "checks": [result.to_json() for result in results],
        "end_to_end": [_end_to_end("nano", "float32", 1.0), _end_to_end("tiny", "bfloat16", 0.9921875)],
        "waivers": [_waiver("tf32-gate", True, "2026-12-24"), _waiver("old-tie-order", False, "2027-06-30")],
        "counts": dict(Counter(result.status for result in results)),
        "seconds": 143.2,
    }


def write_package(folder: Path, report: Any) -> Path:
    """A package folder that holds the report and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
    return folder


def hostile_report() -> dict[str, Any]:
    """A report in which whatever may be text is an attempt to break out of the page."""
    report = synthetic_report(3)
    mine = CheckResult(f"op{HOSTILE}", HOSTILE, HOSTILE, "tiny", HOSTILE, HOSTILE, "sample", "Fail", 0.1, (HOSTILE,))
    tensor = TensorNumbers(HOSTILE, HOSTILE, "Fail", problem=HOSTILE).to_json()
    check = mine.to_json() | {"tensors": [tensor], "case_file": f"cases/{HOSTILE}", "waiver": HOSTILE}
    check |= {"kind": f"invariant:{HOSTILE}"}
    refusal = {"dtype": HOSTILE, "phase": HOSTILE, "reasons": [HOSTILE], "cases": [HOSTILE]}
    provider = _provider(mine.op, mine.provider, []) | {"level": HOSTILE, "arch": HOSTILE, "refusals": [refusal]}
    waiver = dict.fromkeys(("id", "op", "provider", "case", "expires", "problem"), HOSTILE) | {"used": True}
    end = _end_to_end(HOSTILE, HOSTILE, 1.0) | {"status": HOSTILE, "plan": HOSTILE, "problem": HOSTILE}
    return report | {
        "statement": dict.fromkeys(report["statement"], HOSTILE) | {"dirty": True},
        "device": dict.fromkeys(report["device"], HOSTILE) | {HOSTILE: HOSTILE},
        "versions": {HOSTILE: HOSTILE},
        "env": {HOSTILE: [HOSTILE]},
        "selection": report["selection"] | dict.fromkeys(("backend", "device", "ops"), HOSTILE),
        "must_pass": {"hash": HOSTILE, "count": 3},
        "providers": [provider, *report["providers"]],
        "checks": [check, *report["checks"]],
        "end_to_end": [end],
        "waivers": [waiver | {"issue": f"javascript:window.broken='yes'//{HOSTILE}"}],
    }


def _result(rng: random.Random, op: str, provider: str, i: int, failing: bool) -> CheckResult:
    dtype, shape = DTYPES[i % 2], SHAPES[i // 2 % len(SHAPES)]
    draw = rng.random()
    status: ResultStatus = "Pass"
    if draw < 0.05:
        status = "QualityWarning"
    elif draw < 0.12:
        status = "NotSupported"
    elif draw < 0.13:
        status = "Waived"
    elif failing and draw < 0.15:
        status = rng.choice(["Fail", "Fail", "Fail", "Crash", "Timeout"])
    case = f"{op}-{shape}_{rng.choice((1, 7, 17, 64, 65))}x{rng.choice((128, 3584, 7168))}_{i}-{dtype}"
    kind = rng.choice(["sample", "sample", "invariant:batch", "invariant:split"])
    phase = rng.choice(["prefill", "decode", "verify"])
    problems = _problems(status)
    tensors = () if status in ("NotSupported", "Crash", "Timeout") else _tensors(rng, op, status)
    file = f"cases/{case}.k3case" if status in ("Fail", "Crash", "Timeout") else ""
    waiver = "tf32-gate" if status == "Waived" else ""
    seconds = rng.lognormvariate(-4, 1)
    return CheckResult(op, provider, dtype, shape, phase, case, kind, status, seconds, problems, tensors, file, waiver)


def _problems(status: ResultStatus) -> tuple[str, ...]:
    return {
        "NotSupported": ("needs K a multiple of 64, got 72",),
        "Crash": ("RuntimeError: an illegal memory access was encountered",),
        "Timeout": ("no answer within 60 s",),
    }.get(status, ())


def _tensors(rng: random.Random, op: str, status: ResultStatus) -> tuple[TensorNumbers, ...]:
    out = []
    for i, (name, tolerance) in enumerate(get_operator(op).outputs.items()):
        scale = {"fp32": 1e-7, "exact": 0.0, "kda_state": 1e-4}.get(tolerance, 0.0017)
        tensor = scale * rng.uniform(0.7, 1.3)
        mine: Status = "Pass"
        problem = ""
        if i == 0 and status in ("Fail", "Waived"):
            mine, tensor, problem = "Fail", tensor + 0.044, "slice 0.998 is above its cap 0.016"
        elif i == 0 and status == "QualityWarning":
            mine, tensor, problem = (
                "QualityWarning",
                tensor * 2.5,
                "tensor is 2.5 times the CPU provider's (or the floor)",
            )
        worst = 0.998 if mine == "Fail" else 1.6 * tensor
        peer = scale if rng.random() < 0.8 else None
        out.append(TensorNumbers(name, tolerance, mine, tensor, worst, 6 * tensor, peer, problem))
    return tuple(out)


def _provider(op: str, provider: str, results: Sequence[CheckResult]) -> dict[str, Any]:
    mine = [r for r in results if (r.op, r.provider) == (op, provider)]
    failed = any(r.status in ("Fail", "Crash", "Timeout") for r in mine)
    best = {"cpu": "E4", "triton": "E3", "nvidia": "E5"}.get(provider.split(".")[0], "E3")
    levels = []
    for dtype, shape in sorted({(r.dtype, r.shape_class) for r in mine}):
        these = [r for r in mine if (r.dtype, r.shape_class) == (dtype, shape) and r.status != "NotSupported"]
        numbers = [t for r in these for t in r.tensors]
        worst = {key: max((getattr(t, key) for t in numbers), default=0.0) for key in ("tensor", "slice", "peak")}
        passed = sum(r.ok for r in these)
        level = best if these and passed == len(these) else "E0"
        row = {"dtype": dtype, "shape_class": shape, "level": level, "passed": passed, "of": len(these)}
        levels.append(row | {"worst": worst | {"peer_ratio": 1.1}})
    level = "E0" if failed or not mine else best
    refusal = {
        "dtype": "bfloat16",
        "phase": "decode",
        "reasons": ["head_dim 256: at most 128"],
        "cases": [f"{op}-wide"],
    }
    names = {"op": op, "provider": provider, "backend": provider.split(".")[0], "arch": "sm_90"}
    names |= {"source_hash": "0c4a7f9e21d6b385", "level": level, "levels": levels, "not_applicable": []}
    return names | {"refusals": [refusal] if provider == "triton.fused" else [], "reference_only": False}


def _end_to_end(preset: str, dtype: str, top1: float) -> dict[str, Any]:
    numbers = {"top1": top1, "kl_mean": 1.3e-6, "kl_max": 2.2e-5, "rms": 0.00131}
    ran = [["linear", "cpu.native"], ["rms_norm", "cpu.rows"]]
    return {
        "preset": preset,
        "dtype": dtype,
        "variant": "choice 2" if dtype == "float32" else "default",
        **numbers,
        "status": "Pass",
        "problem": "",
        "ran": ran,
        "plan": "plan.json",
    }


def _waiver(name: str, used: bool, expires: str) -> dict[str, Any]:
    where = {"op": "moe_route", "provider": "nvidia.flashinfer", "case": "moe_route-*-float32"}
    return {
        "id": name,
        **where,
        "issue": "https://example.org/issues/17",
        "expires": expires,
        "used": used,
        "problem": "",
    }
