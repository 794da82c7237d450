"""`bisect` names a planted fault's operator, layer, phase and part, and leaves a case of it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from k3hal.cli import main
from k3hal.debug.bisect import Finding, differ, save_finding
from k3hal.debug.case_file import load_case
from k3hal.debug.check import check
from k3hal.debug.live import LiveModel
from k3hal.debug.target import Target
from k3hal.dispatch import registry as registries
from k3hal.dispatch.errors import UsageError
from k3hal.dispatch.observe import observing
from k3hal.dispatch.registry import Registry, default_registry
from k3hal.model.write import write_preset

from .faults import Fault

TOKENS = list(range(300, 318))


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models") / "nano"
    write_preset("nano", target)
    return target


def _find(model: Path, fault: Fault, tokens: list[int] = TOKENS, bad: str = "current") -> Finding | None:
    with observing(fault):
        live = LiveModel(str(model), "reference", bad, device="cpu", dtype="float32", memory_budget=1.0)
    try:
        return live.bisection(tokens, 3).find()
    finally:
        live.close()


def _scaled_head(out: torch.Tensor) -> torch.Tensor:
    out = out.clone()
    out[..., : out.shape[-1] // 2] *= 1.1
    return out


def _off(out: torch.Tensor) -> torch.Tensor:
    return out * 1.2


@pytest.mark.parametrize(
    ("op", "layer", "change", "stages", "part"),
    [
        ("kda_decode", 4, _scaled_head, ("decode",), ""),
        ("latent_moe", 5, _off, ("prefill", "decode"), ""),
        ("gated_rms_norm", 1, _off, ("prefill",), "kda_prefill"),
    ],
)
def test_a_planted_fault_is_named_with_its_layer_and_phase(
    nano: Path, tmp_path: Path, op: str, layer: int, change: Callable[..., Any], stages: tuple[str, ...], part: str
) -> None:
    found = _find(nano, Fault(op, layer, change), bad=f"{part}=composed" if part else "current")
    assert found is not None
    assert (found.op, found.layer, found.stages) == (part or op, layer, stages)
    assert found.parts == ((op,) if part else ())
    assert found.verdict is not None and found.verdict.status == "Fail"
    assert found.position == (len(TOKENS) - 3 if stages == ("decode",) else 0)
    path = save_finding(found, tmp_path)
    assert path is not None
    case = load_case(path)
    assert (case.op, case.origin["layer"]) == (found.op, layer)


def test_without_a_fault_there_is_nothing_to_find(nano: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (nano.parent / "prompt.json").write_text(json.dumps(TOKENS[:8]))
    command = ["op", "bisect", str(nano), "--prompt", str(nano.parent / "prompt.json"), "--device", "cpu", "--json"]
    assert main(command) == 0
    out, _ = capsys.readouterr()
    assert json.loads(out) == {"schema": "k3hal.op_bisect/1", "diverges": False, "finding": None, "file": None}


def test_the_verb_names_the_fault(nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt.txt").write_text("a few words to run")
    options = [
        "--prompt",
        str(tmp_path / "prompt.txt"),
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--save",
        str(tmp_path),
    ]
    with observing(Fault("sigmoid_gate", 6, _off)):
        code = main(["op", "bisect", str(nano), *options])
    out, _ = capsys.readouterr()
    assert code == 1
    assert out.startswith("sigmoid_gate in layer 6: cpu.")
    assert load_case(tmp_path / "bisect-sigmoid_gate-layer6.k3case").op == "sigmoid_gate"


def test_what_is_not_finite_differs() -> None:
    good = torch.ones(3, 4)
    bad = good.clone()
    bad[1, 2] = torch.nan
    assert differ(bad, good, 1e-3) == (float("inf"), 1)
    assert differ(good, good, 1e-3) == (0.0, -1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--prompt", "none.txt"), "cannot read none.txt"),
        ((), "no --prompt"),
        (("--prompt", "none.txt", "--axis", "colour"), "--axis is 'colour'"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str) -> None:
    assert main(["op", "bisect", *args]) == 4
    _, err = capsys.readouterr()
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_prompt_that_does_not_fit_is_refused(nano: Path) -> None:
    live = LiveModel(str(nano), "reference", "current", device="cpu", memory_budget=1.0)
    with pytest.raises(UsageError, match="the prompt has 0 tokens"):
        live.bisection([], 0)
    with pytest.raises(UsageError, match="a token id of the prompt"):
        live.bisection([-1], 0)
    live.close()


@pytest.mark.nightly
def test_tiny_in_under_two_minutes(tmp_path: Path) -> None:
    write_preset("tiny", tmp_path / "tiny")
    begun = time.monotonic()
    found = _find(tmp_path / "tiny", Fault("kda_decode", 9, _scaled_head), list(range(300, 332)))
    assert found is not None
    assert (found.op, found.layer) == ("kda_decode", 9)
    assert time.monotonic() - begun < 120


def _wrong_on_the_right(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    out = x * torch.sigmoid(gate)
    out[..., out.shape[-1] // 2 :] = 0
    return out


def _right(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


def test_a_planted_wrong_tactic_is_found_on_the_tactic_axis(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = default_registry()
    planted = {"tiles": _right, "wide_tiles": _wrong_on_the_right}
    providers = [dataclasses.replace(p, tactics=planted) if p.op == "sigmoid_gate" else p for p in there.providers]
    monkeypatch.setattr(registries, "_default", [Registry(dict(there.backends), providers)])
    (tmp_path / "prompt.json").write_text(json.dumps(TOKENS[:10]))
    options = ["--prompt", str(tmp_path / "prompt.json"), "--device", "cpu", "--dtype", "float32"]
    command = ["op", "bisect", str(nano), *options, "--save", str(tmp_path), "--json"]
    assert main([*command, "--axis", "tactic", "--axis", "layer", "--axis", "phase"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["finding"]["op"], found["finding"]["layer"]) == ("sigmoid_gate", 3)
    assert found["finding"]["tactic"] == "wide_tiles"
    assert found["finding"]["provider"].endswith(":wide_tiles")
    assert found["finding"]["stages"] == ["prefill", "decode"]
    case = load_case(Path(found["file"]))
    for name, ok in (("tiles", True), ("wide_tiles", False)):
        assert check(case, Target("sigmoid_gate", name, planted[name])).ok == ok
    planted["wide_tiles"] = _right
    assert main([*command, "--axis", "tactic"]) == 0
    assert json.loads(capsys.readouterr().out)["diverges"] is False


def test_without_tactics_the_axis_is_refused(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.json").write_text(json.dumps(TOKENS[:3]))
    options = ["--prompt", str(tmp_path / "prompt.json"), "--device", "cpu", "--axis", "tactic"]
    assert main(["op", "bisect", str(nano), *options, "--bad", "reference"]) == 2
    assert "no provider on the bad side has tactics" in capsys.readouterr().err
