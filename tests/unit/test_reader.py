"""`WeightReader`: every tensor once, converted and owned, at little memory beyond the weights themselves."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from k3hal.errors import CheckpointError, K3HALError
from k3hal.model.checkpoint import Checkpoint
from k3hal.model.parallel import Shard
from k3hal.model.reader import WeightReader

AT = "language_model.model.layers.0.self_attn."


@pytest.fixture
def checkpoint(micro_dir: Path) -> Checkpoint:
    return Checkpoint.open(micro_dir)


def _reader(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> WeightReader:
    return WeightReader(checkpoint, "cpu", dtype)


def _theirs(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    with safe_open(checkpoint.path / checkpoint.tensors[name].shard, "pt") as file:
        return file.get_tensor(name).clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_as_the_safetensors_library_reads_it(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    done: list[int] = []
    with WeightReader(checkpoint, "cpu", dtype, done.append) as reader:
        for name, spec in checkpoint.specs.items():
            tensor = reader.get(name)
            theirs = _theirs(checkpoint, name)
            assert tensor.dtype == (dtype if spec.dtype == "BF16" else theirs.dtype)
            assert torch.equal(tensor, theirs.to(tensor.dtype))
        reader.finish()
    assert sum(done) == checkpoint.total_bytes


def test_a_tensor_outlives_the_files(checkpoint: Checkpoint) -> None:
    reader = _reader(checkpoint, torch.bfloat16)
    weight = reader.get(AT + "q_proj.weight")
    reader.close()
    for shard in checkpoint.shards:
        (checkpoint.path / shard).unlink()
    assert weight.abs().sum() > 0


def test_fill_part_of_a_fused_tensor(checkpoint: Checkpoint) -> None:
    fused = torch.full((3 * 64, 32), torch.nan)
    reader = _reader(checkpoint)
    for row, name in enumerate("qkv"):
        reader.fill(fused[row * 64 : (row + 1) * 64], f"{AT}{name}_proj.weight")
    expected = torch.cat([_theirs(checkpoint, f"{AT}{name}_proj.weight").float() for name in "qkv"])
    assert torch.equal(fused, expected)


def test_fill_reshapes_and_converts(checkpoint: Checkpoint) -> None:
    out = torch.empty(64, 4, dtype=torch.bfloat16)
    _reader(checkpoint).fill(out, AT + "q_conv1d.weight")
    assert torch.equal(out, _theirs(checkpoint, AT + "q_conv1d.weight").view(64, 4).bfloat16())


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_join_to_the_whole(checkpoint: Checkpoint, dim: int) -> None:
    name = AT + "o_proj.weight"
    parts = [_reader(checkpoint).get(name, shard=Shard(dim, rank, 4)) for rank in range(4)]
    assert torch.equal(torch.cat(parts, dim), _theirs(checkpoint, name).float())


def test_tensors_larger_than_a_block_are_whole(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3hal.model.reader._BLOCK_BYTES", 100)
    name = "language_model.model.embed_tokens.weight"
    assert torch.equal(_reader(checkpoint).get(name), _theirs(checkpoint, name).float())
    half = _reader(checkpoint).get(AT + "o_proj.weight", shard=Shard(1, 1, 2))
    assert torch.equal(half, _theirs(checkpoint, AT + "o_proj.weight")[:, 32:].float())


def test_a_misaligned_shard_is_read_right(checkpoint: Checkpoint) -> None:
    """Another writer need not pad its header to eight bytes."""
    name = AT + "q_conv1d.weight"
    expected = _theirs(checkpoint, name)
    shard = checkpoint.path / checkpoint.tensors[name].shard
    raw = shard.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    padded = raw[8 : 8 + length] + b" "
    shard.write_bytes(struct.pack("<Q", len(padded)) + padded + raw[8 + length :])
    reopened = Checkpoint.open(checkpoint.path)
    assert reopened.tensors[name].offset % 4 == 1
    assert torch.equal(_reader(reopened).get(name), expected)


def test_the_models_own_mistakes_are_caught(checkpoint: Checkpoint) -> None:
    reader = _reader(checkpoint)
    reader.get(AT + "A_log")
    with pytest.raises(K3HALError, match="A_log is loaded twice"):
        reader.get(AT + "A_log")
    with pytest.raises(K3HALError, match="asks for tensor nothing, which its config does not promise"):
        reader.get("nothing")
    with pytest.raises(K3HALError, match=r"of shape \[64\] cannot fill one of shape \[63\]"):
        reader.fill(torch.empty(63), AT + "dt_bias")
    with pytest.raises(K3HALError, match=r"\d+ tensors were never loaded, the first is language_model.model.embed"):
        reader.finish()


def test_an_uneven_split_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match="dimension 0 of size 64 cannot be split for rank 0 of 3"):
        _reader(checkpoint).get(AT + "dt_bias", shard=Shard(0, 0, 3))


def test_a_shard_that_shrinks_after_opening(checkpoint: Checkpoint) -> None:
    stored = checkpoint.tensors[AT + "q_proj.weight"]
    os.truncate(checkpoint.path / stored.shard, stored.offset + 1)
    with pytest.raises(CheckpointError, match=r"shrank to \d+ bytes since it was opened; expected tensor"):
        _reader(checkpoint).get(stored.name)


def test_a_shard_that_vanishes_after_opening(checkpoint: Checkpoint) -> None:
    stored = checkpoint.tensors[AT + "q_proj.weight"]
    (checkpoint.path / stored.shard).unlink()
    with pytest.raises(CheckpointError, match=r"cannot map shard .*: No such file"):
        _reader(checkpoint).get(stored.name)
