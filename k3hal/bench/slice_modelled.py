"""What the whole of Kimi K3 would take on ranks like the measured one: added up from a slice's figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import torch

from k3hal.bench.slice_calls import CallRecorder
from k3hal.bench.slice_figures import Meter
from k3hal.bench.slice_work import ENDS
from k3hal.checkpoints import full_size_config
from k3hal.dispatch.observe import observing
from k3hal.dispatch.plan import BoundOps
from k3hal.engine.build import BuiltEngine
from k3hal.model.checkpoint import Checkpoint
from k3hal.model.config import ModelConfig
from k3hal.model.context import Build
from k3hal.model.generated import GeneratedModel, GeneratedReader
from k3hal.model.moe import dense_mlp
from k3hal.model.parallel import ParallelPlan

COLLECTIVES_A_LAYER, COLLECTIVES_AROUND = 2, 2
"""The sums behind attention and MLP; the embedding's and the gathered logits."""


def modelled(
    source: Checkpoint | GeneratedModel,
    built: BuiltEngine,
    decode: Sequence[dict[str, Any]],
    collective_us: float,
    meter: Meter,
    recorder: CallRecorder,
) -> list[dict[str, Any]]:
    """A decode step of all layers for every measured row of `decode`; empty for what is no slice of Kimi K3, or
    measures no layer of one of the kinds."""
    if not isinstance(source, GeneratedModel) or not source.name.startswith("k3-slice:"):
        return []
    rows = [row for row in decode if {"kda", "mla"} <= set(row.get("layers", ()))]
    if not rows:
        return []
    whole = full_size_config()
    with observing(recorder):
        ops = built.plan.bind()
    extras = {batch: _extras(source.config, ops, built, batch, meter) for batch in {row["batch"] for row in rows}}
    return [_whole(whole, row, extras[row["batch"]], collective_us) for row in rows]


def _whole(
    whole: ModelConfig, row: dict[str, Any], extras: tuple[dict[str, Any], Sequence[float]], collective_us: float
) -> dict[str, Any]:
    """One row of the report, in seconds of a step."""
    dense, mixes = extras
    seconds = {kind: figure["seconds"] for kind, figure in row["layers"].items()}
    parts = {
        "kda": len(whole.kda_layers) * seconds["kda"],
        "mla": len(whole.mla_layers) * seconds["mla"],
        # A dense layer's experts are swapped for its MLP.
        "dense": whole.first_k_dense * (dense["seconds"] - dense["experts"]),
        "depth": depth_seconds(whole, mixes),
        ENDS: seconds[ENDS],
        "collectives": collectives(whole) * collective_us * 1e-6,
    }
    step = sum(parts.values())
    return {
        "batch": row["batch"],
        "context": row["context"],
        "seconds": step,
        "parts": parts,
        "tokens_per_s": row["batch"] / step,
    }


def collectives(whole: ModelConfig) -> int:
    """Collectives of one step."""
    return COLLECTIVES_A_LAYER * whole.num_layers + COLLECTIVES_AROUND


def depth_seconds(whole: ModelConfig, mixes: Sequence[float]) -> float:
    """What mixing over all stored blocks takes more than over one; `mixes[n]` is the time of n blocks, n >= 1."""
    size = whole.attn_res_block_size
    if size is None:
        return 0.0
    depths = [max(ceil(layer / size), 1) for layer in range(whole.num_layers)]
    depths += [layer // size + 1 for layer in range(whole.num_layers)]
    depths.append(ceil(whole.num_layers / size))
    return sum(mixes[depth] - mixes[1] for depth in depths)


def _extras(
    config: ModelConfig, ops: BoundOps, built: BuiltEngine, batch: int, meter: Meter
) -> tuple[dict[str, Any], list[float]]:
    """A dense layer's MLP beside the experts it stands in for, and mixes over 1, 2, … blocks (0 first, unused)."""
    layout = built.runner.arena.layout
    like = {"dtype": layout.dtype, "device": built.runner.arena.pages.device}
    x = torch.randn(batch, config.hidden_size, **like)
    dense_config = replace(config, first_k_dense=1)
    reader = GeneratedReader(GeneratedModel.of("dense", dense_config), like["device"], layout.dtype)
    mlp = dense_mlp(Build(dense_config, ops, reader, like["device"], layout.dtype, ParallelPlan()), 0)
    moe = built.runner.model.layers[0].mlp  # type: ignore[attr-defined]
    times = {
        "seconds": meter.timer.alone([lambda: mlp(x)]),
        "experts": meter.timer.alone([lambda: moe(x)]),
    }
    return times, _mixes(config, ops, x, meter)


def _mixes(config: ModelConfig, ops: BoundOps, x: torch.Tensor, meter: Meter) -> list[float]:
    size, eps = config.attn_res_block_size, config.rms_norm_eps
    if size is None:
        return [0.0]
    mix, most = ops.fn("attn_res_mix"), ceil(full_size_config().num_layers / size)
    blocks = torch.randn(most, *x.shape, dtype=x.dtype, device=x.device)
    key = torch.ones(x.shape[1], device=x.device)
    norm, prefix = torch.ones_like(x[0]), x.clone()
    times = [
        meter.timer.alone([lambda n=n: mix(prefix, x, blocks, n, False, False, key, norm, eps, eps)])
        for n in range(1, most + 1)
    ]
    return [0.0, *times]
