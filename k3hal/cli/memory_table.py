"""A memory plan as people read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WHAT = {
    "weights": "the model",
    "cache": "prefixes and running sequences",
    "workspace": "what a step takes and gives back",
    "drafts": "records and logits of drafts",
    "buffers": "what stays between steps: sampling, libraries",
    "graphs": "captured decode steps",
    "code": "contexts and kernels, beside all tensors",
    "margin": "left for fragments",
}


def print_memory(head: str, report: Mapping[str, Any], *, stderr: bool = False) -> None:
    """A line that begins with `head`, and under it the parts of a `MemoryPlan.report`."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("part", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("GB", justify="right")
    table.add_column("known", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    for item in report["items"]:
        table.add_row(item["item"], _gb(item["bytes"]), item["known"], WHAT[item["item"]])
    console = Console(stderr=stderr, highlight=False)
    total, budget, free = (_gb(report[name]) for name in ("total", "budget", "free"))
    console.print(
        f"{head}: {total} GB of a budget of {budget} GB, {free} GB were free; sequences of up to "
        f"{report['max_model_len']} tokens",
        markup=False,
        soft_wrap=True,
    )
    console.print(table)


def _gb(size: int) -> str:
    return f"{size / 1e9:.3f}"
