"""Ways to spoil files: each takes the folder a command runs in, where `model` is a good checkpoint."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Setup = Callable[[Path], object]

INDEX = "model/model.safetensors.index.json"
NORM = "language_model.model.norm.weight"


def put(name: str, content: str | bytes | Any) -> Setup:
    """Write a file: text or bytes as they are, anything else as JSON."""
    data = content if isinstance(content, str | bytes) else json.dumps(content)
    return lambda folder: (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def all_of(*setups: Setup) -> Setup:
    return lambda folder: [setup(folder) for setup in setups]


def remove(name: str) -> Setup:
    return lambda folder: (folder / name).unlink()


def truncate(name: str, by: int) -> Setup:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - by)


def edit(name: str, change: Callable[[Any], object]) -> Setup:
    """Apply `change` to a JSON file's content, in place."""

    def apply(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value))

    return apply


def config(**changes: Any) -> Setup:
    """Change fields of the checkpoint's text config."""
    return edit("model/config.json", lambda value: value["text_config"].update(changes))


def point(shard: Any) -> Setup:
    """Let the index name another shard for one tensor."""
    return edit(INDEX, lambda index: index["weight_map"].update({NORM: shard}))


def header(change: Callable[[dict[str, Any]], object]) -> Setup:
    """Apply `change` to the header of the shard that holds `NORM`; its data stay."""

    def apply(folder: Path) -> None:
        shard = shard_of(folder)
        raw = shard.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        value = json.loads(raw[8 : 8 + length])
        change(value)
        text = json.dumps(value).encode()
        shard.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return apply


def tensor(**changes: Any) -> Setup:
    """Change what the header says of `NORM`."""
    return header(lambda value: value[NORM].update(changes))


def shard(content: bytes) -> Setup:
    return lambda folder: shard_of(folder).write_bytes(content)


def vocabulary(change: Callable[[list[bytes]], object]) -> Setup:
    """Apply `change` to the lines of the tokenizer file."""

    def apply(folder: Path) -> None:
        path = folder / "model" / "tiktoken.model"
        lines = path.read_bytes().splitlines()
        change(lines)
        path.write_bytes(b"\n".join(lines) + b"\n")

    return apply


def shard_of(folder: Path) -> Path:
    return folder / "model" / json.loads((folder / INDEX).read_text())["weight_map"][NORM]
