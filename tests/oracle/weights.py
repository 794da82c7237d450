"""Checkpoint directories read with the safetensors library alone, for the oracle."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def read_config(directory: Path) -> dict[str, Any]:
    """The content of `directory`/config.json."""
    return json.loads((directory / "config.json").read_text())


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every *.safetensors file in `directory`, by its stored name and in its stored dtype.

    Raises ValueError when there is no such file or two files hold the same name.
    """
    tensors: dict[str, torch.Tensor] = {}
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} holds no safetensors file")
    for file in files:
        shard = load_file(file)
        twice = tensors.keys() & shard.keys()
        if twice:
            raise ValueError(f"{file.name} repeats {min(twice)}")
        tensors |= shard
    return tensors
