"""What a stored state depends on besides its tokens, as one name: another model's states must never be found."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from typing import Any

import torch

from k3hal import __version__
from k3hal.dispatch.plan import DispatchPlan
from k3hal.dispatch.select import Decision
from k3hal.engine.cache.layout import CacheLayout
from k3hal.model.checkpoint import Checkpoint
from k3hal.model.generated import GENERATOR_VERSION, GeneratedModel

_SAMPLES = 4096
_SAMPLE_BYTES = 256


def fingerprint(
    checkpoint: Checkpoint | GeneratedModel,
    layout: CacheLayout,
    plan: DispatchPlan,
    *,
    unit: int,
    norm_eps: float,
    dates: bool,
) -> str:
    """32 hex digits from the program's version, the weights, where everything lies in memory, and who computes what.

    `unit` is the match unit, in which the objects are named.

    Weights are known by their names, shapes and places and by a sample of their bytes; with `dates` also by when their
    files were written, which catches any change and makes a copy another model. Generated ones are known by their name,
    seed and generator, and by the device architecture, whose random numbers they are.
    """
    facts: dict[str, Any] = {
        "version": __version__,
        "ranks": 1,
        "layout": {name: str(value) for name, value in dataclasses.asdict(layout).items()},
        "pages": (layout.page_bytes, layout.pages_per_slot),
        "unit": unit,
        "norm_eps": norm_eps,
        "plan": list(_providers(plan)),
        "config": str(checkpoint.config),
        "weights": _weights(checkpoint, plan.device.arch, dates=dates),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _providers(plan: DispatchPlan) -> Iterable[list[Any]]:
    for entry in plan.entries:
        request = entry.request
        yield [request.op, list(request.layers or ()), request.phase, *_names(entry.decision)]


def _names(decision: Decision) -> Iterable[str]:
    yield decision.provider
    for op, part in decision.parts.items():
        yield from (f"{op}={name}" for name in _names(part))


def _weights(checkpoint: Checkpoint | GeneratedModel, device: str, *, dates: bool) -> str:
    digest = hashlib.sha256()
    if isinstance(checkpoint, GeneratedModel):
        facts = (checkpoint.name, checkpoint.seed, GENERATOR_VERSION, device, torch.__version__)
        return hashlib.sha256(repr(facts).encode()).hexdigest()
    tensors = sorted(checkpoint.tensors.values(), key=lambda tensor: (tensor.shard, tensor.offset))
    for tensor in tensors:
        digest.update(repr(tuple(tensor)).encode())
    shards: dict[str, int] = {}
    try:
        for tensor in tensors[:: max(len(tensors) // _SAMPLES, 1)]:
            if tensor.shard not in shards:
                shards[tensor.shard] = os.open(checkpoint.path / tensor.shard, os.O_RDONLY)
                if dates:
                    digest.update(str(os.fstat(shards[tensor.shard]).st_mtime_ns).encode())
            middle = tensor.offset + max(tensor.nbytes - _SAMPLE_BYTES, 0) // 2
            digest.update(os.pread(shards[tensor.shard], min(_SAMPLE_BYTES, tensor.nbytes), middle))
    finally:
        for fd in shards.values():
            os.close(fd)
    return digest.hexdigest()
