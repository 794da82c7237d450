"""`k3hal op bisect`: which operator, layer and phase makes a model differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3hal.cli.common import Json
from k3hal.cli.op_prompt import read_prompt, token_ids
from k3hal.cli.output import print_json
from k3hal.errors import UsageError

if TYPE_CHECKING:
    from k3hal.debug.bisect import Finding

DEFAULT_TOKENS = 48


def bisect(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Checkpoint directory; default: built-in.")
    ] = None,
    prompt: Annotated[
        Path | None, typer.Option("--prompt", metavar="FILE", help="Text, or a JSON list of token ids.")
    ] = None,
    good: Annotated[str, typer.Option("--good", metavar="NAME", help="What is right.")] = "reference",
    bad: Annotated[
        str, typer.Option("--bad", metavar="NAME", help="What is doubted; a name or overrides.")
    ] = "current",
    axis: Annotated[
        list[str] | None,
        typer.Option(
            "--axis",
            metavar="provider|layer|phase|tactic",
            help="How far to go; default: the first three. tactic tries every tactic of the doubted providers.",
        ),
    ] = None,
    decode: Annotated[int, typer.Option("--decode", metavar="N", help="Last tokens fed one at a time.")] = 4,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", help="Of the prompt, use the first N.")
    ] = DEFAULT_TOKENS,
    threshold: Annotated[
        float | None, typer.Option("--threshold", metavar="X", help="RMS difference of logits that counts.")
    ] = None,
    save: Annotated[Path, typer.Option("--save", metavar="DIR", help="Where the case goes.")] = Path("."),
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda, rocm, npu.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", metavar="auto|float32|bfloat16", help="Activations.")] = "auto",
    as_json: Json = False,
) -> int:
    """Swap providers one by one, then layers, then phases, in one loaded model, until its logits first diverge.

    With --axis tactic, tactics are swapped one by one instead; further axes narrow down what is found. Leaves the
    smallest failing call as a case. Exits with 1 if the two sides differ, 0 if they do not.
    """
    from k3hal.debug.bisect import AXES, TACTIC, save_finding
    from k3hal.debug.live import LiveModel

    if odd := set(axis or ()) - {*AXES, TACTIC}:
        raise UsageError(f"--axis is {min(odd)!r}", hint=f"it takes {', '.join(AXES)}, {TACTIC}")
    if prompt is None or max_tokens < 1 or decode < 0:
        raise UsageError("no --prompt" if prompt is None else "--max-tokens is from 1 on, --decode from 0 on")
    text = read_prompt(prompt)
    live = LiveModel(model, good, bad, device=device, dtype=dtype)
    try:
        tokens = token_ids(text, prompt, live.built.tokenizer)[:max_tokens]
        found = live.bisection(tokens, decode, threshold).find(axis or AXES)
    finally:
        live.close()
    path = save_finding(found, save) if found else None
    if as_json:
        result = found.to_json() if found else None
        print_json("k3hal.op_bisect/1", {"diverges": bool(found), "finding": result, "file": path and str(path)})
    else:
        _print(found, path)
    return 1 if found else 0


def _print(found: Finding | None, path: Path | None) -> None:
    if found is None:
        typer.echo("no divergence")
        return
    where = "" if found.layer is None else f" in layer {found.layer}"
    typer.echo(f"{found.op}{where}: {found.provider} differs from {found.good}")
    typer.echo(
        f"    logits differ by {found.alone:.3g} with it alone, {found.error:.3g} with all, from token {found.position}"
    )
    if found.stages:
        typer.echo(f"    it shows in {', '.join(found.stages)}")
    if found.parts:
        typer.echo(f"    the part at fault: {', '.join(found.parts)}")
    if len(found.suspects) > 1:
        typer.echo(f"    operators that diverge alone: {', '.join(found.suspects)}")
    if found.verdict:
        reasons = "; ".join(found.verdict.reasons) or "every call is within its tolerance"
        typer.echo(f"    {found.verdict.status}: {reasons}")
    if path:
        typer.echo(f"    case: {path}")
