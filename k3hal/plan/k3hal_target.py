"""Plans for `k3hal serve`: one device, no recipe's flags, the same document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.words import nearest
from k3hal.errors import UsageError
from k3hal.plan.cache import CacheCost, cache_cost, kv_bytes_of
from k3hal.plan.deployment import Deployment, Fit
from k3hal.plan.flags import Layer, argv_of, settings, settle
from k3hal.plan.gate import Bar
from k3hal.plan.hardware import Hardware
from k3hal.plan.launch import Group, Launch
from k3hal.plan.layout import Layout
from k3hal.plan.memory import GB, GpuMemory, activation_bytes
from k3hal.plan.refusal import RefusedPlanError
from k3hal.plan.traps import misfit_text
from k3hal.plan.weights import ModelWeights, model_config

STRATEGY = "single_device"
_SHARE = {"cpu": 0.5}
_SHARE_ELSEWHERE = 0.9
"""Of the free memory, what `k3hal serve` takes by default."""

_BATCHED_TOKENS, _SEQS, _LONGEST = 2048, 64, 8192
_DEVICES = {"NVIDIA": "cuda", "AMD": "rocm", "Huawei": "npu"}


@dataclass(frozen=True, slots=True)
class Device:
    """Where to serve: the `--device` word, and bytes of memory, all and free."""

    word: str
    memory: float
    free: float
    hardware: Hardware


def device_here(probed: DeviceDescription) -> Device:
    """The probed device; a CPU counts as a node of one."""
    if probed.vendor == "cpu":
        from k3hal.dispatch.host import host_memory

        total, free = host_memory()
    else:
        total = free = probed.memory_bytes
    node = Hardware(probed.id, probed.vendor, probed.arch, 1, round(total / GB, 1))
    return Device(probed.id, total, free, node)


def device_of(hardware: Hardware) -> Device:
    """One accelerator of a machine that is not here."""
    size = hardware.gpu_gb * GB
    return Device(_DEVICES[hardware.brand], size, size, hardware)


def serve_plan(
    device: Device, model: Path | None, user_args: Sequence[str], context: int | None, concurrency: int | None
) -> Deployment:
    """Raises `RefusedPlanError` where the model does not fit one device: `k3hal serve` runs on one."""
    config = model_config(model)
    weights = ModelWeights(config)
    asked = context or min(config.max_position_embeddings, _LONGEST)
    if asked > config.max_position_embeddings:
        raise RefusedPlanError(f"--context {asked} is beyond the model's {config.max_position_embeddings} positions")
    own = ["--device", device.word.partition(":")[0] if device.word.endswith(":0") else device.word]
    wanted = ["--max-model-len", str(asked)] if context else []
    wanted += ["--max-num-seqs", str(concurrency)] if concurrency else []
    if user_args:
        _refuse_foreign_flags(Layer("--set", tuple(user_args)))
    decisions = settle([Layer("device", tuple(own)), Layer("wanted", tuple(wanted)), Layer("set", tuple(user_args))])
    argv = ("k3hal", "serve", str(model) if model else "moonshotai/Kimi-K3", *argv_of(decisions))
    layout = Layout("tp", 1, 1, 1)
    group = Group("server", layout, (Launch("server", 0, 0, argv, {}),), tuple(decisions), ())
    cost = cache_cost(config, layout, kv_bytes_of(group.value("kv-cache-dtype")))
    memory = _memory(device, weights, cost, asked, concurrency or 1)
    if not memory.ok:
        raise RefusedPlanError(
            f"{misfit_text(memory)}; k3hal serve runs on one device",
            hint="serve a smaller checkpoint (--model DIR), or plan with --for vllm",
        )
    return Deployment(
        recipe="k3hal",
        variant=config.expert_format,
        model_id=argv[2],
        image=None,
        hardware=device.hardware,
        strategy=STRATEGY,
        bars=(Bar(1, "k3hal serve runs on one device"),),
        groups=(group,),
        fits=(Fit(round(weights.total / GB, 3), round(device.free / GB, 3), "weights"),),
        memory=(memory,),
        weights=weights,
    )


def _memory(device: Device, weights: ModelWeights, cost: CacheCost, context: int, concurrency: int) -> GpuMemory:
    kv, state = cost.of(context, concurrency)
    config, layout = weights.config, Layout("tp", 1, 1, 1)
    return GpuMemory(
        device=device.free,
        budget=device.free * _SHARE.get(device.word, _SHARE_ELSEWHERE),
        weights=weights.per_gpu(layout, vision_split=True),
        activations=activation_bytes(config, layout, _BATCHED_TOKENS, concurrency),
        graphs=0.0,
        runtime=0.0,
        kv=kv,
        state=state,
        context=context,
        concurrency=concurrency,
        cost=cost,
    )


def _refuse_foreign_flags(layer: Layer) -> None:
    """Raise `UsageError` for a flag that `k3hal serve` does not have."""
    from k3hal.serve.settings import ServeSettings

    known = {f"--{name.replace('_', '-')}" for name in (*ServeSettings.model_fields, "config")}
    for setting in settings(layer):
        if setting.flag not in known:
            raise UsageError(f"--set: k3hal serve has no {setting.flag}", hint=nearest(setting.flag, known))
