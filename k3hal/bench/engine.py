"""`k3hal bench engine`: decode, prefill and step times of our engine on a CPU, beside a peer on the same weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k3hal.bench.bandwidth import Bandwidth, BandwidthMeter
from k3hal.bench.floor import StepBytes, step_bytes
from k3hal.bench.machine import circumstances
from k3hal.bench.ours import Ours, full_decodes
from k3hal.bench.peer import load_peer
from k3hal.bench.runs import Contender, Difference, Run, first_difference
from k3hal.bench.spread import Spread
from k3hal.bench.steps import PARTS, Step
from k3hal.checkpoints import open_model, resolve_model
from k3hal.dispatch.plan import DispatchPlan
from k3hal.engine.build import build_engine
from k3hal.engine.options import DEFAULT_MAX_NUM_SEQS
from k3hal.errors import UsageError
from k3hal.model.requests import PAGE_TOKENS

SCHEMA = "k3hal.bench_engine/1"

_DTYPE = {"torch.float32": "float32", "torch.bfloat16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBench:
    """What to measure. `peer` None measures our engine alone; tokens of the prompts are drawn from `seed`."""

    model: str | None = None
    dtype: str = "auto"
    ops: str | None = None
    concurrency: tuple[int, ...] = (1, 16)
    prompt_tokens: int = 32
    output_tokens: int = 32
    repeat: int = 5
    peer: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.concurrency or min(self.concurrency) < 1:
            raise UsageError("--concurrency needs numbers of at least 1", hint="like --concurrency 1,16")
        for name, least in (("prompt_tokens", 1), ("output_tokens", 2), ("repeat", 1)):
            if getattr(self, name) < least:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} is {getattr(self, name)}", hint=f"it is at least {least}")


@dataclass(frozen=True, slots=True)
class Measured:
    """All runs at one concurrency. `theirs` and `difference` are None without a peer; runs are in pairs with one."""

    concurrency: int
    bytes: StepBytes
    ours: list[Run]
    theirs: list[Run] | None
    difference: Difference | None


def bench_engine(settings: EngineBench, say: Callable[[str], None]) -> dict[str, Any]:
    """The report, without its schema. `say` takes progress lines.

    Raises what `build_engine` and `load_peer` raise, and `UsageError` for sizes that measure nothing.
    """
    before = circumstances()
    source = resolve_model(settings.model)
    checkpoint = open_model(source)
    say(f"loading {source.name}")
    built = build_engine(
        str(source),
        device="cpu",
        dtype=settings.dtype,
        ops=settings.ops,
        max_num_seqs=max(*settings.concurrency, DEFAULT_MAX_NUM_SEQS),
        # No larger a cache than the runs fill, beside the page that admission keeps free for each running sequence.
        max_model_len=settings.prompt_tokens + settings.output_tokens + PAGE_TOKENS,
    )
    layout = built.runner.arena.layout
    peer = None
    if settings.peer is not None:
        if not isinstance(source, Path):
            raise UsageError(f"--peer {settings.peer} with {source.name}", hint="a peer reads a checkpoint directory")
        say(f"loading {source.name} into {settings.peer}")
        peer = load_peer(settings.peer, source, layout.dtype)
    ours, meter = Ours(built), BandwidthMeter()
    meter.measure()
    measured = []
    for concurrency in settings.concurrency:
        prompts = draw_prompts(concurrency, settings.prompt_tokens, built.tokenizer.special_base, settings.seed)
        counted, difference = _verify(ours, peer, prompts, settings.output_tokens, say)
        moved = step_bytes(checkpoint, layout, full_decodes(counted.steps, concurrency))
        runs = _alternate(ours, peer, prompts, settings, meter, say)
        measured.append(Measured(concurrency, moved, runs[0], runs[1], difference))
    built.engine.close()
    return {
        **before,
        "model": {
            "name": source.name,
            "architecture": checkpoint.config.architecture,
            "weights": checkpoint.total_bytes,
        },
        "device": built.plan.device.id,
        "dtype": _DTYPE[str(layout.dtype)],
        "settings": {k: v for k, v in dataclasses.asdict(settings).items() if k not in ("model", "dtype")},
        "providers": providers(built.plan),
        **_results(measured, meter.result(), settings, peer),
    }


def draw_prompts(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """`count` prompts of `length` ordinary token ids, the same on every machine."""
    return np.random.default_rng(seed).integers(0, vocabulary, (count, length)).tolist()


def providers(plan: DispatchPlan) -> dict[str, str]:
    """What runs each operator; `+ reference` where a composed one leaves a part to its reference."""
    out: dict[str, str] = {}
    for entry in plan.entries:
        partly = entry.decision.composed and entry.decision.reference
        name = entry.decision.provider + (" + reference" if partly else "")
        known = out.get(entry.request.op)
        out[entry.request.op] = name if known in (None, name) else f"{known}, {name}"
    return out


def _verify(
    ours: Ours, peer: Contender | None, prompts: list[list[int]], num_tokens: int, say: Callable[[str], None]
) -> tuple[Run, Difference | None]:
    """One untimed run of each, which also warms them up: our counted run, and where the outputs differ."""
    say(f"{len(prompts)} at once: comparing outputs" if peer else f"{len(prompts)} at once: warming up")
    counted = ours.counted(prompts, num_tokens)
    if peer is None:
        return counted, None
    difference = first_difference(counted.tokens, peer.run(prompts, num_tokens).tokens)
    if difference:
        say(f"outputs differ: {difference}")
    return counted, difference


def _alternate(
    ours: Ours,
    peer: Contender | None,
    prompts: list[list[int]],
    settings: EngineBench,
    meter: BandwidthMeter,
    say: Callable[[str], None],
) -> tuple[list[Run], list[Run] | None]:
    """The timed runs: in each pair both engines run one after the other, and who is first alternates."""
    mine: list[Run] = []
    theirs: list[Run] = []
    for number in range(settings.repeat):
        for contender in (ours, peer) if number % 2 == 0 else (peer, ours):
            if contender is not None:
                (mine if contender is ours else theirs).append(contender.run(prompts, settings.output_tokens))
        meter.measure()
        line = f"{len(prompts)} at once: run {number + 1} of {settings.repeat}: {mine[-1].decode_rate:.1f} tokens/s"
        say(line + (f", {settings.peer} {theirs[-1].decode_rate:.1f}" if theirs else ""))
    return mine, theirs if peer else None


def _results(
    measured: Sequence[Measured], bandwidth: Bandwidth, settings: EngineBench, peer: Contender | None
) -> dict[str, Any]:
    return {
        "bandwidth": {"best": bandwidth.best, **dataclasses.asdict(bandwidth)},
        "outputs_equal": None if peer is None else all(m.difference is None for m in measured),
        "results": [_result(m, bandwidth.best, settings.prompt_tokens) for m in measured],
    }


def _result(m: Measured, bandwidth: float, prompt_tokens: int) -> dict[str, Any]:
    seconds = m.bytes.total / bandwidth
    floor_rate = m.concurrency / seconds
    pairs = zip(m.ours, m.theirs or (), strict=m.theirs is not None)
    ratios = [mine.decode_rate / other.decode_rate for mine, other in pairs] if m.difference is None else []
    floor = {**dataclasses.asdict(m.bytes), "bytes": m.bytes.total, "seconds": seconds, "tokens_per_s": floor_rate}
    return {
        "concurrency": m.concurrency,
        "floor": floor,
        "ours": _summary(m.ours, prompt_tokens, floor_rate),
        "breakdown": breakdown([step for run in m.ours for step in full_decodes(run.steps, m.concurrency)]),
        "peer": None if m.theirs is None else _summary(m.theirs, prompt_tokens, floor_rate),
        "difference": None if m.difference is None else dataclasses.asdict(m.difference),
        "ratio": dataclasses.asdict(Spread.of(ratios)) if ratios else None,
    }


def _summary(runs: Sequence[Run], prompt_tokens: int, floor_rate: float) -> dict[str, Any]:
    """Rates in tokens a second; `ttft` is the mean over a run's prompts, in seconds."""
    decode = Spread.of([run.decode_rate for run in runs])
    return {
        "decode_tokens_per_s": dataclasses.asdict(decode),
        "floor_share": decode.median / floor_rate,
        "prefill_tokens_per_s": dataclasses.asdict(Spread.of([run.prefill_rate(prompt_tokens) for run in runs])),
        "ttft": dataclasses.asdict(Spread.of([float(np.mean(run.first_tokens)) for run in runs])),
    }


def breakdown(steps: Sequence[Step]) -> dict[str, Any]:
    """Where the time of decode steps goes: median seconds and share of all time of each part of a step."""
    total = sum(step.seconds for step in steps)
    times = {name: [step.parts()[name] for step in steps] for name in PARTS}
    share = {name: sum(values) / total for name, values in times.items()}
    return {
        "steps": len(steps),
        "step": dataclasses.asdict(Spread.of([step.seconds for step in steps])),
        "seconds": {name: Spread.of(values).median for name, values in times.items()},
        "share": share,
        "scheduling_and_batch_share": share["scheduling"] + share["batch"],
    }
