"""`k3hal bench serve`: load on a server, ours or any that speaks OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3hal.cli.common import Json, Save
from k3hal.cli.output import print_json

if TYPE_CHECKING:
    from k3hal.bench.serve.options import ServeBench

BaseUrl = Annotated[
    str | None, typer.Option("--base-url", metavar="URL", help="A running server; default: start one of ours.")
]
Model = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="With --base-url the model's id, else the checkpoint to serve."),
]
Endpoint = Annotated[str, typer.Option("--endpoint", metavar="PATH", help="/v1/completions or /v1/chat/completions.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", metavar="KEY", help="Sent with every request.")]
Dataset = Annotated[str, typer.Option("--dataset", metavar="synthetic|trace:FILE", help="What is asked.")]
NumPrompts = Annotated[int, typer.Option("--num-prompts", metavar="N", help="Requests; of a trace, the first N.")]
InputLen = Annotated[int, typer.Option("--input-len", metavar="N", help="Tokens of a synthetic prompt.")]
OutputLen = Annotated[int, typer.Option("--output-len", metavar="N", help="Tokens asked for, of synthetic prompts.")]
RequestRate = Annotated[
    str | None,
    typer.Option("--request-rate", metavar="R|inf", help="Requests a second.  [default: inf, or the trace's times]"),
]
Burstiness = Annotated[
    float, typer.Option("--burstiness", metavar="X", help="1 is a Poisson process, less is burstier, more smoother.")
]
Concurrency = Annotated[
    int | None,
    typer.Option("--concurrency", "--max-concurrency", metavar="C", help="Hold requests back beyond C at once."),
]
Paced = Annotated[
    float | None,
    typer.Option("--paced", metavar="R", help="Start a server without a model whose streams get R tokens/s each."),
]
Warmups = Annotated[int, typer.Option("--num-warmups", metavar="N", help="Requests before the clock starts.")]
Goodput = Annotated[
    list[str] | None,
    typer.Option("--goodput", metavar="SLO", help="Objective like ttft:500, tpot:50 or e2el:9000, in ms."),
]
MoreGoodput = Annotated[list[str] | None, typer.Argument(metavar="SLO", help="More objectives, after --goodput.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Of prompts and arrivals.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="Most that one answer may take.")]
ServerPid = Annotated[
    int | None, typer.Option("--server-pid", metavar="PID", help="With --base-url: the process whose CPU to count.")
]
Detailed = Annotated[
    bool, typer.Option("--save-detailed", help="Also every request's times and text, in --json and --save.")
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the run as FILE.png and FILE.svg.")]


def bench_serve(
    more_goodput: MoreGoodput = None,
    base_url: BaseUrl = None,
    model: Model = None,
    endpoint: Endpoint = "/v1/completions",
    api_key: ApiKey = None,
    dataset: Dataset = "synthetic",
    num_prompts: NumPrompts = 100,
    input_len: InputLen = 256,
    output_len: OutputLen = 64,
    request_rate: RequestRate = None,
    burstiness: Burstiness = 1.0,
    concurrency: Concurrency = None,
    paced: Paced = None,
    num_warmups: Warmups = 1,
    goodput: Goodput = None,
    seed: Seed = 0,
    timeout: Timeout = 600.0,
    server_pid: ServerPid = None,
    save_detailed: Detailed = False,
    plot: Plot = None,
    save: Save = None,
    as_json: Json = False,
) -> int:
    """Put load on a server and measure what its clients see: requests come at their times, answered or not.

    The JSON has the fields of `vllm bench serve`. Exits with 1 when a request failed, or an answer of --paced is wrong.
    """
    from k3hal.bench.serve.options import ServeBench, read_dataset, read_goodput, read_rate
    from k3hal.errors import UsageError

    if more_goodput and not goodput:
        raise UsageError(f"unexpected argument {more_goodput[0]!r}", hint="objectives follow --goodput")
    settings = ServeBench(
        base_url=base_url,
        model=model,
        endpoint=endpoint,
        api_key=api_key,
        dataset=read_dataset(dataset),
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        request_rate=read_rate(request_rate),
        burstiness=burstiness,
        concurrency=concurrency,
        paced=paced,
        warmups=num_warmups,
        goodput=read_goodput([*(goodput or []), *(more_goodput or [])]),
        seed=seed,
        timeout=timeout,
        server_pid=server_pid,
        details=save_detailed,
    )
    return _run(settings, plot, save or [], as_json)


def _run(settings: ServeBench, plot: Path | None, targets: list[Path], as_json: bool) -> int:
    """Measure, draw, keep, print."""
    from k3hal.bench.cache.plot import check_plot
    from k3hal.bench.save import check_targets, tables_of
    from k3hal.bench.save import save as keep
    from k3hal.bench.serve.plot import save_serve_plot
    from k3hal.bench.serve.report import SCHEMA
    from k3hal.bench.serve.report import bench_serve as measure

    def say(line: str) -> None:
        typer.echo(line, err=True)

    check_targets(targets)
    if plot is not None:
        check_plot(plot)
    report = measure(settings, say)
    document = {"schema": SCHEMA, **report.document}
    if plot is not None:
        for file in save_serve_plot(document, report.answers, plot):
            say(f"wrote {file}")
    for target in targets:
        keep(document, target)
    if as_json:
        print_json(SCHEMA, report.document)
    else:
        typer.echo("\n\n".join(table.text() for table in tables_of(document)))
    return 1 if document["failed"] or document["wrong_answers"] else 0
