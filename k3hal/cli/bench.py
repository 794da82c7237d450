"""`k3hal bench`: how fast engine, dispatch and servers are, and beside what."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from k3hal.cli.bench_cache import bench_cache
from k3hal.cli.bench_serve import bench_serve
from k3hal.cli.bench_slice import bench_slice
from k3hal.cli.common import DType, Json, Ops, Save
from k3hal.cli.output import print_json
from k3hal.errors import UsageError

app = typer.Typer(
    no_args_is_help=True, help="Measure the engine, its cache and dispatch on this machine, and servers under load."
)
app.command("cache")(bench_cache)
app.command("serve")(bench_serve)
app.command("slice")(bench_slice)


@app.command("engine")
def bench_engine(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Checkpoint directory; default: a small built-in one.")
    ] = None,
    dtype: DType = None,
    ops: Ops = None,
    concurrency: Annotated[
        str, typer.Option("--concurrency", metavar="N,...", help="How many requests at once.")
    ] = "1,16",
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", metavar="N", help="Tokens of each prompt.")] = 32,
    output_tokens: Annotated[int, typer.Option("--output-tokens", metavar="N", help="Tokens of each answer.")] = 32,
    repeat: Annotated[int, typer.Option("--repeat", metavar="R", help="Timed runs of each engine.")] = 5,
    peer: Annotated[
        str | None, typer.Option("--peer", metavar="transformers", help="Also measure this on the same weights.")
    ] = None,
    breakdown: Annotated[bool, typer.Option("--breakdown", help="Also show the parts of a decode step.")] = False,
    save: Save = None,
    as_json: Json = False,
) -> int:
    """Measure decode and prefill of MODEL on the CPU, beside the floor of the memory bandwidth and beside a peer.

    Exits with 1, without a ratio, when the peer's greedy outputs are not ours.
    """
    from k3hal.bench.engine import SCHEMA, EngineBench
    from k3hal.bench.engine import bench_engine as measure
    from k3hal.bench.save import check_targets, tables_of

    check_targets(save or [])
    settings = EngineBench(
        model=model,
        dtype=dtype or "auto",
        ops=ops,
        concurrency=_numbers(concurrency),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        repeat=repeat,
        peer=peer,
    )
    report = measure(settings, _say)
    tables = tables_of({"schema": SCHEMA, **report})
    _put_out(SCHEMA, report, [t.text() for t in (tables if breakdown else tables[:1])], save, as_json)
    return 1 if report["outputs_equal"] is False else 0


@app.command("dispatch")
def bench_dispatch(
    repeat: Annotated[int, typer.Option("--repeat", metavar="R", help="Pairs of timed runs.")] = 51,
    ops: Ops = None,
    save: Save = None,
    as_json: Json = False,
) -> int:
    """Measure what a bound operator costs over its provider's own function, and how long a plan takes to make.

    Exits with 1 when a bound call costs more than its limit.
    """
    from k3hal.bench.dispatch import SCHEMA
    from k3hal.bench.dispatch import bench_dispatch as measure
    from k3hal.bench.save import check_targets, tables_of

    check_targets(save or [])
    report = measure(repeat, ops, _say)
    tables = tables_of({"schema": SCHEMA, **report})
    _put_out(SCHEMA, report, [t.text() for t in tables], save, as_json)
    return 0 if report["within_limit"] else 1


@app.command("dump")
def bench_dump(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Checkpoint directory; default: a small built-in one.")
    ] = None,
    dtype: DType = None,
    ops: Ops = None,
    concurrency: Annotated[
        str, typer.Option("--concurrency", metavar="N,...", help="How many requests at once.")
    ] = "1,16",
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", metavar="N", help="Tokens of each prompt.")] = 32,
    repeat: Annotated[int, typer.Option("--repeat", metavar="R", help="Rounds; each arm has one block in each.")] = 21,
    save: Save = None,
    as_json: Json = False,
) -> int:
    """Measure, on the CPU, what K3HAL_DUMP costs a decode step of MODEL while it does not fire.

    Exits with 1 when `when=nonfinite` costs more than its limit.
    """
    from k3hal.bench.dump import SCHEMA, DumpBench
    from k3hal.bench.dump import bench_dump as measure
    from k3hal.bench.save import check_targets, tables_of

    check_targets(save or [])
    settings = DumpBench(
        model=model,
        dtype=dtype or "auto",
        ops=ops,
        concurrency=_numbers(concurrency),
        prompt_tokens=prompt_tokens,
        rounds=repeat,
    )
    report = measure(settings, _say)
    tables = tables_of({"schema": SCHEMA, **report})
    _put_out(SCHEMA, report, [t.text() for t in tables], save, as_json)
    return 0 if report["within_limit"] else 1


def _put_out(
    schema: str, report: Mapping[str, Any], texts: list[str], targets: list[Path] | None, as_json: bool
) -> None:
    from k3hal.bench.save import save

    for target in targets or []:
        save({"schema": schema, **report}, target)
    if as_json:
        print_json(schema, report)
    else:
        typer.echo("\n\n".join(texts))


def _numbers(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise UsageError(f"--concurrency is {text!r}", hint="it takes numbers like 1,16")
    return tuple(int(word) for word in words)


def _say(line: str) -> None:
    typer.echo(line, err=True)
