"""What the `op` verbs ask about: the model's operators, and one operator's class of calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3hal.dispatch.call import PHASES, Call, DimValue, Phase
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.words import nearest
from k3hal.errors import UsageError

if TYPE_CHECKING:
    from k3hal.dispatch.operator import Operator
    from k3hal.dispatch.plan import OpRequest
    from k3hal.model.config_parts import ExpertActivations

DTYPES = {"auto": "bfloat16", "bfloat16": "bfloat16", "float32": "float32"}
KV_DTYPES = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
_ROUNDING: tuple[ExpertActivations, ...] = ("auto", "mxfp8")
FULL_SIZE = "kimi-k3"
_WORDS: dict[str, DimValue] = {"true": True, "false": False, "none": None}


def activation_dtype(word: str | None) -> str:
    """A `--dtype` word as selection names it; `auto` is what the full-size model runs in."""
    if (word or "auto") not in DTYPES:
        raise UsageError(f"--dtype is {word!r}", hint=f"it takes {', '.join(DTYPES)}")
    return DTYPES[word or "auto"]


def cache_dtype(word: str | None, dtype: str) -> str:
    """A `--kv-cache-dtype` word as selection names it; `auto` is the activations' dtype."""
    if word in (None, "auto"):
        return dtype
    if word not in KV_DTYPES:
        raise UsageError(f"--kv-cache-dtype is {word!r}", hint=f"it takes auto, {', '.join(KV_DTYPES)}")
    return KV_DTYPES[word]


def rounding(word: str | None) -> ExpertActivations:
    """An `--expert-activations` word."""
    for choice in _ROUNDING:
        if choice == (word or "auto"):
            return choice
    raise UsageError(f"--expert-activations is {word!r}", hint=f"it takes {', '.join(_ROUNDING)}")


def requests_of(
    model: str | None, dtype: str, kv_dtype: str, tp: int, expert_activations: ExpertActivations = "auto"
) -> list[OpRequest]:
    """The operators of a model (a directory or its config.json; None: the full-size K3) on one rank of `tp`."""
    from k3hal.checkpoints import full_size_config, generated_model
    from k3hal.model.config import ModelConfig
    from k3hal.model.requests import model_requests

    if model is not None and (generated := generated_model(model)):
        config = generated.config
    elif model is not None:
        if not Path(model).exists():
            raise UsageError(f"model {model!r} is neither a directory nor a config.json")
        config = ModelConfig.from_json(Path(model))
    else:
        config = full_size_config()
    config = config.with_expert_activations(expert_activations)
    heads = (config.num_heads, config.kda_heads)
    if tp < 1 or any(count % tp for count in heads):
        raise UsageError(
            f"--tp is {tp}", hint=f"it must divide the model's {' and '.join(map(str, sorted({*heads})))} heads"
        )
    return model_requests(config, dtype, kv_dtype, tp)


def call_of(operator: Operator, device: DeviceDescription, dtype: str, phase: str | None, dims: Sequence[str]) -> Call:
    """The class of calls the full-size model makes of an operator, with the given dims put over it.

    What it calls under any `--expert-activations` counts. An operator it does not call itself gets the dims of a
    coarser one it is part of, else those of its samples.
    """
    wanted = None if phase is None else _phase(phase)
    requests = [request for choice in _ROUNDING for request in requests_of(None, dtype, dtype, 1, choice)]
    base, found = _known_dims(operator, requests, wanted)
    asked = parse_dims(dims)
    known = {*base, *(name for sample in operator.samples() for name in sample.dims)}
    for name in asked:
        if name not in known:
            raise UsageError(f"--shape: {operator.name} has no dim {name!r}", hint=nearest(name, known))
    merged = {**base, **asked}
    try:
        operator.parts_of(merged)
    except KeyError as error:
        raise UsageError(f"--shape: {operator.name} has no parts for {error}") from error
    return Call(operator.name, device, dtype, wanted or found, merged)


def _phase(word: str) -> Phase:
    for phase in PHASES:
        if phase == word:
            return phase
    raise UsageError(f"--phase is {word!r}", hint=f"it takes {', '.join(PHASES)}")


def _known_dims(
    operator: Operator, requests: Iterable[OpRequest], phase: Phase | None
) -> tuple[dict[str, DimValue], Phase]:
    from k3hal.dispatch.registry import get_operator

    requests = [r for r in requests if phase in (None, "any", r.phase)]
    for request in requests:
        if request.op == operator.name:
            return dict(request.dims), request.phase
    for request in requests:
        parts = get_operator(request.op).parts_of(request.dims)
        if operator.name in parts:
            return dict(parts[operator.name]), request.phase
    samples = sorted(operator.samples(), key=lambda sample: "k3" not in sample.tags)
    return (dict(samples[0].dims), samples[0].phase) if samples else ({}, "any")


def parse_dims(items: Sequence[str]) -> dict[str, DimValue]:
    """`heads=12,bounded=true` (also over several items) as dims. Raises `UsageError` naming the piece."""
    out: dict[str, DimValue] = {}
    for piece in filter(None, (part.strip() for item in items for part in item.split(","))):
        name, sep, text = (word.strip() for word in piece.partition("="))
        if not sep or not name.isidentifier() or not text:
            raise UsageError(f"--shape: {piece!r} is not NAME=VALUE", hint='like "heads=12,kv_dtype=float8_e4m3fn"')
        out[name] = value = _value(text)
        if isinstance(value, int | float) and not 0 <= value < 1 << 63:
            raise UsageError(f"--shape: {name} is {text[:40]}", hint="numbers from 0 to 2^63 - 1")
    return out


def _value(text: str) -> DimValue:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def device_json(device: DeviceDescription, packages: Iterable[str]) -> dict[str, Any]:
    """A device description, with the versions of the packages named."""
    return {
        "device": device.id,
        "title": device.title,
        "vendor": device.vendor,
        "arch": device.arch,
        "arch_number": device.arch_number,
        "present": device.present,
        "torch_device": device.torch_device,
        "memory_bytes": device.memory_bytes,
        "bandwidth": device.bandwidth,
        "flops": dict(device.flops),
        "features": sorted(device.features),
        "packages": {name: device.packages[name] for name in sorted(packages) if name in device.packages},
        "source": device.source,
        "notes": list(device.notes),
    }
