"""Checkpoints of msModelSlim's: what they must hold, how codes become weights, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from k3hal.cli import main
from k3hal.dispatch.errors import CheckpointError
from k3hal.dispatch.ops.moe_experts_int4 import int4_dequantize
from k3hal.model.checkpoint import Checkpoint
from k3hal.model.init import random_tensor
from k3hal.model.layout import SLIM_DESCRIPTION, SLIM_INDEX
from k3hal.model.manifest import expected_tensors
from k3hal.model.modelslim_reader import SlimReader, reader_of
from k3hal.model.reader import WeightReader

from ..modelslim_files import Change, stored, write_slim


@pytest.fixture(scope="module")
def slim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_slim(tmp_path_factory.mktemp("slim") / "model")


def test_every_weight_is_what_its_codes_are_worth(slim: Path) -> None:
    checkpoint, tensors = Checkpoint.open(slim), stored(slim)
    assert checkpoint.config.expert_format == "int4" and checkpoint.slim is not None
    seen = set[str]()
    with reader_of(checkpoint, "cpu", torch.float32) as reader:
        assert isinstance(reader, SlimReader)
        for name in checkpoint.specs:
            scale = tensors.get(name + "_scale")
            if ".experts." in name and scale is not None:
                pairs = torch.stack([tensors[name] << 4 >> 4, tensors[name] >> 4], dim=1)
                worth = pairs.flatten(0, 1).float() * scale
                rows, columns = worth.shape
                codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
                scales = torch.empty(rows, columns // 32)
                reader.fill_int4(codes, scales, name)
                assert torch.equal(int4_dequantize(codes, scales), worth)
                seen.add("int4")
            elif scale is not None:
                assert torch.equal(reader.get(name), tensors[name].float() * scale)
                seen.add("int8")
            elif not name.endswith(("_scale", "_offset", "scale_bias")):
                reader.get(name)
        reader.finish()
    assert seen == {"int4", "int8"}


def test_weights_are_those_of_the_published_layout_rounded(slim: Path) -> None:
    config = Checkpoint.open(slim).config
    plain = {spec.name: spec for spec in expected_tensors(config)}
    tensors = stored(slim)
    for suffix, most in (("q_proj.weight", 127), ("experts.3.w2.weight", 7)):
        name = next(name for name in plain if name.endswith(suffix))
        bits = torch.from_numpy(random_tensor(config, plain[name], 0).astype(np.int32))
        weight = (bits << 16).view(torch.float32).view(plain[name].shape)
        codes, scale = tensors[name], tensors[name + "_scale"]
        if most == 7:
            codes = torch.stack([codes << 4 >> 4, codes >> 4], dim=1).flatten(0, 1)
        assert torch.equal(codes.abs().amax(1), torch.full((codes.shape[0],), most, dtype=torch.int8))
        assert bool(((codes * scale - weight).abs() <= 0.501 * scale).all())
    name = next(name for name in tensors if name.endswith("experts.3.w2.scale_bias"))
    weight = name.removesuffix("scale_bias") + "weight"
    codes = torch.stack([tensors[weight] << 4 >> 4, tensors[weight] >> 4], dim=1).flatten(0, 1)
    worth = 8 * (codes.float() * tensors[weight + "_scale"]).sum(1)
    torch.testing.assert_close(tensors[name].sum(1), worth, rtol=1e-4, atol=1e-4)


def test_the_command_writes_the_layout_and_verify_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "slim"
    assert main(["model", "init", "--preset", "kl-tiny", "--layout", "modelslim", str(folder), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["layout"] == "modelslim" and made["total_size"] == sum(t.nbytes for t in stored(folder).values())
    assert main(["model", "verify", str(folder)]) == 0
    index = folder / SLIM_INDEX
    index.write_text(json.dumps(json.loads(index.read_text()) | {"metadata": {"total_size": 1}}))
    assert main(["model", "verify", str(folder)]) == 1
    assert f"{SLIM_INDEX} declares total_size 1" in capsys.readouterr().out


def test_verify_says_which_offset_is_not_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shift(tensors: dict[str, torch.Tensor], kinds: dict[str, Any]) -> None:
        tensors[_expert(tensors, "w1.weight_offset")][3] = 0.5

    assert main(["model", "verify", str(write_slim(tmp_path / "model", shift))]) == 1
    assert "w1.weight_offset in quant" in (said := capsys.readouterr().out)
    assert "element 3 is 0.5; expected zeros" in said


def test_an_index_without_its_description_is_named(tmp_path: Path) -> None:
    folder = write_slim(tmp_path / "model")
    (folder / SLIM_DESCRIPTION).unlink()
    with pytest.raises(CheckpointError, match=f"holds {SLIM_INDEX} and no {SLIM_DESCRIPTION}"):
        Checkpoint.open(folder)


def test_problems_name_the_index_that_is_there(tmp_path: Path) -> None:
    folder = write_slim(tmp_path / "model")
    index = json.loads((folder / SLIM_INDEX).read_text())
    del index["weight_map"][next(iter(index["weight_map"]))]
    (folder / SLIM_INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{SLIM_INDEX} puts it in no shard"):
        Checkpoint.open(folder)


def test_the_manifest_of_a_directory_is_of_its_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_slim(tmp_path / "model")
    assert main(["model", "manifest", str(folder), "--summary", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == len(stored(folder))


def test_a_layout_that_there_is_not_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "init", "--preset", "nano", "--layout", "slim", str(tmp_path / "x")]) == 4
    assert "no layout 'slim'; expected one of published, modelslim" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_plain_checkpoint_has_a_plain_reader(nano_dir: Path) -> None:
    checkpoint = Checkpoint.open(nano_dir)
    with reader_of(checkpoint, "cpu", torch.bfloat16) as reader:
        assert type(reader) is WeightReader and checkpoint.slim is None


def _expert(tensors: dict[str, torch.Tensor], suffix: str) -> str:
    return next(name for name in tensors if ".experts.0." in name and name.endswith(suffix))


def _kind(suffix: str, kind: str) -> Change:
    def change(tensors: dict[str, torch.Tensor], kinds: dict[str, Any]) -> None:
        kinds[next(name for name in kinds if name.endswith(suffix))] = kind

    return change


def _set(key: str, value: Any) -> Change:
    return lambda tensors, kinds: kinds.update({key: value})


def _without(suffix: str) -> Change:
    def change(tensors: dict[str, torch.Tensor], kinds: dict[str, Any]) -> None:
        del tensors[_expert(tensors, suffix)]

    return change


REFUSED: dict[str, tuple[Change, str]] = {
    "another version": (_set("version", "0"), r"version is '0'; expected '1\.0\.0'"),
    "groups": (_set("group_size", 256), "group_size is 256; expected 0, one scale a row"),
    "another kind": (_kind("w1.weight", "W8A16"), "w1.weight is 'W8A16'; expected FLOAT, W8A8_DYNAMIC or W4A8_DYNAMIC"),
    "a kind that is no word": (_kind("w1.weight", 3), "w1.weight is 3; expected FLOAT"),  # pyright: ignore[reportArgumentType]
    "int4 elsewhere": (_kind("o_proj.weight", "W4A8_DYNAMIC"), "expected W4A8_DYNAMIC for routed experts and"),
    "int8 experts": (_kind("w1.weight", "W8A8_DYNAMIC"), "expected W4A8_DYNAMIC for routed experts and"),
    "a norm as int8": (_kind("input_layernorm.weight", "W8A8_DYNAMIC"), r"expected FLOAT for BF16 \[128\]"),
    "no scale": (_without("w1.weight_scale"), r"w1.weight_scale is missing; expected F32 \[64, 1\]"),
    "no bias": (_without("w2.scale_bias"), r"w2.scale_bias is missing; expected F32 \[64, 16\]"),
    "codes of a float": (_kind("o_proj.weight", "FLOAT"), "o_proj.weight in .* is I8"),
    "a float among int4 experts": (_kind("w1.weight", "FLOAT"), "w1.weight FLOAT; expected W4A8_DYNAMIC for routed"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_as_described_is_refused(tmp_path: Path, what: str) -> None:
    change, problem = REFUSED[what]
    with pytest.raises(CheckpointError, match=problem):
        Checkpoint.open(write_slim(tmp_path / "model", change))


def test_weights_with_offsets_are_refused_when_they_are_read(tmp_path: Path) -> None:
    def shift(tensors: dict[str, torch.Tensor], kinds: dict[str, Any]) -> None:
        tensors[_expert(tensors, "w1.weight_offset")] += 1

    checkpoint = Checkpoint.open(write_slim(tmp_path / "model", shift))
    name = next(n for n in checkpoint.specs if n.endswith("experts.0.w1.weight"))
    with SlimReader(checkpoint, "cpu", torch.float32) as reader, pytest.raises(CheckpointError, match="has offsets"):
        reader.fill_int4(torch.empty(64, 32, dtype=torch.uint8), torch.empty(64, 2), name)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"version": "1.0.0"}'])
def test_a_broken_description_is_refused(tmp_path: Path, content: str) -> None:
    folder = write_slim(tmp_path / "model")
    (folder / SLIM_DESCRIPTION).write_text(content)
    with pytest.raises(CheckpointError, match=SLIM_DESCRIPTION):
        Checkpoint.open(folder)
