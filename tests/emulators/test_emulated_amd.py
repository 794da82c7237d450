"""AMD's machines emulated: the plan, judged as `k3hal conform run` does, and small models end to end."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3hal.conform.environment import is_emulated
from k3hal.conform.package import STATEMENT, read_report
from k3hal.conform.verify import verify
from k3hal.dispatch.emulated import EMULATED, emulated_machine
from k3hal.dispatch.errors import UnsupportedError, UsageError
from k3hal.dispatch.probe import probe

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
AITER = ",".join(f"{op}=amd.aiter" for op in ("mla_decode", "mla_prefill", "kda_decode", "kda_prefill", "rms_norm"))


def _run(*words: str, interpret: bool = True, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AITER_", "VLLM_", "TRITON_"))}
    path = os.pathsep.join(filter(None, (str(HERE), *sys.path)))
    env = {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **({"TRITON_INTERPRET": "1"} if interpret else {})}
    command = [sys.executable, "-P", *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=timeout)


def test_some_operators_of_an_emulated_machine_reach_e2_and_no_more(tmp_path: Path) -> None:
    out = tmp_path / "package"
    done = _run("ci/emulated.py", "mi355x", "--op", "[rs][mi][sl]*", "--out", str(out), "--jobs", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    report = read_report(out)
    assert is_emulated(report) and report["device"]["vendor"] == "amd" and report["device"]["arch"] == "gfx950"
    levels = {(one["op"], one["provider"]): one["level"] for one in report["providers"] if one["levels"]}
    assert levels == {
        ("rms_norm", "triton.fused"): "E2", ("rms_norm", "amd.aiter"): "E2", ("silu_and_mul", "triton.fused"): "E2",
    }  # fmt: skip
    assert "- emulated: its libraries are restated in torch" in (out / STATEMENT).read_text("utf-8")
    reasons = verify(out)
    assert not any("full-size samples" in reason or "its checks prove" in reason for reason in reasons), reasons


def test_the_plan_takes_the_machines_own_providers() -> None:
    code = (
        "import emulated_mi355x, json\n"
        "from k3hal.dispatch.call import Call\n"
        "from k3hal.dispatch.probe import probe\n"
        "from k3hal.dispatch.registry import default_registry\n"
        "from k3hal.dispatch.runtime import runtime_for\n"
        "from k3hal.dispatch.select import Selector\n"
        "from k3hal.backends.triton.kernels.programs import arch\n"
        "import torch\n"
        "machine = probe('emulated:mi355x')\n"
        "choose = Selector(default_registry(), (), 'warn').decide\n"
        "dims = {'head_dim': 128, 'kv_lora': 512, 'rope_dim': 64, 'heads': 12}\n"
        "ops = ('linear', 'linear_fp32', 'mla_decode', 'kda_decode')\n"
        "found = {op: choose(Call(op, machine, 'bfloat16', 'any', dims)).provider for op in ops}\n"
        "print(json.dumps([found, arch(torch.device('cpu')), type(runtime_for(machine)).__name__]))\n"
    )
    done = _run("-c", code)
    assert done.returncode == 0, done.stderr
    found, arch, runtime = json.loads(done.stdout)
    assert found == {
        "linear": "amd.torch", "linear_fp32": "triton.tiled", "mla_decode": "triton.split_kv",
        "kda_decode": "triton.fused",
    }  # fmt: skip
    assert (arch, runtime) == ("gfx950", "CpuRuntime")


def test_without_the_interpreter_triton_says_no() -> None:
    code = (
        "import emulated_mi300x\n"
        "from k3hal.dispatch.call import Call\n"
        "from k3hal.dispatch.probe import probe\n"
        "from k3hal.dispatch.registry import default_registry\n"
        "(one,) = [p for p in default_registry().of('embed') if p.backend == 'triton']\n"
        "print(one.answer(Call('embed', probe('emulated:mi300x'), 'bfloat16')))\n"
    )
    done = _run("-c", code, interpret=False)
    assert "needs Triton's interpreter: TRITON_INTERPRET=1" in done.stdout, done.stderr


@pytest.mark.parametrize("name", ["emulated:mi355x", "emulated:", "emulated:nothing"])
def test_a_machine_without_emulators_is_refused(name: str) -> None:
    for ask in (probe, emulated_machine):
        with pytest.raises(UnsupportedError, match="there are no emulators of"):
            ask(name)
    assert EMULATED not in probe("cpu").features
    with pytest.raises(UsageError, match="unknown device"):
        probe("emulate:mi355x")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: machine, --out"),
        (["mi355", "--out", "x"], "invalid choice: 'mi355'"),
        (["mi355x", "--out", "x", "--quick"], "unrecognized arguments: --quick"),
        (["mi355x", "--out", "x", "--jobs", "-1"], "-1 is not from 0 to 64"),
        (["mi355x", "--out", "x", "--jobs", "many"], "invalid processes value: 'many'"),
        (["mi355x", "--out", "{}", "--op", "mla_decod"], "no operator matches 'mla_decod'"),
    ],
)
def test_wrong_words_are_told_in_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    done = _run("ci/emulated.py", *(word.format(tmp_path / "out") for word in words))
    assert done.returncode == 4 and said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("stop", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_run_that_is_interrupted_ends_in_one_line(stop: str, code: int, tmp_path: Path) -> None:
    script = (
        "import runpy, signal, sys, time\n"
        "from k3hal.conform import run\n"
        f"run.run = lambda *_: [signal.raise_signal(signal.{stop}), time.sleep(60)]\n"
        f"sys.argv = ['emulated', 'mi355x', '--op', 'rms_norm', '--out', {str(tmp_path / 'out')!r}]\n"
        "runpy.run_path('ci/emulated.py', run_name='__main__')\n"
    )
    done = _run("-c", script)
    assert (done.returncode, done.stderr) == (code, "emulated: interrupted\n")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", ["mi300x", "mi355x"])
@pytest.mark.parametrize(("preset", "ops"), [("nano", ""), ("nano", AITER), ("kl-tiny", "")])
def test_a_model_gives_the_references_logits(machine: str, preset: str, ops: str) -> None:
    # What a machine has no kernels for, or kernels with a known fault.
    without = {"mi300x": ("mla_prefill", "kda_decode", "kda_prefill"), "mi355x": ("mla_decode",)}[machine]
    ops = ",".join(one for one in ops.split(",") if one.partition("=")[0] not in without)
    done = _run(str(HERE / "model_end_to_end.py"), machine, preset, ops, timeout=3500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["status"] == "Pass", found
    ran = {tuple(pair) for pair in found["ran"]}
    assert {name.partition(".")[0] for _, name in ran} <= {"amd", "triton", "composed"}
    assert all((op, "amd.aiter") in ran for op in (one.partition("=")[0] for one in ops.split(",") if one))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("machine", ["mi300x", "mi355x"])
def test_every_operator_of_an_emulated_machine_reaches_e2(tmp_path: Path, machine: str) -> None:
    done = _run("ci/emulated.py", machine, "--out", str(tmp_path / "package"), timeout=7000)
    assert done.returncode == 0, done.stdout + done.stderr
    report = read_report(tmp_path / "package")
    assert {one["level"] for one in report["providers"] if one["levels"]} == {"E2"}
