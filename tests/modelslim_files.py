"""Small checkpoints in the layout of msModelSlim's, as they are written and with changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from k3hal.model.layout import CHECKSUMS, SLIM_DESCRIPTION, SLIM_INDEX
from k3hal.model.write import write_preset

Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], None]
"""Of the tensors and of the description, before they are written again."""


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor as it stands in the shards."""
    return {name: tensor for shard in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(shard).items()}


def write_slim(folder: Path, change: Change | None = None) -> Path:
    """Preset nano as msModelSlim writes a model; with a change, in one shard."""
    write_preset("nano", folder, layout="modelslim")
    if change is None:
        return folder
    tensors, kinds = stored(folder), json.loads((folder / SLIM_DESCRIPTION).read_text())
    change(tensors, kinds)
    for path in (*folder.glob("*.safetensors"), folder / CHECKSUMS):
        path.unlink()
    shard = "quant_model_weights-00001-of-00001.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / shard)
    (folder / SLIM_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}))
    (folder / SLIM_DESCRIPTION).write_text(json.dumps(kinds))
    return folder
