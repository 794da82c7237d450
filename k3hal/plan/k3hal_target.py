"""Plans for `k3hal serve`: one device, no recipe's flags, the same document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.words import nearest
from k3hal.engine.options import EngineOptions
from k3hal.errors import UsageError
from k3hal.plan.cache import cache_cost, kv_bytes_of
from k3hal.plan.deployment import Deployment, Fit
from k3hal.plan.flags import Decision, Layer, argv_of, settle
from k3hal.plan.gate import Bar
from k3hal.plan.hardware import Hardware
from k3hal.plan.launch import Group, Launch
from k3hal.plan.layout import Layout
from k3hal.plan.memory import GB, GpuMemory, activation_bytes
from k3hal.plan.refusal import RefusedPlanError
from k3hal.plan.traps import misfit_text
from k3hal.plan.weights import ModelWeights, model_config
from k3hal.serve.settings import ServeSettings
from k3hal.settings import load_settings

STRATEGY = "single_device"
ONE = Layout("tp", 1, 1, 1)
_SHARE_OF_CPU, _SHARE = 0.5, 0.9
"""Of the free memory, what `k3hal serve` takes by default."""

_LONGEST = 8192
"""Tokens of the one sequence that must fit where no length is asked for: the server takes what the cache holds."""

_DEVICES = {"NVIDIA": "cuda", "AMD": "rocm", "Huawei": "npu"}


_NOT_SET = {
    "--device": "use --hardware",
    "--model": "use --model DIR",
    "--config": 'give what the file says by --set "--flag value": it decides about memory',
}
"""Flags of `k3hal serve` that `--set` cannot give, and what does."""


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
    """Raises `RefusedPlanError` where the model does not fit one device, as `k3hal serve` runs on one, and `UsageError`
    for a flag that it does not have or take."""
    weights = ModelWeights(model_config(model))
    decisions, memory = _sized(device, weights, user_args, context, concurrency)
    argv = ("k3hal", "serve", str(model) if model else "moonshotai/Kimi-K3", *argv_of(decisions))
    group = Group("server", ONE, (Launch("server", 0, 0, argv, {}),), tuple(decisions), ())
    if not memory.ok:
        hint = "serve a smaller checkpoint (--model DIR), or plan with --for vllm"
        for fewer, shorter in _smaller(memory):
            if _sized(device, weights, user_args, shorter, fewer)[1].ok:
                hint = f"--concurrency {fewer} --context {shorter} fits"
                break
        raise RefusedPlanError(f"{misfit_text(memory)}; k3hal serve runs on one device", hint=hint)
    return Deployment(
        recipe="k3hal",
        variant=weights.config.expert_format,
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


def _sized(
    device: Device, weights: ModelWeights, user_args: Sequence[str], context: int | None, concurrency: int | None
) -> tuple[list[Decision], GpuMemory]:
    """The server's flags, and the memory they make it take."""
    decisions = settle(_layers(device, user_args, context, concurrency))
    options = _options(decisions)
    limit = weights.config.max_position_embeddings
    longest = options.max_model_len or min(limit, _LONGEST)
    if longest > limit:
        raise RefusedPlanError(f"{longest} tokens are beyond the model's {limit} positions", hint=f"--context {limit}")
    return decisions, _memory(device, weights, options, longest, concurrency or 1)


def _smaller(memory: GpuMemory) -> Iterator[tuple[int, int]]:
    """Sequences at once and tokens of each: fewer, then shorter."""
    for step in range(1, memory.concurrency.bit_length()):
        yield memory.concurrency >> step, memory.context
    for step in range(1, memory.context.bit_length() - 1):  # the server takes no length of 1
        yield 1, memory.context >> step


def _layers(device: Device, user_args: Sequence[str], context: int | None, concurrency: int | None) -> Iterator[Layer]:
    word = device.word.removesuffix(":0")
    yield Layer("device", ("--device", word))
    wanted = {"--max-model-len": context, "--max-num-seqs": concurrency}
    yield Layer("wanted", tuple(text for flag, value in wanted.items() if value for text in (flag, str(value))))
    yield Layer("set", tuple(user_args))


def _options(decisions: Sequence[Decision]) -> EngineOptions:
    """The engine's options as `k3hal serve` would read them."""
    known = {f"--{name.replace('_', '-')}": name for name in (*ServeSettings.model_fields, "config")}
    for decision in decisions:
        flag = decision.chosen.flag
        if flag not in known:
            raise UsageError(f"--set: k3hal serve has no {flag}", hint=nearest(flag, known))
        if decision.chosen.layer == "set" and flag in _NOT_SET:
            raise UsageError(f"--set cannot give {flag}", hint=_NOT_SET[flag])
        if decision.chosen.rest:
            raise UsageError(f"--set {flag} takes one value", hint="repeat it in a --config file of k3hal serve")
        if decision.chosen.value is None:
            raise UsageError(f"--set {flag}: its value is missing", hint=f'write --set "{flag} VALUE"')
    flags = {known[decision.chosen.flag]: decision.chosen.value for decision in decisions}
    return EngineOptions.of(**load_settings(ServeSettings, flags, environ={}).engine_options())


def _memory(device: Device, weights: ModelWeights, options: EngineOptions, context: int, concurrency: int) -> GpuMemory:
    config, on_cpu = weights.config, device.word == "cpu"
    cost = cache_cost(config, ONE, kv_bytes_of(options.kv_cache_dtype))
    kv, state = cost.of(context, concurrency)
    share = _SHARE_OF_CPU if on_cpu else _SHARE
    tokens = options.batched_tokens(on_cpu=on_cpu)
    return GpuMemory(
        device=device.free,
        budget=options.memory_budget * GB if options.memory_budget else device.free * share,
        weights=weights.per_gpu(ONE, vision_split=True),
        activations=activation_bytes(config, ONE, tokens, options.num_seqs),
        graphs=0.0,
        runtime=0.0,
        kv=kv,
        state=state,
        context=context,
        concurrency=concurrency,
        cost=cost,
    )
