"""`k3hal model …` through the command line's own entry point."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3hal.cli import main

NORM = "language_model.model.norm.weight"


def _json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out)


def _patch_byte(folder: Path, name: str, value: int, *, at: int = 0) -> None:
    from k3hal.model.checkpoint import Checkpoint

    stored = Checkpoint.open(folder).tensors[name]
    with (folder / stored.shard).open("r+b") as file:
        file.seek(stored.offset + at)
        file.write(bytes([value]))


def test_init_inspect_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "model")
    assert main(["model", "init", "--preset", "nano", "--seed", "5", target, "--json"]) == 0
    made = _json(capsys)
    assert made["schema"] == "k3hal.model_init/1" and (made["preset"], made["seed"]) == ("nano", 5)
    assert main(["model", "inspect", target, "--json"]) == 0
    shown = _json(capsys)
    assert shown["schema"] == "k3hal.model_inspect/1"
    assert shown["total_size"] == made["total_size"] == sum(shown["bytes_by_dtype"].values())
    assert [layer["attention"] for layer in shown["layers"]] == ["kda"] * 3 + ["mla"] + ["kda"] * 2 + ["mla"] * 2
    assert [layer["layer"] for layer in shown["layers"] if layer["snapshot"]] == [0, 3, 6]
    assert [layer["layer"] for layer in shown["layers"] if layer["mlp"] == "dense"] == [0]
    assert main(["model", "verify", target, "--json"]) == 0
    verified = _json(capsys)
    assert verified["schema"] == "k3hal.model_verify/1" and verified["ok"] and verified["problems"] == []
    assert (verified["tensors"], verified["total_size"]) == (shown["tensors"], made["total_size"])
    assert verified["checksums"] > 4


def test_parameters_count_codes_not_bytes(micro_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "inspect", str(micro_dir), "--json"]) == 0
    shown = _json(capsys)
    stored = shown["bytes_by_dtype"]
    packed = 2 * 4 * 3 * 64 * 32 // 2  # layers, experts, matrices, latent, intermediate; two codes a byte
    padding = 2 * (128 - 2)
    assert shown["parameters"] == stored["BF16"] // 2 + stored["F32"] // 4 - padding + 2 * packed
    assert shown["parameters"] - shown["active_parameters"] == packed  # 2 of 4 experts


def test_human_output(micro_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "inspect", str(micro_dir)]) == 0
    text = capsys.readouterr().out
    assert "kimi_k3" in text and "MXFP4" in text and "layer 2       mla moe" in text
    assert main(["model", "verify", str(micro_dir)]) == 0
    assert "ok" in capsys.readouterr().out


def test_manifest(micro_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "manifest", str(micro_dir / "config.json"), "--json"]) == 0
    full = _json(capsys)
    assert full["schema"] == "k3hal.model_manifest/1"
    assert full["tensors"] == len(full["entries"])
    assert full["total_size"] == sum(entry["bytes"] for entry in full["entries"])
    assert {"name": NORM, "dtype": "BF16", "shape": [32], "bytes": 64} in full["entries"]
    assert main(["model", "manifest", str(micro_dir), "--json", "--summary"]) == 0
    assert _json(capsys) == {key: full[key] for key in ("schema", "tensors", "total_size")}
    assert main(["model", "manifest", str(micro_dir)]) == 0
    assert f"{full['tensors']} tensors, {full['total_size']} bytes" in capsys.readouterr().out


def test_manifest_of_the_published_config(
    shared_data: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "manifest", str(shared_data("kimi_k3_config.json")), "--json", "--summary"]) == 0
    totals = _json(capsys)
    assert (totals["tensors"], totals["total_size"]) == (497_220, 1_560_860_324_864)


def _nan_scale(folder: Path) -> None:
    _patch_byte(folder, "language_model.model.layers.1.block_sparse_moe.experts.2.w1.weight_scale", 255, at=3)


def _infinite_norm(folder: Path) -> None:
    _patch_byte(folder, NORM, 0x80, at=10)
    _patch_byte(folder, NORM, 0x7F, at=11)


def _nan_dt_bias(folder: Path) -> None:
    for at, value in ((6, 0xC0), (7, 0x7F)):
        _patch_byte(folder, "language_model.model.layers.0.self_attn.dt_bias", value, at=at)


def _wrong_total(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index | {"metadata": {"total_size": 1}}))


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "E8M0 NaN": (_nan_scale, "element 3 is the E8M0 code 255, NaN; expected finite values"),
    "infinite bf16": (
        _infinite_norm,
        f"tensor {NORM} in model-00001-of-00005.safetensors: element 5 is infinite or NaN",
    ),
    "NaN f32": (_nan_dt_bias, "self_attn.dt_bias in model-00003-of-00005.safetensors: element 1 is infinite or NaN"),
    "flipped code": (
        lambda d: _patch_byte(d, "language_model.lm_head.weight", 0x11),
        "has sha256 ",
    ),
    "total size": (_wrong_total, "declares total_size 1; the shards hold"),
    "lost file": (lambda d: (d / "tiktoken.model").unlink(), "tiktoken.model is missing; checksums.sha256 lists it"),
    "bad checksum line": (
        lambda d: (d / "checksums.sha256").write_text("ab  ../x\n"),
        "checksums.sha256 line 1 is 'ab  ../x'; expected '<sha256>  <file name>'",
    ),
    "lost shard": (
        lambda d: (d / "model-00002-of-00005.safetensors").unlink(),
        "shard model-00002-of-00005.safetensors is missing; expected to hold",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_verify_finds_damage(micro_dir: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage, message = DAMAGED[case]
    damage(micro_dir)
    assert main(["model", "verify", str(micro_dir), "--json"]) == 1
    result = _json(capsys)
    assert not result["ok"]
    assert any(message in problem for problem in result["problems"]), result["problems"]


def test_verify_without_checksums(micro_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (micro_dir / "checksums.sha256").unlink()
    assert main(["model", "verify", str(micro_dir)]) == 0
    assert "no checksums listed" in capsys.readouterr().out


def test_verify_checks_vision_tensors(
    write_micro: Callable[[dict[str, Any]], Path], vision_config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_micro({"vision_config": vision_config})
    assert main(["model", "verify", str(folder), "--json"]) == 0
    assert _json(capsys)["ok"]
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["vt_num_hidden_layers"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["model", "verify", str(folder), "--json"]) == 1
    assert (
        "tensor vision_tower.encoder.blocks.1.norm0.weight is missing; expected BF16 [8]" in _json(capsys)["problems"]
    )


REFUSED: dict[str, tuple[list[str], str]] = {
    "unknown preset": (
        ["init", "--preset", "huge", "DIR"],
        "no preset 'huge'; expected one of nano, tiny, kl-tiny, wide",
    ),
    "no preset": (["init", "DIR"], "Missing option '--preset'"),
    "occupied": (["init", "--preset", "nano", "OCCUPIED"], "is not empty (--force replaces the checkpoint in it)"),
    "bad seed": (["init", "--preset", "nano", "--seed", "-1", "DIR"], "seed -1 is out of range"),
    "inspect nothing": (["inspect", "DIR"], "is not a directory; expected a checkpoint"),
    "verify nothing": (["verify", "DIR"], "is not a directory; expected a checkpoint"),
    "manifest of nothing": (["manifest", "DIR/config.json"], "No such file or directory"),
    "no such verb": (["improve"], "No such command 'improve'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_line(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "notes.txt").touch()
    arguments, message = REFUSED[case]
    places = {"DIR": str(tmp_path / "dir"), "OCCUPIED": str(tmp_path / "occupied")}
    arguments = [places.get(a, a.replace("DIR/", f"{tmp_path}/")) for a in arguments]
    assert main(["model", *arguments]) == 4
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""
    assert not (tmp_path / "dir").exists()
