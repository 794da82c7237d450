"""The flags that only `k3hal generate` has, one annotated type each. None means "not given"."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="Checkpoint directory; default: a small built-in one.")
]
Prompt = Annotated[str | None, typer.Option(metavar="TEXT", help="Continue this text; - reads standard input.")]
Chat = Annotated[str | None, typer.Option(metavar="TEXT", help="Answer this user message; - reads standard input.")]
Messages = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Answer this chat request (JSON: its body, or its messages).")
]
Input = Annotated[Path | None, typer.Option(metavar="FILE", help="Answer every request of this JSON-lines file.")]
Output = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Where the answers to --input go; continued where it exists.")
]
RetryFailed = Annotated[
    bool | None, typer.Option("--retry-failed", help="Run the lines again that failed before.", show_default=False)
]
Stream = Annotated[
    bool | None, typer.Option("--stream/--no-stream", help="Print text as it comes.  [default: on a terminal]")
]
ServedModelName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Model id that requests may name; default: the checkpoint's name.")
]
N = Annotated[int | None, typer.Option("--n", metavar="N", help="Answers to each request.  [default: 1]")]
MaxTokens = Annotated[
    int | None, typer.Option(metavar="N", help="Most tokens of an answer.  [default: 16; a chat: to its own end]")
]
MinTokens = Annotated[int | None, typer.Option(metavar="N", help="Least tokens of an answer.")]
Temperature = Annotated[float | None, typer.Option(metavar="T", help="0 always takes the likeliest token.")]
TopP = Annotated[float | None, typer.Option(metavar="P", help="Sample among the likeliest tokens of this total.")]
TopK = Annotated[int | None, typer.Option(metavar="K", help="Sample among the K likeliest tokens; 0: all.")]
MinP = Annotated[float | None, typer.Option(metavar="P", help="Least probability, as a share of the likeliest's.")]
PresencePenalty = Annotated[float | None, typer.Option(metavar="X", help="From -2 to 2.")]
FrequencyPenalty = Annotated[float | None, typer.Option(metavar="X", help="From -2 to 2.")]
RepetitionPenalty = Annotated[float | None, typer.Option(metavar="X", help="Above 0; 1 is off.")]
Seed = Annotated[int | None, typer.Option(metavar="N", help="The same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be repeated.")]
StopTokenIds = Annotated[
    list[int] | None, typer.Option("--stop-token-ids", metavar="ID", help="End at this token; may be repeated.")
]
IgnoreEos = Annotated[bool | None, typer.Option("--ignore-eos", help="Go on after the model's own end.")]
Logprobs = Annotated[
    int | None, typer.Option(metavar="N", help="Log-probabilities, with N alternatives a token (needs --json).")
]
ThinkingEffort = Annotated[
    str | None, typer.Option(metavar="low|high|max", help="How much a chat thinks.  [default: max]")
]
