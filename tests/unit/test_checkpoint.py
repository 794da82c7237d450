"""`Checkpoint.open`: what is wrong with a directory is named, with what was expected, before weights are read."""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from k3hal.errors import CheckpointError, ConfigError
from k3hal.model.checkpoint import Checkpoint
from k3hal.model.config import ModelConfig
from k3hal.model.manifest import expected_tensors
from k3hal.model.presets import preset_config
from k3hal.model.safetensors_io import MAX_HEADER_BYTES, read_header
from k3hal.model.write import write_checkpoint

INDEX = "model.safetensors.index.json"
NORM = "language_model.model.norm.weight"
A_LOG = "language_model.model.layers.0.self_attn.A_log"


def _shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def _edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def _edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def _edit_header(shard: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a shard's header and leave its data as they are."""
    raw = shard.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    shard.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def _entry(folder: Path, name: str, **changes: Any) -> None:
    _edit_header(_shard_of(folder, name), lambda header: header[name].update(changes))


def _truncate(path: Path, size: int) -> None:
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def _rename_tensor(folder: Path, old: str, new: str) -> None:
    _edit_header(_shard_of(folder, old), lambda header: header.update({new: header.pop(old)}))
    _edit_index(folder, lambda index: index["weight_map"].update({new: index["weight_map"].pop(old)}))


def _first_entries_overlap(folder: Path) -> None:
    def shift(header: dict[str, Any]) -> None:
        header[NORM]["data_offsets"] = [offset - 2 for offset in header[NORM]["data_offsets"]]

    _edit_header(_shard_of(folder, NORM), shift)


def _duplicate_key(folder: Path) -> None:
    text = b'{"x": {}, "x": {}}'
    _shard_of(folder, NORM).write_bytes(struct.pack("<Q", len(text)) + text)


def _raw_shard(content: bytes) -> Callable[[Path], object]:
    return lambda folder: _shard_of(folder, NORM).write_bytes(content)


def _point(shard: object) -> Callable[[Path], object]:
    return lambda folder: _edit_index(folder, lambda index: index["weight_map"].update({NORM: shard}))


def _same_tensor_twice(folder: Path) -> None:
    """One tensor of the first shard also stands in the last."""
    first = read_header(_shard_of(folder, NORM))[0].name
    last = sorted(folder.glob("*.safetensors"))[-1]
    victim = next(t.name for t in read_header(last) if len(t.shape) == 2)
    _edit_header(last, lambda header: header.update({first: header.pop(victim)}))


MALFORMED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), r"holds no config.json; expected a checkpoint directory"),
    "no index": (lambda d: (d / INDEX).unlink(), r"holds neither model.safetensors.index.json nor model.safetensors"),
    "index not json": (lambda d: (d / INDEX).write_text("{"), r"index.json is not valid JSON"),
    "index without map": (lambda d: (d / INDEX).write_text("{}"), r"weight_map is None; expected an object"),
    "index map a list": (lambda d: (d / INDEX).write_text('{"weight_map": [1]}'), r"weight_map is \[1\]; expected"),
    "path traversal": (
        _point("../secret.safetensors"),
        r"puts tensor .*norm.weight in '../secret.safetensors'; expected",
    ),
    "absolute path": (
        _point("/etc/x.safetensors"),
        r"in '/etc/x.safetensors'; expected a .safetensors file name in this",
    ),
    "backslash path": (_point("..\\x.safetensors"), r"expected a .safetensors file name in this directory"),
    "shard a number": (_point(7), r"puts tensor .* in 7; expected a .safetensors file name"),
    "pickle shard": (_point("pytorch_model.bin"), r"in 'pytorch_model.bin'; expected a .safetensors file name"),
    "missing shard": (
        lambda d: _shard_of(d, NORM).unlink(),
        r"shard model-00001-of-\d+.safetensors is missing; expected to hold \d+ tensors",
    ),
    "empty shard": (_raw_shard(b""), r"shard model-00001-of-\d+.safetensors is 0 bytes; expected at least the 8"),
    "header too large": (
        _raw_shard(struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}"),
        r"header claims 100000001 bytes; expected at most 100000000",
    ),
    "header cut": (
        _raw_shard(struct.pack("<Q", 500) + b"{}"),
        r"is truncated: 10 bytes, but its header .* ends at byte 508",
    ),
    "header not json": (_raw_shard(struct.pack("<Q", 2) + b"{]"), r"the header is not valid JSON"),
    "header a list": (_raw_shard(struct.pack("<Q", 2) + b"[]"), r"the header is a JSON list; expected an object"),
    "header too deep": (_raw_shard(struct.pack("<Q", 50000) + b"[" * 50000), r"the header is not valid JSON"),
    "header repeats a key": (_duplicate_key, r"the header is not valid JSON: key 'x' appears twice"),
    "truncated data": (
        lambda d: _truncate(_shard_of(d, NORM), -1),
        r"shard .* is truncated: \d+ bytes; expected \d+ by",
    ),
    "trailing bytes": (
        lambda d: _shard_of(d, NORM).write_bytes(_shard_of(d, NORM).read_bytes() + b"xx"),
        r"has trailing bytes: \d+ bytes; expected \d+ by its header",
    ),
    "overlapping offsets": (_first_entries_overlap, r"norm.weight overlaps the tensor before it: it begins at byte"),
    "negative offset": (lambda d: _entry(d, NORM, data_offsets=[-2, 62]), r"data_offsets \[-2, 62\]; expected"),
    "reversed offsets": (
        lambda d: _entry(d, NORM, data_offsets=[64, 0]),
        r"data_offsets \[64, 0\]; expected \[begin, end\]",
    ),
    "span and shape differ": (lambda d: _entry(d, NORM, shape=[31]), r"spans 64 bytes; expected 62 for BF16 \[31\]"),
    "unknown dtype": (lambda d: _entry(d, NORM, dtype="F8_E4M3"), r"has dtype 'F8_E4M3'; expected one of"),
    "bad shape": (lambda d: _entry(d, NORM, shape="32"), r"has shape '32'; expected a list of sizes"),
    "wrong shape": (
        lambda d: _entry(d, NORM, shape=[2, 16]),
        r"norm.weight in .* has shape \[2, 16\]; expected \[32\]",
    ),
    "wrong dtype": (lambda d: _entry(d, NORM, dtype="F16"), r"norm.weight in .* is F16; expected BF16"),
    "heads not padded": (
        lambda d: _entry(d, A_LOG, shape=[2, 64]),
        r"A_log in .* has shape \[2, 64\]; expected \[128\]",
    ),
    "missing and extra": (
        lambda d: _rename_tensor(d, NORM, "language_model.model.normm.weight"),
        r"tensor language_model.model.norm.weight is missing; expected BF16 \[32\]; 1 more problems",
    ),
    "extra tensor": (
        lambda d: _edit_config(d, num_experts=3),
        r"gate.weight in .* has shape \[4, 32\]; expected \[3, 32\]",
    ),
    "not in its shard": (
        lambda d: _edit_header(_shard_of(d, NORM), lambda h: h.update({"y": h.pop(NORM)})),
        r"shard .* holds tensor y; model.safetensors.index.json puts it in no shard",
    ),
    "in two shards": (
        _same_tensor_twice,
        r"is in both model-00001-of-\d+.safetensors and model-0000\d-of-\d+.safetensors",
    ),
    "absurd expert count": (
        lambda d: _edit_config(d, num_experts=1 << 16),
        r"experts.4.w1.weight_packed is missing; expected U8 \[32, 32\]; \d+ more problems",
    ),
    "unquantised experts": (
        lambda d: _edit_config(d, quantization_config=None),
        r"experts.0.w1.weight is missing; expected BF16 \[32, 64\]; \d+ more problems",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_checkpoint_is_one_named_line(micro_dir: Path, case: str) -> None:
    damage, message = MALFORMED[case]
    damage(micro_dir)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(micro_dir)
    assert "\n" not in str(caught.value)
    assert str(micro_dir) in str(caught.value)
    assert caught.value.exit_code == 4


def test_not_a_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory; expected a checkpoint"):
        Checkpoint.open(tmp_path / "absent")


def test_a_bad_config_is_a_config_error(micro_dir: Path) -> None:
    _edit_config(micro_dir, hidden_size=-1)
    with pytest.raises(ConfigError, match=r"config.json: text_config.hidden_size is -1"):
        Checkpoint.open(micro_dir)


def test_a_whole_checkpoint_opens(micro_dir: Path, micro_config: dict[str, Any]) -> None:
    checkpoint = Checkpoint.open(micro_dir, mla_latent_norm_eps=1e-5)
    assert checkpoint.config.hidden_size == micro_config["text_config"]["hidden_size"]
    assert checkpoint.config.latent_norm_eps == 1e-5
    assert set(checkpoint.specs) == set(checkpoint.tensors)
    assert len(checkpoint.shards) > 1
    assert checkpoint.notices == ()


def test_one_shard_needs_no_index(write_micro: Callable[[dict[str, Any]], Path], tmp_path: Path) -> None:
    folder = tmp_path / "single"
    folder.mkdir()
    config = json.loads((write_micro({}) / "config.json").read_text())
    write_checkpoint(config, folder, seed=0, shard_bytes=1 << 30)
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    (folder / INDEX).unlink()
    assert Checkpoint.open(folder).shards == ("model.safetensors",)


def test_vision_tensors_are_skipped_with_one_notice(
    write_micro: Callable[[dict[str, Any]], Path], vision_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_micro({"vision_config": vision_config})
    with caplog.at_level(logging.WARNING):
        checkpoint = Checkpoint.open(folder)
    assert checkpoint.notices == ("12 vision tensors skipped: this build serves text only",)
    assert [record.getMessage() for record in caplog.records] == [f"{folder}: {checkpoint.notices[0]}"]
    assert not [name for name in checkpoint.specs if name.startswith(("vision_tower", "mm_projector"))]


def test_kimi_linear_floats_may_be_float32(tmp_path: Path) -> None:
    """48B-form files come from several exporters; the K3 layout is exact (tested above)."""
    config = preset_config("kl-tiny")
    config |= {"num_hidden_layers": 2, "num_experts": 2, "num_experts_per_token": 1, "hidden_size": 32}
    config["linear_attn_config"] |= {"kda_layers": [1], "full_attn_layers": [2]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    specs = expected_tensors(ModelConfig.from_json(config))
    save_file({spec.name: torch.zeros(spec.shape) for spec in specs}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {"F32"}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_bytes_crash_the_header_parser(micro_dir: Path, data: st.DataObject) -> None:
    """Any edit of a shard's head parses or is a `CheckpointError`."""
    raw = bytearray(sorted(micro_dir.glob("*.safetensors"))[-1].read_bytes()[:4096])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = micro_dir / "fuzzed.safetensors"
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    message = ""
    try:
        read_header(path)
    except CheckpointError as error:
        message = error.message
    assert "\n" not in message
