"""`conform cross-compile`: kernels for GPUs that are not here, held against what those have."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from k3hal.cli.app import app
from k3hal.conform.cross import run as runner
from k3hal.conform.cross.budgets import problems
from k3hal.conform.cross.calls import full_size_calls
from k3hal.conform.cross.compile import Compiled, Done, Job, jobs
from k3hal.conform.cross.figures import Figures
from k3hal.conform.cross.run import Report, table
from k3hal.conform.cross.targets import TARGETS
from k3hal.dispatch.describe import describe
from k3hal.dispatch.errors import BackendError
from k3hal.dispatch.packages import INSTALLED
from k3hal.dispatch.registry import default_registry, get_operator
from k3hal.dispatch.stand_in import stand_in, standing_in

ROOT = Path(__file__).parents[2]
with_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
FIGURES = Figures(registers=64, spilled=0, scratch=0, shared=1024, warps=4, matrix=("v_mfma",), narrow_dot=True)


def _made(target: str = "gfx950", decodes: bool = True, **figures: Any) -> Compiled:
    job = Job("mla_decode", "triton.split_kv", "default", target)
    return Compiled(job, "_attend", ("k3_small",), decodes, replace(FIGURES, **figures))


def _run(*words: str, seconds: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    command = [sys.executable, "-P", "-m", "k3hal.cli", "conform", "cross-compile", *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=seconds)


@with_triton
def test_kernels_of_decoding_fit_amd_and_nvidia(tmp_path: Path) -> None:
    target = [word for arch in ("gfx942", "gfx950", "sm_90") for word in ("--target", arch)]
    done = _run(*target, "--op", "[ls]*_[fg]*", "--jobs", "1", "--json", "--table", str(tmp_path / "table.md"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["schema"], report["broken"], report["failed"]) == ("k3hal.conform_cross/1", [], [])
    assert report["triton"] == INSTALLED["triton"]
    kernels = {(k["target"], k["kernel"]): k for k in report["kernels"]}
    assert {(t, "_linear_fp32") for t in ("gfx942", "gfx950", "sm_90")} <= set(kernels)
    assert {k["op"] for k in report["kernels"]} == {"linear_fp32", "sigmoid_gate"}
    for (arch, name), made in kernels.items():
        assert made["decodes"] and made["registers"] > 0 and made["scratch"] == made["spilled"] == 0
        matrix = "v_mfma" if arch.startswith("gfx") else "mma"
        assert any(matrix in one for one in made["matrix"]) == (name == "_linear_fp32"), made
    text = (tmp_path / "table.md").read_text("utf-8")
    assert "| operator | kernel | gfx942 | gfx950 | sm_90 |" in text and "| `linear_fp32` | `_linear_fp32` |" in text


@with_triton
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_kernel_fits_every_gpu() -> None:
    done = _run("--json", seconds=3000)
    report = json.loads(done.stdout)
    assert report["broken"] == [] and done.returncode == 0
    triton = {p.op for p in default_registry().providers if p.backend == "triton"}
    for arch in TARGETS:
        assert {k["op"] for k in report["kernels"] if k["target"] == arch} == triton, arch


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (_made(), None),
        (_made(shared=160 << 10), None),
        (_made(shared=(160 << 10) + 1), "takes 163841 bytes of shared memory, gfx950 has 163840"),
        (_made("gfx942", shared=(64 << 10) + 1), "gfx942 has 65536"),
        (_made(scratch=4, spilled=1), "spills 1 registers, 4 bytes a thread to memory; it decodes"),
        (_made(spilled=3), "spills 3 registers, 0 bytes a thread to memory; it decodes"),
        (_made("sm_90", scratch=8), "spills 8 bytes a thread"),
        (_made("sm_100", scratch=8), None),
        (_made(scaled_dot=True), "a product of an MX format with its scales, and none of v_mfma_scale"),
        (_made(scaled_dot=True, matrix=("v_mfma_f32", "v_mfma_scale_f32_16x16x128_f8f6f4")), None),
        (_made("sm_100", scaled_dot=True, matrix=("tcgen05.mma.kind::f16",)), "none of block_scale"),
        (_made("gfx942", scaled_dot=True), "and gfx942 has no instruction for it"),
        (_made("gfx942", scratch=8), "spills 8 bytes a thread"),
        (_made(decodes=False, scratch=1024, spilled=2), None),
        (_made(decodes=False, scratch=1028, spilled=2), "1028 bytes a thread to memory, at most 1024"),
        (_made(matrix=()), "has a product of narrow operands and none of v_mfma"),
        (_made(matrix=(), narrow_dot=False), None),
        (_made("sm_90", matrix=()), "none of wgmma.mma_async, mma.sync, tcgen05.mma"),
    ],
)
def test_a_budget_that_is_broken_is_named(made: Compiled, said: str | None) -> None:
    found = list(problems(made))
    assert found == [] if said is None else len(found) == 1 and said in found[0], found


def test_a_job_that_fails_is_a_broken_line() -> None:
    job = Job("mla_decode", "triton.split_kv", "heads32", "gfx950")
    report = Report((Done(job, problem="CompilationError: no"),), 1.0)
    assert report.broken == ["mla_decode, triton.split_kv:heads32 on gfx950: CompilationError: no"]
    assert report.to_json()["failed"][0]["problem"] == "CompilationError: no"


def test_the_table_has_the_most_of_every_kernel() -> None:
    several = (_made(registers=10, shared=2048), _made(registers=20, scratch=4), _made("sm_90", registers=30))
    lines = table([Done(several[0].job, several[:2]), Done(several[2].job, several[2:])])
    assert lines[0] == "| operator | kernel | gfx950 | sm_90 |"
    assert lines[2] == "| `mla_decode` | `_attend` | 20, 2 K, **4 B** | 30, 1 K |"


@pytest.mark.parametrize("op", ["linear_fp32", "moe_experts_a8w4", "mla_decode", "kda_prefill", "kda_decode"])
def test_full_size_calls_have_shapes_and_no_memory(op: str) -> None:
    found = list(full_size_calls(get_operator(op)))
    assert found and {s.sample.dtype for s in found} == {"bfloat16"}
    tensors = [value for shaped in found for value in shaped.args.values() if isinstance(value, torch.Tensor)]
    assert tensors and all(t.device.type == "meta" for t in tensors)
    assert all(s.decodes for s in found if s.sample.phase == "decode")
    assert not any(s.decodes for s in found if s.sample.phase == "prefill")


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_stands_for_a_machine_of_its_vendor(name: str) -> None:
    target = TARGETS[name]
    device = target.device({"triton": "3.9.0"})
    assert (device.vendor, device.arch, device.present) == (target.vendor, name, False)
    assert str(device.arch_number) == name.strip("gfxsm_")
    assert describe(target.machine).vendor == target.vendor
    with standing_in(target.stand_in):
        assert stand_in() == target.stand_in
        assert target.stand_in.properties["max_shared_mem"] == target.shared_memory
    assert stand_in() is None


@with_triton
def test_kernels_ask_the_machine_that_tensors_stand_for() -> None:
    from k3hal.backends.triton.kernels import programs

    meta, cpu = torch.device("meta"), torch.device("cpu")
    with pytest.raises(RuntimeError, match="no machine stands behind it"):
        programs.arch(meta)
    assert programs.arch(cpu) == "" and programs.shared_memory(cpu) == programs.INTERPRETED["max_shared_mem"]
    with standing_in(TARGETS["gfx942"].stand_in):
        for device in (meta, cpu):
            assert programs.is_amd(device) and programs.shared_memory(device) == 64 << 10
            assert programs.resident(device, 2) == 608


def test_every_triton_provider_has_a_job_for_every_target() -> None:
    found = jobs(tuple(TARGETS), lambda op: True, tactics=False)
    triton = [p for p in default_registry().providers if p.backend == "triton"]
    assert len(found) == len(set(found)) == len(triton) * len(TARGETS)
    some = jobs(("gfx950", "sm_90"), lambda op: op == "mla_decode", tactics=True)
    assert {"default", "rows16"} <= {j.tactic for j in some if j.target == "gfx950"}
    assert "upright" in {j.tactic for j in some if j.target == "sm_90"} - {j.tactic for j in some if "gfx" in j.target}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target", "gfx90"], "unknown architecture 'gfx90'"),
        (["--op", "mla_decod"], "no operator matches 'mla_decod'"),
        (["--jobs", "65"], "--jobs is 65"),
        (["--jobs", "-1"], "--jobs is -1"),
        (["--table", "/nowhere/table.md"], "--table /nowhere/table.md: no file can be there"),
        (["--table", "."], "--table .: no file can be there"),
    ],
)
def test_wrong_words_are_named(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["conform", "cross-compile", *words])
    text = str(done.exception) if done.exception and not isinstance(done.exception, SystemExit) else done.output
    assert said in text
    assert done.exit_code != 0


def test_a_process_that_dies_is_an_error_that_names_what_it_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_prepare", partial(os._exit, 1))
    job = Job("rms_norm", "triton.fused", "default", "gfx950")
    with pytest.raises(BackendError, match=r"while it compiled rms_norm, triton\.fused on gfx950"):
        runner.compile_all([job], 1, lambda done, total, op: None)


@with_triton
def test_an_operator_without_triton_kernels_and_the_interpreter_are_refused() -> None:
    done = _run("--op", "all_reduce")
    assert (done.returncode, "no operator that matches 'all_reduce' has a Triton provider" in done.stderr) == (2, True)
    done = _run("--op", "rms_norm", TRITON_INTERPRET="1")
    assert (done.returncode, "kernels are interpreted and not compiled" in done.stderr) == (4, True)
    assert "Traceback" not in done.stderr


def test_a_cache_that_cannot_be_written_is_refused_before_anything_is_compiled() -> None:
    done = _run("--op", "rms_norm", TRITON_CACHE_DIR="/dev/null/cache")
    assert done.returncode == 4 and done.stdout == "" and len(done.stderr.splitlines()) <= 2
    assert "Triton's cache /dev/null/cache cannot be written: Not a directory" in done.stderr
