"""Small checkpoints that the tests of loading, checking and writing share."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3hal.model.presets import preset_config
from k3hal.model.write import write_checkpoint

VISION = {
    "patch_size": 2,
    "init_pos_emb_height": 3,
    "init_pos_emb_width": 3,
    "vt_hidden_size": 8,
    "vt_num_hidden_layers": 1,
    "vt_intermediate_size": 16,
    "qkv_hidden_size": 12,
    "merge_kernel_size": [2, 2],
    "mm_hidden_size": 8,
    "text_hidden_size": 32,
}


@pytest.fixture
def micro_config() -> dict[str, Any]:
    """A K3 config of three layers (KDA dense, KDA with experts, MLA with experts), small in every dimension."""
    config = copy.deepcopy(preset_config("nano"))
    text = config["text_config"]
    text |= {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48, "q_lora_rank": 16}
    text |= {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    text |= {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 32}
    text |= {"routed_expert_hidden_size": 64, "attn_res_block_size": 2}
    text["linear_attn_config"] |= {"full_attn_layers": [3], "kda_layers": [1, 2], "head_dim": 32}
    return config


@pytest.fixture(scope="session")
def _micro_original(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"root": tmp_path_factory.mktemp("micro")}


@pytest.fixture
def micro_dir(micro_config: dict[str, Any], _micro_original: dict[str, Path], tmp_path: Path) -> Path:
    """A private copy of a checkpoint with `micro_config`, in several shards."""
    original = _micro_original["root"] / "original"
    if not original.is_dir():
        original.mkdir()
        write_checkpoint(micro_config, original, seed=1, shard_bytes=64 << 10)
    return Path(shutil.copytree(original, tmp_path / "micro"))


@pytest.fixture
def write_micro(micro_config: dict[str, Any], tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """`write_micro(top_level_changes)`: a checkpoint of the changed micro config."""

    def write(changes: dict[str, Any]) -> Path:
        target = tmp_path / "changed"
        target.mkdir()
        write_checkpoint(micro_config | changes, target, seed=1, shard_bytes=64 << 10)
        return target

    return write


@pytest.fixture
def vision_config() -> dict[str, Any]:
    return dict(VISION)
