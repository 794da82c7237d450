"""The common flags, one annotated type each. All default to None, which means "not given".

    def serve(ctx: typer.Context, ops: Ops = None, device: Device = None, config: Config = None) -> None:
        from k3hal.settings import Settings
        settings = settings_from(ctx, Settings)

A verb takes those it needs; `settings_from` merges them with the `--config` file and the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from k3hal.settings import Settings

S = TypeVar("S", bound="Settings")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Ops = Annotated[
    str | None,
    typer.Option("--ops", metavar="OVERRIDES", help='Provider overrides: "kda_decode=triton,mla_*=flashinfer".'),
]
Device = Annotated[str | None, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:1, rocm, npu.")]
DType = Annotated[str | None, typer.Option("--dtype", metavar="auto|float32|bfloat16", help="Activations' dtype.")]
KvCacheDType = Annotated[
    str | None, typer.Option("--kv-cache-dtype", metavar="auto|bf16|fp8", help="The KV cache's dtype.")
]
ExpertActivations = Annotated[
    str | None,
    typer.Option(
        "--expert-activations",
        metavar="auto|mxfp8",
        help="mxfp8: MXFP4 experts round activations to it.  [default: auto]",
    ),
]
MemoryBudget = Annotated[
    float | None, typer.Option("--memory-budget", metavar="GB", help="GB (1e9 bytes) per device the engine may use.")
]
MaxModelLen = Annotated[
    int | None, typer.Option("--max-model-len", metavar="N", help="Most tokens of one sequence, prompt and output.")
]
MaxNumSeqs = Annotated[int | None, typer.Option("--max-num-seqs", metavar="N", help="Most sequences in a step.")]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option("--max-num-batched-tokens", metavar="N", help="Most tokens in a step.")
]
Graphs = Annotated[
    bool | None,
    typer.Option("--graphs/--no-graphs", help="Decode through captured graphs, where the device has them.  [default]"),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft", metavar="ngram:N", help="Verify up to N tokens a step that followed before.  [default: none]"
    ),
]
Tokenizer = Annotated[
    Path | None, typer.Option("--tokenizer", metavar="DIR", help="Folder of tiktoken.model; default: the model's.")
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="YAML of the same names; the environment and flags go over it."),
]
Plan = Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="Pin this saved dispatch plan.")]
Save = Annotated[
    list[Path] | None,
    typer.Option(
        "--save", metavar="FILE", help="Keep the report as FILE.json, its tables in FILE.md; may be repeated."
    ),
]


def settings_from(ctx: typer.Context, kind: type[S]) -> S:
    """The running command's flags merged with its `--config` file and the environment, as a `kind`."""
    from k3hal.settings import load_settings

    # A flag that may be repeated is an empty tuple where it was not given.
    flags = {name: None if value == () else value for name, value in ctx.params.items()}
    return load_settings(kind, flags, ctx.params.get("config"))
