"""What a model's weights take, from the manifest its config implies, divided as a layout divides them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import as_file, files
from pathlib import Path

from k3hal.model.config import ModelConfig
from k3hal.model.manifest import TensorSpec, expected_tensors, layer_tensors, vision_tensors
from k3hal.plan.layout import Layout

_REPLICATED = (
    "f_a_proj",
    "g_a_proj",
    "q_a_proj",
    "kv_a_proj_with_mqa",
    "gate",
    "routed_expert_down_proj",
    "routed_expert_up_proj",
    "self_attention_res_proj",
    "mlp_res_proj",
    "output_attn_res_proj",
)
"""Modules of the text model that every tensor-parallel rank holds whole; norms are, too, all others are divided."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes by how they are divided: over expert shards, over tensor-parallel ranks, or not at all."""

    experts: float = 0
    divided: float = 0
    whole: float = 0

    def __add__(self, other: Parts) -> Parts:
        return Parts(self.experts + other.experts, self.divided + other.divided, self.whole + other.whole)

    @property
    def total(self) -> float:
        return self.experts + self.divided + self.whole


class ModelWeights:
    """Bytes of one model's weights. `expert_bits` per parameter of a routed expert; None: as the manifest stores it."""

    def __init__(self, config: ModelConfig, expert_bits: float | None = None) -> None:
        self.config = config
        self._expert_scale = 1.0 if expert_bits is None else expert_bits / _stored_expert_bits(config)

    @cached_property
    def layers(self) -> tuple[Parts, ...]:
        """By layer. Layers of one kind hold the same tensors, so each kind is counted once."""
        kinds: dict[tuple[bool, bool], Parts] = {}
        out = []
        for layer in range(self.config.num_layers):
            kind = (self.config.is_kda(layer), self.config.is_moe(layer))
            if kind not in kinds:
                kinds[kind] = self._parts(layer_tensors(self.config, layer))
            out.append(kinds[kind])
        return tuple(out)

    @cached_property
    def ends(self) -> Parts:
        """Embedding, head and final norm."""
        specs = expected_tensors(self.config)
        outside = []
        for spec in specs:  # the first ones, up to the layers
            if ".layers." in spec.name:
                break
            outside.append(spec)
        return self._parts(outside)

    @cached_property
    def vision(self) -> float:
        return sum(spec.nbytes for spec in vision_tensors(self.config))

    @property
    def total(self) -> float:
        return sum((part.total for part in self.layers), 0.0) + self.ends.total + self.vision

    @property
    def by_kind(self) -> Mapping[str, float]:
        everything = sum(self.layers, self.ends)
        dense = everything.divided + everything.whole
        return {"experts": everything.experts, "dense": dense, "vision": self.vision}

    def per_gpu(self, layout: Layout, *, vision_split: bool, with_vision: bool = True) -> float:
        """Bytes of the accelerator that holds most."""
        stages = pipeline_stages(self.config.num_layers, layout.pp)
        vision = self.vision / (layout.tp if vision_split else 1) if with_vision else 0.0
        most = 0.0
        for index, stage in enumerate(stages):
            parts = sum((self.layers[layer] for layer in stage), Parts())
            if index in (0, len(stages) - 1):
                ends = self.ends if len(stages) == 1 else Parts(0, self.ends.divided / 2, self.ends.whole / 2)
                parts = parts + ends
            here = parts.experts / layout.expert_shards + parts.divided / layout.tp + parts.whole
            most = max(most, here + (vision if index == 0 else 0.0))
        return most

    def _parts(self, specs: Iterable[TensorSpec]) -> Parts:
        sizes: Counter[str] = Counter()
        for spec in specs:
            sizes[_division(spec.name)] += spec.nbytes
        return Parts(sizes["experts"] * self._expert_scale, sizes["divided"], sizes["whole"])


def pipeline_stages(layers: int, stages: int) -> list[range]:
    """Layers of each pipeline stage, as even as they come; the later stages take what is left over."""
    small, extra = divmod(layers, stages)
    out, start = [], 0
    for index in range(stages):
        size = small + (index >= stages - extra)
        out.append(range(start, start + size))
        start += size
    return out


def model_config(model: Path | None) -> ModelConfig:
    """The config of a checkpoint directory or config.json; None is the full-size Kimi K3."""
    if model is not None:
        return ModelConfig.from_json(model)
    with as_file(files("k3hal.model") / "configs" / "kimi_k3.json") as path:
        return ModelConfig.from_json(path)


def _division(name: str) -> str:
    if ".experts." in name:
        return "experts"
    module = name.removesuffix(".weight").rpartition(".")[2]
    whole = module in _REPLICATED or module.endswith("norm") or "e_score_correction" in name
    return "whole" if whole else "divided"


def _stored_expert_bits(config: ModelConfig) -> float:
    return 4.25 if config.expert_format == "mxfp4" else 16.0
