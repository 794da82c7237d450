"""Where a model's files are, and its weights by K3HAL's own loader."""
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from k3hal.model.checkpoint import Checkpoint
from k3hal.model.config import ModelConfig
from k3hal.model.context import Reader
from k3hal.model.generated import GeneratedModel, GeneratedReader
from k3hal.model.layout import CONFIG, TOKENIZER
from k3hal.model.modelslim_reader import reader_of


def folder_of(vllm_config: Any) -> Path:
    """The checkpoint's directory: the one named, or a hub repository's files, fetched where they are not here yet."""
    model = vllm_config.model_config
    if Path(model.model).is_dir():
        return Path(model.model)
    return _fetched(model.model, model.revision, vllm_config.load_config.download_dir)


@functools.cache
def _fetched(repository: str, revision: str | None, cache: str | None) -> Path:
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", "*.safetensors.index.json", "*config.json", CONFIG, TOKENIZER]
    return Path(snapshot_download(repository, revision=revision, cache_dir=cache, allow_patterns=wanted))


def config_of(vllm_config: Any) -> ModelConfig:
    """The model's config as its files have it. Raises `ConfigError`."""
    return _config(folder_of(vllm_config))


@functools.cache
def _config(folder: Path) -> ModelConfig:
    return ModelConfig.from_json(folder)


def source_of(vllm_config: Any) -> Checkpoint | GeneratedModel:
    """The checked checkpoint, or a model of random weights with `--load-format dummy`. Raises as `Checkpoint.open`."""
    if vllm_config.load_config.load_format == "dummy":
        return GeneratedModel.of(vllm_config.model_config.model, config_of(vllm_config))
    return Checkpoint.open(folder_of(vllm_config))


@contextmanager
def open_weights(source: Checkpoint | GeneratedModel, device: torch.device, dtype: torch.dtype) -> Iterator[Reader]:
    """The reader of the source's weights. When the block ends without an error every tensor must have been read."""
    if isinstance(source, GeneratedModel):
        generated = GeneratedReader(source, device, dtype)
        yield generated
        generated.finish()
        return
    with reader_of(source, device, dtype) as reader:
        yield reader
        reader.finish()
