"""`k3hal bench cache`: traces through the real scheduler and cache, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3hal.cli.common import Json, Save
from k3hal.cli.output import print_json
from k3hal.errors import UsageError

if TYPE_CHECKING:
    from k3hal.bench.cache.report import CacheBench

Trace = Annotated[
    str | None, typer.Option("--trace", metavar="FILE|agentic:SEED|chat:SEED", help="Requests to replay.")
]
Budget = Annotated[
    float, typer.Option("--budget-gb", metavar="X", help="GB (1e9 bytes) of a rank for pages and snapshots.")
]
Policy = Annotated[
    str, typer.Option("--policy", metavar="cost|second-hit|prompt|interval:N|none", help="What is kept.")
]
Ranks = Annotated[int, typer.Option("--tp", metavar="N", help="Ranks the states are divided over.")]
Kv = Annotated[str, typer.Option("--kv", metavar="fp8|bf16", help="The KV cache's dtype.")]
Mode = Annotated[
    str, typer.Option("--mode", metavar="serial|concurrent:C", help="One request after the other, or C at once.")
]
MatchUnit = Annotated[int, typer.Option("--match-unit", metavar="N", help="Tokens of a match unit.")]
HostGb = Annotated[
    float | None,
    typer.Option("--host-gb", metavar="X", help="With an external tier: GB of a rank's host memory for prefixes."),
]
DiskGb = Annotated[float | None, typer.Option("--disk-gb", metavar="X", help="And GB of disk under it.")]
Head = Annotated[int | None, typer.Option("--head", metavar="N", help="Only the first N requests.")]
Oracle = Annotated[bool, typer.Option("--oracle", help="Also what a cache that knows the future reaches.")]
Peer = Annotated[str | None, typer.Option("--peer", metavar="vllm", help="Also vLLM's own manager, same prompts.")]
PeerPython = Annotated[
    Path | None, typer.Option("--peer-python", metavar="EXE", help="An interpreter that can import vllm.")
]
Micro = Annotated[bool, typer.Option("--micro", help="Also time the bookkeeping alone.")]
Capacity = Annotated[bool, typer.Option("--capacity", help="Also how many sequences fit, and the padding.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw hit rate against budget as FILE.png and FILE.svg.")
]

_RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)
_MOST_GB = 10_000
"""More than any rank has. The books of a page are real, so that a budget of a million GB would take all memory here."""


def bench_cache(
    trace: Trace = None,
    budget_gb: Budget = 21.233664,
    policy: Policy = "cost",
    tp: Ranks = 8,
    kv: Kv = "fp8",
    mode: Mode = "serial",
    match_unit: MatchUnit = 128,
    host_gb: HostGb = None,
    disk_gb: DiskGb = None,
    head: Head = None,
    oracle: Oracle = False,
    peer: Peer = None,
    peer_python: PeerPython = None,
    micro: Micro = False,
    capacity: Capacity = False,
    plot: Plot = None,
    save: Save = None,
    as_json: Json = False,
) -> int:
    """Replay a trace through scheduler and prefix cache of the full-size model, without running it.

    --plot replays every policy at 1, 2, 4 and 8 times --budget-gb, which takes minutes.
    """
    if plot is not None and trace is None:
        raise UsageError("--plot needs --trace")
    if trace is None and not (capacity or micro):
        raise UsageError("nothing to do", hint="give --trace, --capacity or --micro")
    if peer not in (None, "vllm") or (peer_python is not None and peer is None):
        raise UsageError(f"--peer is {peer!r}", hint="it is vllm, and --peer-python belongs to it")
    _check_numbers(budget_gb, tp, kv, match_unit, head)
    host, disk = _tier_sizes(host_gb, disk_gb, policy)
    from k3hal.bench.cache.report import CacheBench
    from k3hal.engine.cache.policies import make_policy

    make_policy(policy)
    settings = CacheBench(
        budget=round(budget_gb * 1e9),
        policy=policy,
        tp=tp,
        kv="bf16" if kv == "bf16" else "fp8",
        concurrency=_concurrency(mode),
        match_unit=match_unit,
        host=host,
        disk=disk,
        oracle=oracle,
        peer=peer is not None,
        peer_python=peer_python,
        capacity=capacity,
        micro=micro,
        sweep=plot is not None,
    )
    return _run(settings, trace, head, plot, save or [], as_json)


def _check_numbers(budget_gb: float, tp: int, kv: str, match_unit: int, head: int | None) -> None:
    if not 0 < budget_gb <= _MOST_GB:
        raise UsageError(f"--budget-gb is {budget_gb}", hint=f"a positive number, at most {_MOST_GB}")
    if tp not in _RANKS or kv not in ("fp8", "bf16"):
        raise UsageError(f"--tp is {tp} and --kv {kv!r}", hint=f"ranks divide 96 heads, {_RANKS}; KV is fp8 or bf16")
    if match_unit < 1 or (head is not None and head < 1):
        raise UsageError("--match-unit and --head are at least 1")


def _tier_sizes(host_gb: float | None, disk_gb: float | None, policy: str) -> tuple[int, int]:
    """Bytes of host memory and disk, both 0 without a tier; under a disk as much host memory as `serve` takes."""
    given = {"--host-gb": host_gb, "--disk-gb": disk_gb}
    for flag, size in given.items():
        if size is not None and not 0 < size <= _MOST_GB:
            raise UsageError(f"{flag} is {size}", hint=f"a positive number, at most {_MOST_GB}")
    from k3hal.engine.options import DEFAULT_HOST_GB

    if host_gb is None and disk_gb is None:
        return 0, 0
    if policy == "none":
        raise UsageError("an external tier keeps nothing with --policy none", hint="use another policy")
    host = DEFAULT_HOST_GB if host_gb is None else host_gb
    return round(host * 1e9), round((disk_gb or 0) * 1e9)


def _run(
    settings: CacheBench, trace: str | None, head: int | None, plot: Path | None, targets: list[Path], as_json: bool
) -> int:
    """Measure, draw, keep, print."""
    from k3hal.bench.cache.plot import check_plot, save_plot
    from k3hal.bench.cache.report import SCHEMA
    from k3hal.bench.cache.report import bench_cache as measure
    from k3hal.bench.cache.sources import load_trace
    from k3hal.bench.save import check_targets, tables_of
    from k3hal.bench.save import save as keep

    def say(line: str) -> None:
        typer.echo(line, err=True)

    check_targets(targets)
    if plot is not None:
        check_plot(plot)
    report = measure(settings, None if trace is None else load_trace(trace).head(head), say)
    if plot is not None:
        for file in save_plot(report, plot):
            say(f"wrote {file}")
    for target in targets:
        keep({"schema": SCHEMA, **report}, target)
    if as_json:
        print_json(SCHEMA, report)
    else:
        typer.echo("\n\n".join(table.text() for table in tables_of({"schema": SCHEMA, **report})))
    return 0


def _concurrency(mode: str) -> int:
    kind, _, count = mode.partition(":")
    if mode == "serial":
        return 1
    if kind == "concurrent" and count.isascii() and count.isdecimal() and 1 <= int(count) <= 1024:
        return int(count)
    raise UsageError(f"--mode is {mode!r}", hint="serial, or concurrent:C with C from 1 to 1024")
