"""Generated checkpoints: reproducible bits, healthy values, the published layout, and all-or-nothing writing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from k3hal.errors import InputError, UsageError
from k3hal.model import content, write
from k3hal.model.config import ModelConfig
from k3hal.model.init import random_tensor
from k3hal.model.manifest import TensorSpec, expected_tensors
from k3hal.model.philox import Stream, to_bfloat16
from k3hal.model.presets import PRESETS, preset_config
from k3hal.model.write import GENERATOR_VERSION, write_preset

NANO_GOLDEN = (2, "34efb049d4367f989a8a2594f91fb4351a317ba5446e10a1160025efd8468235")
"""`GENERATOR_VERSION` and the digest of nano seed 0. A new digest needs a new version: caches are keyed by it."""


def _load(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor by the safetensors library, an independent reader of the format."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - the handle is not iterable
                tensors[name] = file.get_tensor(name)
    return tensors


def test_nano_is_bit_identical_everywhere(nano_dir: Path) -> None:
    digest = hashlib.sha256((nano_dir / "checksums.sha256").read_bytes()).hexdigest()
    assert (GENERATOR_VERSION, digest) == NANO_GOLDEN


def test_published_layout(nano_dir: Path) -> None:
    config = ModelConfig.from_json(nano_dir)
    tensors = _load(nano_dir)
    names = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
    expected = {spec.name: (names[spec.dtype], spec.shape) for spec in expected_tensors(config)}
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == expected
    index = json.loads((nano_dir / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(expected)
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(spec.nbytes for spec in expected_tensors(config))


def test_files_beside_the_weights(nano_dir: Path) -> None:
    vocabulary = (nano_dir / "tiktoken.model").read_bytes()
    assert hashlib.sha256(vocabulary).hexdigest() == "3f170b0f64afac52fcfb8805b684ec04f7e3498c081384db33e22fa22ea5475f"
    generation = json.loads((nano_dir / "generation_config.json").read_text())
    assert generation == {
        "bos_token_id": 369,
        "eos_token_id": 371,
        "pad_token_id": 624,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    for line in (nano_dir / "checksums.sha256").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((nano_dir / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("name", PRESETS)
def test_preset_sizes(name: str) -> None:
    config = ModelConfig.from_json(preset_config(name))
    layers, hidden, heads, experts = {
        "nano": (8, 128, 2, 16),
        "tiny": (16, 512, 4, 64),
        "kl-tiny": (16, 512, 4, 32),
        "wide": (8, 7168, 1, 8),
    }[name]
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_experts) == (
        layers,
        hidden,
        heads,
        experts,
    )
    assert config.mla_layers[-2:] == (layers - 2, layers - 1)
    assert (config.kda_head_dim, config.kv_lora_rank, config.qk_rope_head_dim, config.conv_width) == (128, 512, 64, 4)
    assert config.qk_nope_head_dim == config.v_head_dim == 128
    assert config.architecture == ("kimi_linear" if name == "kl-tiny" else "kimi_k3")


def test_transformers_reads_the_kimi_linear_preset() -> None:
    """An independent reader of the same config.json agrees on every size."""
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

    published = preset_config("kl-tiny")
    theirs = KimiLinearConfig.from_dict(published)
    assert ModelConfig.from_json(json.loads(theirs.to_json_string())) == ModelConfig.from_json(published)


def test_mxfp4_covers_all_codes_and_varies_scales(nano_dir: Path) -> None:
    tensors = _load(nano_dir)
    name = "language_model.model.layers.1.block_sparse_moe.experts.0.w1."
    packed = tensors[name + "weight_packed"]
    assert set(torch.cat([packed & 15, packed >> 4]).flatten().tolist()) == set(range(16))
    scales = tensors[name + "weight_scale"].unique().tolist()
    assert len(scales) == 3 and scales == list(range(scales[0], scales[0] + 3))
    assert 100 < scales[0] < 127


def test_weights_are_healthy(nano_dir: Path) -> None:
    config = ModelConfig.from_json(nano_dir)
    tensors = _load(nano_dir)
    assert all(torch.isfinite(tensor.float()).all() for tensor in tensors.values())
    a_log = tensors["language_model.model.layers.0.self_attn.A_log"]
    assert a_log[: config.kda_heads].all() and not a_log[config.kda_heads :].any()
    bias = tensors["language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias"]
    assert bias.all() and bias.abs().max() < 0.1
    norm = tensors["language_model.model.norm.weight"].float()
    assert abs(norm.mean() - 1) < 0.1 and 0.05 < norm.std() < 0.2
    assert tensors["language_model.model.layers.1.mlp_res_proj.weight"].float().std() > 0.01
    head = tensors["language_model.lm_head.weight"].float()
    assert 1 < head.std() * config.hidden_size**0.5 < 3  # the logits' standard deviation for a normed input


def test_a_tensor_depends_on_seed_and_name_alone() -> None:
    config = ModelConfig.from_json(preset_config("nano"))
    spec = TensorSpec("language_model.model.norm.weight", "BF16", (128,))
    same = random_tensor(config, spec, 3)
    assert (random_tensor(config, spec, 3) == same).all()
    assert (random_tensor(config, spec, 4) != same).any()
    assert (random_tensor(config, spec._replace(name="x.norm.weight"), 3) != same).any()


def test_philox_values_are_pinned() -> None:
    """The stream itself, so that a numpy release that changed it would show here first."""
    assert Stream(0, "a").octets(8).tolist() == [231, 66, 236, 84, 59, 131, 48, 193]
    assert Stream(0, "a").normals(3, 1.0).tobytes().hex() == "eaae77bee0a3acbf38efac3f"
    assert Stream(0, "a").uniforms(2, -1.0, 1.0).tobytes().hex() == "0661023f80143abd"


def test_stream_statistics() -> None:
    values = Stream(7, "w").normals(200_000, 0.5, mean=2.0)
    assert abs(values.mean() - 2.0) < 0.01 and abs(values.std() - 0.5) < 0.01
    assert np.abs(values - 2.0).max() <= 0.5 * 3.47
    uniform = Stream(7, "w").uniforms(200_000, -6.5, -0.5)
    assert uniform.min() >= -6.5 and uniform.max() < -0.5 and abs(uniform.mean() + 3.5) < 0.02


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.concatenate([Stream(1, "r").normals(50_000, 3.0), np.array([1.00390625, 1.01171875, 0.0, -0.0], "f4")])
    assert (torch.from_numpy(values).bfloat16().view(torch.uint16).numpy() == to_bfloat16(values)).all()


def test_an_occupied_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"is not empty .--force replaces the checkpoint in it"):
        write_preset("nano", tmp_path)
    with pytest.raises(InputError, match=r"holds thesis.txt, which is no part of a checkpoint"):
        write_preset("nano", tmp_path, force=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


def test_force_leaves_a_folder_alone_that_is_called_like_a_shard(micro_dir: Path) -> None:
    (micro_dir / "mine.safetensors").mkdir()
    (micro_dir / "mine.safetensors" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds mine.safetensors, which is no part of a checkpoint"):
        write_preset("nano", micro_dir, force=True)
    assert (micro_dir / "mine.safetensors" / "thesis.txt").read_text() == "mine"


def test_force_replaces_a_checkpoint(micro_dir: Path) -> None:
    write_preset("nano", micro_dir, force=True)
    assert ModelConfig.from_json(micro_dir).hidden_size == 128
    assert [entry.name for entry in micro_dir.parent.iterdir()] == [micro_dir.name]


def test_an_empty_directory_is_used(tmp_path: Path) -> None:
    target = tmp_path / "made" / "deep"
    target.mkdir(parents=True)
    write_preset("nano", target)
    assert (target / "config.json").is_file()


def test_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def fail_late(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 50:
            raise OSError(28, "No space left on device")
        return random_tensor(*args)

    monkeypatch.setattr(content, "random_tensor", fail_late)
    with pytest.raises(InputError, match=r"cannot write .*nano: No space left on device"):
        write_preset("nano", tmp_path / "nano")
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no preset 'huge'; expected one of nano, tiny, kl-tiny, wide"):
        write_preset("huge", tmp_path / "x")
    with pytest.raises(UsageError, match="seed -1 is out of range"):
        write_preset("nano", tmp_path / "x", seed=-1)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file; expected a directory"):
        write_preset("nano", tmp_path / "file")


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    done: list[int] = []
    write_preset("nano", tmp_path / "n", progress=done.append)
    assert sum(done) == write.preset_bytes("nano")
