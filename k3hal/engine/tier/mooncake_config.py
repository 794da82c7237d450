"""Where a Mooncake store is: the configuration file that other engines use for it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from k3hal.dispatch.words import nearest
from k3hal.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeConfig:
    """Sizes in bytes. `global_segment_size` is the memory that this engine lends to the store."""

    master_server_address: str
    local_hostname: str = "127.0.0.1"
    metadata_server: str = "P2PHANDSHAKE"
    global_segment_size: int = 4 << 30
    local_buffer_size: int = 64 << 20
    protocol: str = "tcp"
    device_name: str = ""

    @classmethod
    def read(cls, path: Path) -> MooncakeConfig:
        """From a JSON file. Raises `ConfigError`."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not valid JSON: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{path}: a JSON {type(found).__name__}; expected an object")
        kinds = {field.name: int if field.type == "int" else str for field in fields(cls)}
        for name, value in found.items():
            if name not in kinds:
                raise ConfigError(f"{path}: unknown key {name!r}", hint=nearest(name, list(kinds)))
            kind = kinds[name]
            if type(value) is not kind or (isinstance(value, int) and value < 0):
                what = "a number of bytes" if kind is int else "a text"
                raise ConfigError(f"{path}: {name} is {value!r:.100}; it is {what}")
        if not found.get("master_server_address"):
            raise ConfigError(f"{path}: master_server_address is missing", hint="say where mooncake_master runs")
        return cls(**found)
