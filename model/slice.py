"""A few layers of a model, or one tensor-parallel rank's part of them, as a config of its own."""

from __future__ import annotations

from dataclasses import replace

from k3hal.dispatch.errors import UsageError
from k3hal.model.config import MXFP4_GROUP, ModelConfig

FIRST_LAYER = 4
"""0-based; a slice of Kimi K3 begins here: KDA, KDA, KDA, MLA, all with experts."""


def slice_of(config: ModelConfig, count: int, tp: int = 1, *, first: int = FIRST_LAYER) -> ModelConfig:
    """Layers `first` to `first + count - 1`, renumbered from 0, as one rank of `tp` holds them.

    A rank's part is a model of its own with fewer heads, narrower experts and a shorter vocabulary; what is replicated
    keeps its size (spec k3_architecture §7.10). Its outputs are partial sums that nobody adds up: collectives are left
    out. Residual blocks keep their size, counted from the slice's first layer.

    Raises `UsageError` for layers that do not exist and for a number of ranks that does not divide the sizes.
    """
    last = first + count
    if not 1 <= count <= config.num_layers - first:
        raise UsageError(f"a slice of {count} layers", hint=f"from 1 to {config.num_layers - first}")
    if tp > 1:
        config = _rank_of(config, tp)
    kda = tuple(layer - first for layer in config.kda_layers if first <= layer < last)
    return replace(
        config,
        num_layers=count,
        kda_layers=kda,
        first_k_dense=max(config.first_k_dense - first, 0),
        vision=None,
    )


def _rank_of(config: ModelConfig, tp: int) -> ModelConfig:
    group = 1 if config.expert_format == "bf16" else MXFP4_GROUP
    sizes = {
        "num_heads": 1,
        "kda_heads": 1,
        "moe_intermediate_size": group,
        "intermediate_size": 1,
        "vocab_size": 1,
    }
    for name, unit in sizes.items():
        value = getattr(config, name)
        if value % (tp * unit):
            able = [n for n in range(1, 129) if not any(getattr(config, s) % (n * u) for s, u in sizes.items())]
            what = f"{name} {value} " + (f"in groups of {unit} " if unit > 1 else "")
            raise UsageError(f"{tp} ranks do not divide {what.strip()}", hint=f"these do: {_words(able)}")
    return replace(config, **{name: getattr(config, name) // tp for name in sizes})


def _words(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
