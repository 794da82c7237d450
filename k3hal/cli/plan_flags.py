"""The flags of `k3hal plan`, one annotated type each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Hardware = Annotated[
    str | None,
    typer.Option(
        "--hardware", metavar="ID", help="Machine, such as b300 or mi355x, or cuda:1 here; default: this one."
    ),
]
Nodes = Annotated[int | None, typer.Option("--nodes", metavar="N", min=1, help="Nodes; default: the fewest that work.")]
PrefillNodes = Annotated[
    int | None, typer.Option("--prefill-nodes", metavar="N", min=1, help="Nodes of the prefill pool.")
]
DecodeNodes = Annotated[
    int | None, typer.Option("--decode-nodes", metavar="N", min=1, help="Nodes of the decode pool.")
]
Strategy = Annotated[
    str | None, typer.Option("--strategy", metavar="NAME", help="Such as multi_node_tp; default: the recipe's.")
]
Variant = Annotated[str | None, typer.Option("--variant", metavar="NAME", help="Weights: default, nvfp4, ascend_w4a8.")]
Features = Annotated[
    str | None, typer.Option("--features", metavar="A,B|none", help="Default: tool_calling,reasoning.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar='"--FLAG VALUE"', help="A flag of your own for the server; may be repeated."),
]
Model = Annotated[
    Path | None, typer.Option("--model", metavar="DIR", help="A checkpoint in place of the recipe's model.")
]
For = Annotated[str, typer.Option("--for", metavar="vllm|k3hal", help="The server that is started.")]
Context = Annotated[
    int | None, typer.Option("--context", metavar="TOKENS", min=1, help="Tokens each sequence must have room for.")
]
Concurrency = Annotated[
    int | None, typer.Option("--concurrency", metavar="N", min=1, help="Sequences that must fit at once.")
]
KvOffload = Annotated[
    float | None, typer.Option("--kv-offload", metavar="GIB", help="Host memory for KV that leaves the accelerators.")
]
Shell = Annotated[bool, typer.Option("--shell", help="Print a shell script.")]
K8s = Annotated[bool, typer.Option("--k8s", help="Print Kubernetes objects.")]
Compose = Annotated[bool, typer.Option("--compose", help="Print a Docker Compose file.")]
Slurm = Annotated[bool, typer.Option("--slurm", help="Print a Slurm batch script.")]
Explain = Annotated[
    bool, typer.Option("--explain", help="Add where flags come from, and which provider K3HAL would run.")
]
Capacity = Annotated[bool, typer.Option("--capacity", help="Add what fits, by context and sequences at once.")]
Picture = Annotated[
    Path | None, typer.Option("--picture", metavar="FILE", help="With --capacity: also draw it, as SVG.")
]
Workload = Annotated[
    str | None, typer.Option("--workload", metavar="trace:FILE", help="Add how many replicas a trace needs.")
]
P95 = Annotated[
    float | None,
    typer.Option("--p95", metavar="SECONDS", help="With --workload: to the first token, at the 95th percentile (30)."),
]
Storage = Annotated[
    float | None, typer.Option("--storage", metavar="GB/S", help="With --workload: what a node reads weights with.")
]
Inventory = Annotated[
    Path | None, typer.Option("--inventory", metavar="FILE", help="Plan for a YAML list of machines.")
]
Recipe = Annotated[
    Path | None, typer.Option("--recipe", metavar="FILE", help="Plan from another recipe (YAML, or TOML of ours).")
]
Matrix = Annotated[bool, typer.Option("--matrix", help="Only show every strategy on every machine.")]
Lint = Annotated[
    Path | None, typer.Option("--lint", metavar="FILE", help="Only report what is inconsistent in a recipe.")
]
