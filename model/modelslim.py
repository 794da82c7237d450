"""Checkpoints as msModelSlim writes them for Ascend: int8 projections, int4 experts, and a description of them.

Names and packing are those that vllm-ascend reads (releases/v0.26.0rc at cf0baa3: quantization/methods/w4a8.py and
w8a8_dynamic.py, and its test over the published K3 checkpoint). Weights are symmetric, with one scale a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3hal.dispatch.errors import CheckpointError, ConfigError
from k3hal.model.config import ModelConfig
from k3hal.model.config_fields import read_json_object
from k3hal.model.layout import SLIM_DESCRIPTION
from k3hal.model.manifest import TensorSpec, expected_tensors

FLOAT, INT8, INT4 = "FLOAT", "W8A8_DYNAMIC", "W4A8_DYNAMIC"
VERSION = "1.0.0"
"""Of the layout in which two int4 share a byte and one scale is for a row."""
SCALE, OFFSET, BIAS = "_scale", "_offset", "scale_bias"
_ROW_PARALLEL = 16
"""Columns that w2's bias comes in, one for each rank there may be."""


@dataclass(frozen=True, slots=True)
class ModelSlim:
    """What the description says of each weight, by its full name."""

    kinds: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> ModelSlim | None:
        """The description of a directory; None where there is none.

        Raises `CheckpointError` for one that cannot be read, or of a layout that is not supported here.
        """
        path = folder / SLIM_DESCRIPTION
        if not path.is_file():
            return None
        try:
            content = read_json_object(path, limit=1 << 30)
        except ConfigError as error:
            raise CheckpointError(error.message) from error
        kinds = {name: kind for name, kind in content.items() if name.endswith(".weight")}
        problem = _unsupported(content, kinds)
        if problem:
            raise CheckpointError(f"{path}: {problem}", hint="convert it with msModelSlim's per-channel W4A8 of 1.0.0")
        return cls(kinds)

    def kind(self, name: str) -> str:
        return self.kinds.get(name, FLOAT)

    def specs(self, config: ModelConfig) -> Iterator[TensorSpec]:
        """Every tensor that the directory must hold, in the manifest's order, a quantised one's parts in its place."""
        for spec in expected_tensors(config):
            kind = self.kind(spec.name)
            if kind == FLOAT and is_expert(spec.name):
                raise CheckpointError(
                    f"{SLIM_DESCRIPTION} calls {spec.name} {FLOAT}; expected {INT4} for routed experts"
                )
            yield from (spec,) if kind == FLOAT else _parts(spec, kind, config)


def _unsupported(content: Mapping[str, Any], kinds: Mapping[str, Any]) -> str:
    """Why this description's weights cannot be loaded; empty where they can."""
    odd = next((f"{name} is {kind!r:.40}" for name, kind in kinds.items() if kind not in (FLOAT, INT8, INT4)), None)
    if odd:
        return f"{odd}; expected {FLOAT}, {INT8} or {INT4}"
    misplaced = next((n for n, kind in kinds.items() if (kind == INT4) != is_expert(n) and kind != FLOAT), None)
    if misplaced:
        return f"{misplaced} is {kinds[misplaced]}; expected {INT4} for routed experts and {INT8} for all else"
    if INT4 not in kinds.values():
        return f"no weight is {INT4}; expected routed experts that are"
    if content.get("version") != VERSION:
        return f"version is {content.get('version')!r:.40}; expected {VERSION!r}"
    if content.get("group_size", 0) != 0:
        return f"group_size is {content['group_size']!r:.40}; expected 0, one scale a row"
    return ""


def is_expert(name: str) -> bool:
    return ".experts." in name


def _parts(spec: TensorSpec, kind: str, config: ModelConfig) -> Iterator[TensorSpec]:
    """The codes of a weight [R, C] and what goes with them. Raises `CheckpointError` for one that has no codes."""
    if len(spec.shape) != 2 or spec.dtype != "BF16" or (kind == INT4 and spec.shape[0] % 2):
        shape = f"{spec.dtype} {list(spec.shape)}"
        raise CheckpointError(f"{SLIM_DESCRIPTION} calls {spec.name} {kind}; expected {FLOAT} for {shape}")
    rows, columns = spec.shape
    stored = rows // 2 if kind == INT4 else rows
    yield TensorSpec(spec.name, "I8", (stored, columns))
    yield TensorSpec(spec.name + SCALE, "F32", (rows, 1))
    yield TensorSpec(spec.name + OFFSET, "F32", (rows, 1))
    if kind == INT4:
        wide = _ROW_PARALLEL if spec.name.endswith("w2.weight") else 1
        yield TensorSpec(spec.name.removesuffix("weight") + BIAS, "F32", (rows, wide))
