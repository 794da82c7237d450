"""Writing a generated checkpoint: sharded, streamed tensor by tensor, and visible only when complete."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from k3hal.dispatch.errors import InputError, UsageError
from k3hal.model.config import ModelConfig
from k3hal.model.content import Content, Layout, published
from k3hal.model.layout import CHECKSUMS, CONFIG, GENERATION_CONFIG, TOKENIZER, is_checkpoint_file
from k3hal.model.manifest import TensorSpec
from k3hal.model.modelslim_writer import modelslim
from k3hal.model.presets import PRESETS, preset_config, shard_limit
from k3hal.model.safetensors_io import file_order, write_shard
from k3hal.model.synthetic_vocab import synthetic_vocab_bytes

GENERATOR_VERSION = 2
"""Grows whenever a preset with the same seed would come out different, so that cached copies are made anew."""

ProgressFn = Callable[[int], None]
"""Called with the number of bytes done since the last call."""


def write_preset(
    name: str, target: Path, *, seed: int = 0, layout: Layout = "published", force: bool = False,
    progress: ProgressFn | None = None,
) -> None:  # fmt: skip
    """Generate preset `name` into the directory `target`, in a `layout`.

    Raises `UsageError` for an unknown preset or seed, `InputError` when `target` is in the way or cannot be written.
    """
    if name not in PRESETS:
        raise UsageError(f"no preset {name!r}; expected one of {', '.join(PRESETS)}")
    if not 0 <= seed < 2**63:
        raise UsageError(f"seed {seed} is out of range; expected 0 to 2^63 - 1")
    config_json = preset_config(name, layout)
    with _complete_or_absent(target, force) as folder:
        write_checkpoint(
            config_json, folder, seed=seed, layout=layout, shard_bytes=shard_limit(name), progress=progress
        )


def preset_bytes(name: str, layout: Layout = "published") -> int:
    """Data bytes of a preset's tensors."""
    return _content(ModelConfig.from_json(preset_config(name, layout)), 0, layout).nbytes


def write_checkpoint(
    config_json: dict[str, Any],
    folder: Path,
    *,
    seed: int,
    shard_bytes: int,
    layout: Layout = "published",
    progress: ProgressFn | None = None,
) -> None:
    """Fill the empty directory `folder`. Memory holds one weight at a time."""
    config = ModelConfig.from_json(config_json)
    content = _content(config, seed, layout)
    shards = list(_shards(content, shard_bytes))
    weight_map: dict[str, str] = {}

    def data(spec: TensorSpec) -> memoryview:
        raw = content.tensor(spec)
        if progress is not None:
            progress(spec.nbytes)
        return raw.astype(raw.dtype.newbyteorder("<"), copy=False).data.cast("B")

    for number, specs in enumerate(shards, 1):
        shard = f"{content.shard}-{number:05d}-of-{len(shards):05d}.safetensors"
        write_shard(folder / shard, file_order(specs), data)
        weight_map |= {spec.name: shard for spec in specs}
    _write_json(folder / content.index, {"metadata": {"total_size": content.nbytes}, "weight_map": weight_map})
    for name, value in content.files.items():
        _write_json(folder / name, value)
    _write_json(folder / CONFIG, config_json)
    _write_json(folder / GENERATION_CONFIG, _generation_config(config))
    (folder / TOKENIZER).write_bytes(synthetic_vocab_bytes())
    _write_checksums(folder)


def _content(config: ModelConfig, seed: int, layout: Layout) -> Content:
    return modelslim(config, seed) if layout == "modelslim" else published(config, seed)


def _shards(content: Content, limit: int) -> Iterator[list[TensorSpec]]:
    """Consecutive tensors, cut before a shard would pass `limit` bytes."""
    batch: list[TensorSpec] = []
    size = 0
    for spec in content.specs:
        if batch and size + spec.nbytes > limit:
            yield batch
            batch, size = [], 0
        batch.append(spec)
        size += spec.nbytes
    yield batch


def _generation_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "temperature": 1.0,
        "top_p": 1.0,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _write_checksums(folder: Path) -> None:
    """One `sha256sum` line per file, so that `sha256sum -c` reads it too."""
    lines = []
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    (folder / CHECKSUMS).write_text("".join(lines), encoding="ascii")


@contextmanager
def _complete_or_absent(target: Path, force: bool) -> Iterator[Path]:
    """A scratch directory beside `target` that takes its place when the body succeeds and vanishes when it fails."""
    target = target.resolve()
    scratch: Path | None = None
    try:
        _check_target(target, force)
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = _unused_sibling(target)
        scratch.mkdir()
        yield scratch
        _put_in_place(scratch, target, force)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _check_target(target: Path, force: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise InputError(f"{target} is a file; expected a directory to create")
    entries = sorted(entry.name for entry in target.iterdir())
    if entries and not force:
        raise InputError(f"{target} is not empty", hint="--force replaces the checkpoint in it")
    foreign = next((n for n in entries if not is_checkpoint_file(n) or (target / n).is_dir()), None)
    if foreign is not None:
        raise InputError(
            f"{target} holds {foreign}, which is no part of a checkpoint; remove it or choose another place"
        )


def _put_in_place(scratch: Path, target: Path, force: bool) -> None:
    """Put `scratch` where `target` is.

    Without `force` a directory that was filled meanwhile is left alone, since the rename fails. With it, only an old
    checkpoint's own files are ever removed.
    """
    if not force or not target.exists():
        scratch.rename(target)
        return
    old = _unused_sibling(target)
    target.rename(old)
    try:
        scratch.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old)


def _unused_sibling(target: Path) -> Path:
    return target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}"
