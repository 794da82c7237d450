"""`k3hal op dump`: runs a prompt and records operator calls; `K3HAL_DUMP` does the same in any other verb."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from k3hal.cli.common import Json, Ops
from k3hal.cli.op_prompt import read_prompt, token_ids
from k3hal.cli.output import print_json
from k3hal.errors import UsageError


def dump(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Checkpoint directory; default: built-in.")
    ] = None,
    prompt: Annotated[
        Path | None, typer.Option("--prompt", metavar="FILE", help="Text, or a JSON list of token ids.")
    ] = None,
    op: Annotated[str, typer.Option("--op", metavar="GLOB", help='Only these operators: "kda_*".')] = "*",
    when: Annotated[
        str, typer.Option("--when", metavar="COND", help="nonfinite, diverge, sample:1/N or step:N.")
    ] = "nonfinite",
    folder: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Where the cases go.")] = Path("."),
    max_gb: Annotated[float, typer.Option("--max-gb", metavar="G", help="Stop after this many GB of cases.")] = 1.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="Tokens to generate, greedily.")] = 8,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda, rocm, npu.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", metavar="auto|float32|bfloat16", help="Activations.")] = "auto",
    ops: Ops = None,
    as_json: Json = False,
) -> int:
    """Generate from a prompt and record the operator calls for which a condition holds, as cases to replay.

    Exits with 1 if a nonfinite or diverging call was found, else 0.
    """
    from k3hal.debug.dump_spec import parse_dump
    from k3hal.debug.record import Recorder
    from k3hal.dispatch.observe import observing
    from k3hal.llm import LLM
    from k3hal.sampling_params import SamplingParams

    if prompt is None:
        raise UsageError("no --prompt")
    text = read_prompt(prompt)
    recorder = Recorder(parse_dump(f"ops={op},when={when},dir={folder},max_gb={max_gb}", "op dump"))
    with observing(recorder):
        llm = LLM(model, device=device, dtype=dtype, ops=ops)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    with llm:
        llm.generate([token_ids(text, prompt, llm.tokenizer)], params)
    if as_json:
        print_json("k3hal.op_dump/1", {"condition": when, "steps": recorder.step + 1, "files": recorder.files})
    else:
        typer.echo("\n".join(recorder.files) or f"nothing to record in {recorder.step + 1} steps")
    return 1 if recorder.files and recorder.spec.when in ("nonfinite", "diverge") else 0
