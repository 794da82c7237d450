"""Checkpoints small enough to be measured in a blink, and a machine whose bandwidth is measured as quickly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3hal.bench import bandwidth
from k3hal.cli import main
from k3hal.model.presets import preset_config
from k3hal.model.write import write_checkpoint

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL |= {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
SMALL |= {"num_hidden_layers": 3, "num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 32}
ATTENTION = {"full_attn_layers": [3], "kda_layers": [1, 2], "head_dim": 32, "num_heads": 2}


@pytest.fixture(scope="session")
def kimi_linear_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Kimi-Linear checkpoint: KDA dense, KDA with experts, MLA with experts."""
    config: dict[str, Any] = copy.deepcopy(preset_config("kl-tiny")) | SMALL
    config["linear_attn_config"] |= ATTENTION
    folder = tmp_path_factory.mktemp("kimi_linear") / "kl-micro"
    folder.mkdir()
    write_checkpoint(config, folder, seed=3, shard_bytes=1 << 20)
    return folder


@pytest.fixture(scope="session")
def k3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same sizes as a K3 checkpoint, with MXFP4 experts in a latent space."""
    config: dict[str, Any] = copy.deepcopy(preset_config("nano"))
    text = config["text_config"]
    text |= SMALL | {"q_lora_rank": 16, "routed_expert_hidden_size": 64, "attn_res_block_size": 2}
    text["linear_attn_config"] |= ATTENTION
    folder = tmp_path_factory.mktemp("k3") / "k3-micro"
    folder.mkdir()
    write_checkpoint(config, folder, seed=3, shard_bytes=1 << 20)
    return folder


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "BUFFER_BYTES", 1 << 20)


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`bench("engine", ...)`: exit code, stdout and stderr of the verb with few, short runs."""

    def run(*args: str | Path) -> tuple[int, str, str]:
        few = ["--repeat", "2"]
        few += ["--prompt-tokens", "5", "--output-tokens", "6", "--dtype", "float32"] if args[0] == "engine" else []
        code = main(["bench", str(args[0]), *few, *map(str, args[1:])])
        out, err = capsys.readouterr()
        return code, out, err

    return run
