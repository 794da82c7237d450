"""`k3hal bench slice`: what each kind of layer takes, beside the floors of its operators."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from k3hal.bench.engine import providers
from k3hal.bench.machine import circumstances
from k3hal.bench.slice_calls import CallRecorder
from k3hal.bench.slice_engine import engine_steps
from k3hal.bench.slice_figures import Known, Meter
from k3hal.bench.slice_modelled import modelled
from k3hal.bench.slice_returning import returning_prompts
from k3hal.bench.slice_tables import why_not
from k3hal.bench.slice_times import SliceTimer
from k3hal.bench.slice_work import Space, Work, decode_batches, kinds_of, prefill_batch
from k3hal.checkpoints import open_model, resolve_model
from k3hal.debug.ceilings import measure_ceilings
from k3hal.dispatch.observe import observing
from k3hal.dispatch.probe import probe
from k3hal.dispatch.runtime import runtime_for
from k3hal.engine.build import BuiltEngine, build
from k3hal.engine.cache.layout import CacheLayout
from k3hal.engine.options import EngineOptions
from k3hal.engine.room import weight_bytes
from k3hal.errors import UnsupportedError, UsageError
from k3hal.model.checkpoint import Checkpoint
from k3hal.model.generated import GeneratedModel
from k3hal.model.k3 import K3Model

SCHEMA = "k3hal.bench_slice/1"
_ROTATED = 4
"""Steps that decode other sequences in turn."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceBench:
    """What to measure. `options` are the engine's; `collective_us` is what one collective takes in the modelled
    figures; `engine_prompt` tokens of each prompt in real steps of the engine, 0 for none of them; `cached_prefix`
    tokens of prompts that come again with other tails; no row begins later than `limit` seconds after the start."""

    model: str = "k3-slice:4@tp8"
    batch: tuple[int, ...] = (1, 8, 64, 256)
    context: tuple[int, ...] = (4096, 131072, 1048576)
    prefill: tuple[int, ...] = (8192, 65536)
    collective_us: float = 12.0
    operators: bool = True
    engine_prompt: int = 256
    cached_prefix: tuple[int, ...] = ()
    seconds: float = 0.05
    limit: float = 86_400.0
    options: EngineOptions = dataclasses.field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        for name in ("batch", "context", "prefill", "cached_prefix"):
            if any(value < 1 for value in getattr(self, name)):
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} needs numbers of at least 1", hint=f"like {flag} 8,64")
        if not self.batch or not (self.context or self.prefill):
            raise UsageError("there is nothing to measure", hint="give --batch and --context, or --prefill")
        if not 0 <= self.collective_us < 1e6:
            raise UsageError(f"--collective-us is {self.collective_us:g}", hint="microseconds, at least 0")


def bench_slice(settings: SliceBench, say: Say) -> dict[str, Any]:
    """The report, without its schema. Raises what building an engine raises, and `UsageError`."""
    before = circumstances()
    clock = _Clock(settings.limit, say)
    say = clock.say
    device = probe(settings.options.device)
    recorder = CallRecorder()
    source = open_model(resolve_model(settings.model), mla_latent_norm_eps=settings.options.mla_latent_norm_eps)
    say(f"building {source.name} on {device.id}")
    begun = time.perf_counter()
    with observing(recorder):
        built = _build(source, settings)
    runtime = runtime_for(device)
    runtime.synchronize()
    seconds = time.perf_counter() - begun
    say(f"built in {seconds:.1f} s; {built.memory}")
    steps = engine_steps(built, settings.batch, settings.engine_prompt, runtime, say) if settings.engine_prompt else []
    returning = returning_prompts(built, settings.cached_prefix, runtime, say)
    built.engine.close()
    # Timing takes memory beside the engine's, of what its budget leaves.
    runtime.limit(runtime.memory().total)
    model, layout = built.runner.model, built.runner.arena.layout
    if not isinstance(model, K3Model):
        raise UnsupportedError(f"{type(model).__name__} has no layers to measure")
    dtype = str(layout.dtype).removeprefix("torch.")
    ceilings = measure_ceilings(device, dtype)
    say(f"copy {ceilings.bytes_per_s / 1e9:.0f} GB/s, {dtype} matmul {ceilings.flops_per_s / 1e12:.2f} TFLOP/s")
    meter = Meter(recorder, SliceTimer(runtime, settings.seconds), ceilings, operators=settings.operators)
    with torch.inference_mode():
        space = Space.of(built.runner.arena, max(settings.batch))
        decode = _decode(model, space, settings, built, meter, clock)
        prefill = _prefill(model, space, settings, built, meter, clock)
        whole = modelled(source, built, decode, settings.collective_us, meter, recorder)
    return {
        **before,
        "model": _model_facts(source, model, weight_bytes(source, layout.dtype)),
        "device": device.id,
        "accelerator": device.title or device.arch,
        "dtype": dtype,
        "kv_dtype": str(layout.kv_dtype).removeprefix("torch."),
        "settings": _settings(settings, built),
        "providers": providers(built.plan),
        "ceilings": dataclasses.asdict(ceilings),
        "start_up": {"seconds": seconds},
        "memory": built.memory.report(),
        "decode": decode,
        "prefill": prefill,
        "engine": steps,
        "returning": returning,
        "modelled": whole,
    }


class _Clock:
    """Seconds since a measurement began: said before each line, and its limit."""

    def __init__(self, limit: float, say: Say) -> None:
        self._begun, self._limit, self._say = time.perf_counter(), limit, say

    def say(self, line: str) -> None:
        self._say(f"{time.perf_counter() - self._begun:6.1f} s  {line}")

    @property
    def over(self) -> bool:
        return time.perf_counter() - self._begun > self._limit


def _build(source: Checkpoint | GeneratedModel, settings: SliceBench) -> BuiltEngine:
    options = dataclasses.replace(settings.options, max_num_seqs=max(settings.batch))
    return build(source.path if isinstance(source, Checkpoint) else source, options)


def _decode(
    model: K3Model, space: Space, settings: SliceBench, built: BuiltEngine, meter: Meter, clock: _Clock
) -> list[dict[str, Any]]:
    generator = torch.Generator(device=space.pages.device).manual_seed(0)
    known: dict[int, Known] = {batch: {} for batch in settings.batch}
    out = []
    for context in settings.context:
        for batch in settings.batch:
            row: dict[str, Any] = {"batch": batch, "context": context, "needs": _needs(built, batch, context)}
            row["fits"] = space.holds(batch, context) and context <= model.cfg.max_position_embeddings
            if row["fits"] and not clock.over:
                work = Work(model, space, decode_batches(space, batch, context, _ROTATED, generator))
                row["layers"] = {
                    kind: {**meter.decode(calls), "operators": meter.operators(kind, calls, known[batch])}
                    for kind, calls in work.kinds().items()
                }
                row["step"] = meter.decode(work.steps())
            clock.say(_decode_line(row))
            out.append(row)
    return out


def _prefill(
    model: K3Model, space: Space, settings: SliceBench, built: BuiltEngine, meter: Meter, clock: _Clock
) -> list[dict[str, Any]]:
    generator = torch.Generator(device=space.pages.device).manual_seed(1)
    chunk = built.engine.info.max_num_batched_tokens
    out = []
    for tokens in settings.prefill:
        row: dict[str, Any] = {"tokens": tokens, "chunk": chunk, "needs": _needs(built, 1, tokens)}
        row["fits"] = space.holds(1, tokens) and tokens <= model.cfg.max_position_embeddings
        if row["fits"] and not clock.over:
            table = space.table(1, tokens, generator)
            starts = range(0, tokens, chunk)
            parts = []
            for start in starts:
                work = Work(model, space, [prefill_batch(space, start, min(chunk, tokens - start), table)])
                shown = start in (starts[0], starts[-1])
                layers = {kind: meter.prefill(calls[-1], operators=shown) for kind, calls in work.kinds().items()}
                parts.append(
                    {"context": start, "layers": layers, "step": meter.prefill(work.steps()[0], operators=False)}
                )
            row |= {"chunks": parts, **_sums(parts), "tokens_per_s": tokens / sum(p["step"]["seconds"] for p in parts)}
        clock.say(_prefill_line(row))
        out.append(row)
    return out


def _sums(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds and floors over all chunks, of each kind of layer and of the whole step."""

    def total(figures: list[dict[str, Any]]) -> dict[str, float]:
        return {key: sum(figure[key] for figure in figures) for key in ("seconds", "floor")}

    kinds = parts[0]["layers"]
    layers = {kind: total([part["layers"][kind] for part in parts]) for kind in kinds}
    return {"layers": layers, "step": total([part["step"] for part in parts])}


def _needs(built: BuiltEngine, batch: int, context: int) -> int:
    """Bytes of the memory that so many sequences of so many tokens take with all that is not cache."""
    layout: CacheLayout = built.runner.arena.layout
    return built.memory.needs.total + layout.runs_for(batch, context) * layout.run_bytes


def _model_facts(source: Checkpoint | GeneratedModel, model: K3Model, weights: int) -> dict[str, Any]:
    kinds = {kind: len(layers) for kind, layers in kinds_of(model).items()}
    notice = source.notice if isinstance(source, GeneratedModel) else ""
    return {"name": source.name, "notice": notice, "layers": kinds, "weights": weights}


def _settings(settings: SliceBench, built: BuiltEngine) -> dict[str, Any]:
    fields = (field.name for field in dataclasses.fields(SliceBench))
    out: dict[str, Any] = {name: getattr(settings, name) for name in fields if name not in ("model", "options")}
    options = {name: getattr(settings.options, name) for name in ("memory_budget", "async_depth", "graphs")}
    return {**out, **options, "max_num_batched_tokens": built.engine.info.max_num_batched_tokens}


def _decode_line(row: dict[str, Any]) -> str:
    head = f"decode {row['batch']} x {row['context']}: "
    if why := why_not(row):
        return head + why
    times = [f"{kind} {1e6 * layer['seconds']:.1f} us ({layer['ratio']:.2f}x)" for kind, layer in row["layers"].items()]
    return head + ", ".join([*times, f"step {1e6 * row['step']['seconds']:.1f} us ({row['step']['ratio']:.2f}x)"])


def _prefill_line(row: dict[str, Any]) -> str:
    head = f"prefill {row['tokens']}: "
    if why := why_not(row):
        return head + why
    times = [f"{kind} {1e3 * layer['seconds']:.2f} ms" for kind, layer in row["layers"].items()]
    return head + ", ".join([*times, f"{row['tokens_per_s']:.0f} tokens/s"])
