"""Plans for this machine: the probed accelerators, and `k3hal serve` started as printed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from k3hal.dispatch import probe
from k3hal.dispatch.device import DeviceDescription

from .conftest import Answer

Plan = Callable[[str], Answer]
ROOT = Path(__file__).resolve().parents[2]


def _gpu(index: int, title: str) -> DeviceDescription:
    return DeviceDescription(f"cuda:{index}", "nvidia", "sm_103", present=True, title=title)


CPU = DeviceDescription("cpu", "cpu", "x86_64", present=True, title="a processor")


def test_the_probed_machine(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    found = (*(_gpu(index, "NVIDIA B300 SXM6 AC") for index in range(8)), CPU)
    monkeypatch.setattr(probe, "present_devices", lambda: found)
    document = plan("--json").json
    assert document["hardware"]["id"] == "b300" and document["hardware"]["gpus"] == 8
    assert document["launches"] == plan("--hardware b300 --json").json["launches"]


def test_a_machine_with_fewer_accelerators(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "present_devices", lambda: (_gpu(0, "NVIDIA B300 SXM6 AC"), CPU))
    answer = plan("--json")
    assert answer.code == 2 and "a node has 1" in answer.err
    assert "k3hal plan --hardware b300 --strategy single_node_tp --nodes 1" in answer.err


@pytest.mark.parametrize("title", ["", "NVIDIA GeForce GT 710"])
def test_a_machine_of_no_recipe(title: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    found = (_gpu(0, title), CPU) if title else (CPU,)
    monkeypatch.setattr(probe, "present_devices", lambda: found)
    answer = plan("")
    assert answer.code == 2 and answer.err.count("\n") == 1
    assert (title or "without accelerators") in answer.err
    assert "ascend_910c, b200, b300, gb200, gb300, h100, h200, mi300x, mi325x, mi355x" in answer.err


def test_serve_starts_as_printed(plan: Plan, nano_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "present_devices", lambda: (CPU,))
    args = f"--for k3hal --model {nano_dir} --context 256 --concurrency 2 --set '--port 0' --json"
    document = plan(args).json
    (launch,) = document["launches"]
    expected = ["k3hal", "serve", str(nano_dir), "--device", "cpu", "--max-model-len", "256", "--max-num-seqs", "2"]
    assert launch["argv"] == [*expected, "--port", "0"]
    paths = [str(ROOT / path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = {**os.environ, **launch["env"], "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "k3hal", *launch["argv"][1:]]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert "serving nano on http://" in line, line
            address = line.split(" on ")[1].split()[0]
            with urllib.request.urlopen(f"{address}/ready", timeout=20) as answer:
                assert answer.status == 200
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
        finally:
            server.kill()


def test_serve_is_planned_for_one_device_of_another_machine(plan: Plan, nano_dir: Path) -> None:
    for hardware, device in (("h200", "cuda"), ("mi355x", "rocm"), ("ascend_910c", "npu")):
        argv = plan(f"--for k3hal --hardware {hardware} --model {nano_dir} --json").json["launches"][0]["argv"]
        assert argv == ["k3hal", "serve", str(nano_dir), "--device", device]


def test_a_device_of_this_machine_is_named_as_everywhere(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    found = (*(_gpu(index, "NVIDIA B300 SXM6 AC") for index in range(8)), CPU)
    monkeypatch.setattr(probe, "present_devices", lambda: found)
    monkeypatch.setattr(probe, "probe", lambda word: {"cuda": found[0], "cuda:1": found[1], "cpu": CPU}[word])
    assert plan("--hardware cuda --json").json["hardware"]["gpus"] == 8
    one = plan("--hardware cuda:1")
    assert one.code == 2 and "a node has 1" in one.err
    cpu = plan("--hardware cpu")
    assert cpu.code == 2 and "this is a CPU: no recipe is for it" in cpu.err


def test_a_processor_has_no_datasheet(plan: Plan, nano_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"timestamp": 1, "input_length": 8, "output_length": 8}\n' * 2)
    answer = plan(f"--for k3hal --hardware cpu --model {nano_dir} --workload trace:{tmp_path}/t.jsonl")
    assert answer.code == 2 and "the speed of cpu is not known" in answer.err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ("", 2, "weights alone do not fit"),
        ("--model MODEL --context 99999999", 2, "beyond the model's"),
        ("--model MODEL --context 4096 --concurrency 100000000", 2, "runs on one device"),
        ("--model MODEL --set '--max-model-length 8'", 4, "k3hal serve has no --max-model-length .did you mean"),
        ("--model MODEL --set '--max-model-len many'", 4, "max-model-len: .*many"),
        ("--model MODEL --set '--max-num-seqs 8' --set '--max-num-batched-tokens 4'", 4, "below max_num_seqs 8"),
        ("--model MODEL --set '--max-model-len 99999999'", 2, "beyond the model's"),
        ("--model MODEL --set '--memory-budget 0.001'", 2, "weights|missing"),
        ("--model MODEL --nodes 2", 4, "--nodes is about vLLM"),
        ("--model MODEL --strategy single_node_tp", 4, "--strategy is about vLLM"),
        ("--model MODEL --k8s", 4, "--k8s is about vLLM"),
        ("--model MODEL --set '--device cpu'", 4, "cannot give --device .use --hardware"),
        ("--model MODEL --set '--config x.yaml'", 4, "cannot give --config"),
        ("--model MODEL --set '--max-model-len'", 4, "its value is missing"),
        ("--model MODEL --set '--served-model-name a b'", 4, "takes one value"),
        ("--model MODEL --context 8192 --concurrency 100000000", 2, r"--concurrency \d+ --context 8192 fits"),
        ("--model MODEL --context 99999999", 2, "--context 131072"),
        (
            "--model MODEL --set '--memory-budget 0.014'",
            2,
            r"0\.0\d+ GB are missing.*serve a smaller checkpoint",
        ),
        ("--model nowhere", 4, "neither a directory nor"),
    ],
)
def test_what_serve_cannot_run(args: str, code: int, message: str, plan: Plan, nano_dir: Path) -> None:
    import re

    answer = plan("--for k3hal --hardware h200 " + args.replace("MODEL", str(nano_dir)))
    assert answer.code == code and re.search(message, answer.err), answer.err
