"""`k3hal bench slice`: full-size layers, one kind at a time, beside the floors of their operators."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from k3hal.cli.common import (
    Device,
    DType,
    ExpertActivations,
    Graphs,
    Json,
    KvCacheDType,
    MaxNumBatchedTokens,
    MemoryBudget,
    Ops,
    Plan,
    Save,
)
from k3hal.cli.output import print_json
from k3hal.errors import UsageError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


Batches = Annotated[str, typer.Option(metavar="N,...", help="Sequences that decode at once.")]
Contexts = Annotated[
    str, typer.Option(metavar="N,...", help="Tokens of each; k and M are 1024 and 1024².  Empty: no decode.")
]
Prompts = Annotated[str, typer.Option(metavar="N,...", help="Tokens of a prompt.  Empty: no prefill.")]
CollectiveUs = Annotated[float, typer.Option(metavar="US", help="What one collective takes in the modelled figures.")]
Operators = Annotated[bool, typer.Option("--operators/--no-operators", help="Also time each operator by itself.")]
EnginePrompt = Annotated[
    int, typer.Option(metavar="N", help="Prompt tokens in real steps of the engine; 0: none of them.")
]
CachedPrefix = Annotated[
    str, typer.Option(metavar="N,...", help="Tokens of prompts that come again with other tails.  Empty: none.")
]
AsyncDepth = Annotated[int | None, typer.Option(metavar="N", help="Steps of the engine planned at once.")]
SecondsEach = Annotated[float, typer.Option(metavar="S", help="To spend on each timing on a CPU.")]
Limit = Annotated[float, typer.Option(metavar="S", help="Begin no row of the tables after that.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw times against floors as FILE.png and FILE.svg.")]


def bench_slice(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="k3-slice:N, k3-slice:N@tpM or any other model.")
    ] = "k3-slice:4@tp8",
    batch: Batches = "1,8,64,256",
    context: Contexts = "4k,128k,1M",
    prefill: Prompts = "8k,64k",
    collective_us: CollectiveUs = 12.0,
    operators: Operators = True,
    engine_prompt: EnginePrompt = 256,
    cached_prefix: CachedPrefix = "",
    async_depth: AsyncDepth = None,
    graphs: Graphs = None,
    seconds: SecondsEach = 0.05,
    limit: Limit = 86_400.0,
    markdown: Markdown = False,
    plot: Plot = None,
    save: Save = None,
    ops: Ops = None,
    plan: Plan = None,
    device: Device = None,
    dtype: DType = None,
    kv_cache_dtype: KvCacheDType = None,
    expert_activations: ExpertActivations = None,
    memory_budget: MemoryBudget = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    as_json: Json = False,
) -> int:
    """Time each kind of layer of MODEL in decode and prefill, beside the sum of its operators' floors.

    What does not fit the memory is said and left out. Figures for the whole model are modelled from a slice's.
    """
    from k3hal.bench.cache.plot import check_plot
    from k3hal.bench.save import check_targets
    from k3hal.bench.slice import SCHEMA, SliceBench
    from k3hal.bench.slice import bench_slice as measure
    from k3hal.engine.options import EngineOptions

    check_targets(save or [])
    if plot:
        check_plot(plot)
    options = EngineOptions.of(
        device=device, dtype=dtype, kv_cache_dtype=kv_cache_dtype, expert_activations=expert_activations, ops=ops,
        plan=plan, memory_budget=memory_budget,
        max_num_batched_tokens=max_num_batched_tokens, async_depth=async_depth, graphs=graphs,
    )  # fmt: skip
    sizes = {"batch": batch, "context": context, "prefill": prefill, "cached_prefix": cached_prefix}
    settings = SliceBench(
        model=model,
        collective_us=collective_us,
        operators=operators,
        engine_prompt=engine_prompt,
        seconds=seconds,
        limit=limit,
        options=options,
        **{name: _numbers(name, text) for name, text in sizes.items()},
    )
    report = measure(settings, lambda line: typer.echo(line, err=True))
    _put_out({"schema": SCHEMA, **report}, plot, save or [], as_json=as_json, markdown=markdown)
    return 0


def _put_out(
    report: dict[str, Any], plot: Path | None, targets: Sequence[Path], *, as_json: bool, markdown: bool
) -> None:
    from k3hal.bench.save import save, tables_of
    from k3hal.bench.slice_plot import save_plot

    files = save_plot(report, plot) if plot else []
    for target in targets:
        save(report, target)
    if as_json:
        print_json(report["schema"], {**report, "plots": [str(file) for file in files]})
    else:
        tables = tables_of(report)
        typer.echo("\n\n".join(table.markdown() if markdown else table.text() for table in tables))


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    """`4k,128k,1M`; an empty text is no number."""
    out = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        match = re.fullmatch(r"(\d{1,9})([kM]?)", word, re.ASCII)
        if not match:
            raise UsageError(f"--{flag.replace('_', '-')} is {text!r}", hint="it takes numbers like 8,64k,1M")
        out.append(int(match[1]) * _UNITS[match[2].lower()])
    return tuple(out)
