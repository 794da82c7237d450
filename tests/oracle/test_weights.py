"""Reading checkpoint directories without the repo's loader."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from .synthetic import k3_config, random_tensors, write_checkpoint
from .weights import read_config, read_tensors


def test_shards_come_back_as_they_were_written(tmp_path: Path) -> None:
    tensors = random_tensors(k3_config(), seed=2)
    write_checkpoint(tmp_path, k3_config(), tensors, shards=3)
    back = read_tensors(tmp_path)
    assert read_config(tmp_path) == k3_config()
    assert back.keys() == tensors.keys()
    assert all(back[name].dtype == tensors[name].dtype and torch.equal(back[name], tensors[name]) for name in tensors)


def test_an_empty_directory_and_a_repeated_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no safetensors"):
        read_tensors(tmp_path)
    for file in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.zeros(1)}, tmp_path / file)
    with pytest.raises(ValueError, match="repeats x"):
        read_tensors(tmp_path)
