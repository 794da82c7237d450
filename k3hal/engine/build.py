"""From a MODEL argument and options to an engine that is ready to start."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from k3hal.checkpoints import open_model, resolve_model, tokenizer_folder
from k3hal.dispatch.assemble import build_selector
from k3hal.dispatch.device import DeviceDescription
from k3hal.dispatch.plan import BoundOps, DispatchPlan, make_plan
from k3hal.dispatch.plan_file import load_plan
from k3hal.dispatch.plan_pin import pin_plan
from k3hal.dispatch.probe import probe
from k3hal.dispatch.runtime import DeviceRuntime, runtime_for
from k3hal.engine.async_engine import AsyncEngine
from k3hal.engine.cache.arena import CacheArena
from k3hal.engine.cache.layout import CacheLayout
from k3hal.engine.cache.prefix import PrefixCache
from k3hal.engine.core import EngineCore
from k3hal.engine.generation_config import read_generation_config
from k3hal.engine.graphs import GraphLimits, not_capturable
from k3hal.engine.interface import EngineInfo
from k3hal.engine.memory import MemoryPlan
from k3hal.engine.options import EngineOptions
from k3hal.engine.room import Room
from k3hal.engine.runner import ModelRunner
from k3hal.engine.sampler import Sampler
from k3hal.engine.sampling import GenerationDefaults
from k3hal.engine.scheduler import Scheduler
from k3hal.engine.staging import Staging
from k3hal.engine.tier.build import Tier, build_tier
from k3hal.errors import CheckpointError, UsageError
from k3hal.model.checkpoint import Checkpoint
from k3hal.model.config import ModelConfig
from k3hal.model.generated import GeneratedModel, GeneratedReader
from k3hal.model.k3 import K3Model
from k3hal.model.modelslim_reader import reader_of
from k3hal.model.progress import progress_bar
from k3hal.model.reader import WeightReader
from k3hal.model.requests import model_requests
from k3hal.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "float8_e4m3fn"}
_BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A loaded model with everything around it. `generation_defaults` maps `SamplingParams` names to values."""

    engine: AsyncEngine
    runner: ModelRunner
    tokenizer: Tokenizer
    model_name: str
    generation_defaults: Mapping[str, Any]
    plan: DispatchPlan
    memory: MemoryPlan


def build_engine(model: str | None = None, **options: Any) -> BuiltEngine:
    """Load `model`, what `resolve_model` takes, with `EngineOptions`' names as keywords.

    The engine is not started. Everything that can be refused is refused before the weights are read: raises
    `UsageError`, `ConfigError`, `CheckpointError`, `DispatchError`, `PlanError`, `UnsupportedError` or `CapacityError`.
    """
    return build(resolve_model(model), EngineOptions.of(**options))


def build(source: Path | GeneratedModel, options: EngineOptions) -> BuiltEngine:
    """As `build_engine`, from a resolved model and checked options."""
    device = probe(options.device)
    runtime = runtime_for(device)
    checkpoint = _opened(source, options)
    config, folder = checkpoint.config, tokenizer_folder(source)
    tokenizer = _tokenizer(Path(options.tokenizer or folder), config)
    defaults, end_ids = read_generation_config(folder, config.vocab_size)
    dtype, kv_dtype = choose_dtypes(options, device)
    plan = _plan(config, options, device, checkpoint.name, dtype, kv_dtype)
    layout = CacheLayout.of(config, dtype, kv_dtype)
    capturable = _capturable(options, plan, runtime)
    room = Room(checkpoint, layout, options, runtime, dtype, graphs=capturable)
    ops, where = plan.bind(runtime.beside), torch.device(device.torch_device)
    tier = build_tier(options, layout, runtime, checkpoint, plan)
    try:
        loaded = room.load(lambda: _load(checkpoint, ops, where, dtype))
        staging = Staging(where, runtime)
        sampler = Sampler(config.vocab_size, options.num_seqs, where, ops.fn("sample"), staging)

        def make(arena: CacheArena, max_model_len: int) -> ModelRunner:
            mover = tier.mover(arena, runtime) if tier else None
            pages = -(-max_model_len // layout.page_tokens)
            limits = GraphLimits(options.num_seqs, pages, drafts=options.num_drafts) if capturable else None
            return ModelRunner(
                loaded, arena, sampler, ops.fn("step_metadata"), ops.fn("copy_pages"), mover,
                staging=staging, runtime=runtime, graphs=limits,
            )  # fmt: skip

        runner, memory = room.fit(make, ModelRunner.prepare)
    except BaseException:
        room.release()
        if tier:
            tier.connector.close()
        raise
    logger.info("memory on %s: %s", device.id, memory)
    info = EngineInfo(
        max_model_len=memory.max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=tuple(sorted({*config.eos_token_ids, *end_ids, *tokenizer.eos_ids})),
        max_num_seqs=options.num_seqs,
        max_num_batched_tokens=room.tokens,
        max_queue=options.queue,
        device=device.id,
    )
    core = assemble_core(runner, runner.arena, info, defaults, options, tier)
    return BuiltEngine(
        AsyncEngine(core, room.release), runner, tokenizer, checkpoint.name, dataclasses.asdict(defaults), plan, memory
    )


def estimate_memory(source: Path | GeneratedModel, options: EngineOptions) -> tuple[DeviceDescription, MemoryPlan]:
    """The device that `build` would take and how it would divide its memory, as far as is known before anything is
    loaded. Raises as `build` does before that."""
    device = probe(options.device)
    dtype, kv_dtype = choose_dtypes(options, device)
    checkpoint = _opened(source, options)
    layout, runtime = CacheLayout.of(checkpoint.config, dtype, kv_dtype), runtime_for(device)
    graphs = options.graphs and runtime.supports_graphs
    return device, Room(checkpoint, layout, options, runtime, dtype, graphs=graphs).estimate


def _opened(source: Path | GeneratedModel, options: EngineOptions) -> Checkpoint | GeneratedModel:
    """The source checked, its config as the options say."""
    return open_model(
        source,
        mla_latent_norm_eps=options.mla_latent_norm_eps,
        expert_activations=options.expert_activations,
    )


def assemble_core(
    runner: ModelRunner,
    arena: CacheArena,
    info: EngineInfo,
    defaults: GenerationDefaults,
    options: EngineOptions,
    tier: Tier | None = None,
) -> EngineCore:
    """Cache and scheduler over an arena, and the core that drives them."""
    cache = PrefixCache(
        arena.layout.geometry,
        arena.num_slots,
        info.max_num_seqs,
        info.max_model_len,
        policy=options.policy(),
        match_unit=options.prefix_match_unit,
        seed=tier.seed if tier else None,
        connector=tier.connector if tier else None,
    )
    scheduler = Scheduler(
        cache,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_queue=info.max_queue,
        drafter=options.drafter(),
    )
    return EngineCore(scheduler, runner, info, defaults, options.depth(asynchronous=runner.asynchronous))


def _capturable(options: EngineOptions, plan: DispatchPlan, runtime: DeviceRuntime) -> bool:
    """Whether decoding runs through graphs: by the options, on a device that has them, by what was chosen."""
    if not (options.graphs and runtime.supports_graphs):
        return False
    unsafe = not_capturable(plan)
    if unsafe:
        logger.warning("decoding runs without graphs: %s may not be captured", ", ".join(unsafe))
    return not unsafe


def choose_dtypes(options: EngineOptions, device: DeviceDescription) -> tuple[torch.dtype, torch.dtype]:
    """The activations' and the KV cache's dtype.

    `auto` is the checkpoint's bfloat16, but float32 on a CPU without bfloat16 arithmetic. The KV cache follows unless
    `fp8` is asked for. Raises `UsageError` for a KV cache in bfloat16 under float32 activations.
    """
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(options.dtype)
    if dtype is None:
        slow = device.vendor == "cpu" and not device.features & _BF16_FEATURES
        dtype = torch.float32 if slow and options.kv_cache_dtype != "bf16" else torch.bfloat16
    if options.kv_cache_dtype == "fp8":
        return dtype, torch.float8_e4m3fn
    if options.kv_cache_dtype == "bf16" and dtype != torch.bfloat16:
        raise UsageError(
            "kv_cache_dtype bf16 needs dtype bfloat16", hint="use kv_cache_dtype auto or fp8 with dtype float32"
        )
    return dtype, dtype


def _tokenizer(folder: Path, config: ModelConfig) -> Tokenizer:
    tokenizer = Tokenizer.from_dir(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} ids, the model only {config.vocab_size}",
            hint="use the tokenizer the model was made with",
        )
    return tokenizer


def _plan(
    config: ModelConfig,
    options: EngineOptions,
    device: DeviceDescription,
    name: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> DispatchPlan:
    """The dispatch plan: a saved one pinned, or made under the policy in force."""
    drafts = options.draft is not None
    requests = model_requests(config, _DTYPE_NAMES[dtype], _DTYPE_NAMES[kv_dtype], drafts=drafts)
    if options.plan is not None and options.ops:
        raise UsageError("ops and plan both say what runs", hint="give one of them")
    selector = build_selector(options.ops, options.fallback)
    if options.plan is not None:
        saved = load_plan(options.plan)
        return pin_plan(saved, requests, selector.registry, model=name, device=device, dtype=_DTYPE_NAMES[dtype])
    return make_plan(requests, selector, model=name, device=device, dtype=_DTYPE_NAMES[dtype])


def _load(checkpoint: Checkpoint | GeneratedModel, ops: BoundOps, device: torch.device, dtype: torch.dtype) -> K3Model:
    generated = isinstance(checkpoint, GeneratedModel)
    label = f"{'generating' if generated else 'loading'} {checkpoint.name}"
    with progress_bar(label, checkpoint.total_bytes) as progress:
        if generated:
            logger.warning("%s: %s", checkpoint.name, checkpoint.notice)
            reader = GeneratedReader(checkpoint, device, dtype, progress)
            return _model(checkpoint.config, ops, reader, device, dtype)
        with reader_of(checkpoint, device, dtype, progress) as reader:
            return _model(checkpoint.config, ops, reader, device, dtype)


def _model(
    config: ModelConfig, ops: BoundOps, reader: WeightReader | GeneratedReader, device: torch.device, dtype: torch.dtype
) -> K3Model:
    model = K3Model.load(config, ops, reader, device=device, dtype=dtype)
    reader.finish()
    return model
