"""Which arguments and outputs of an operator hold one row per token or per sequence, and taking some of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3hal.debug.case import Case


@dataclass(frozen=True, slots=True)
class Batching:
    """How calls of an operator are batched. The unit is a sequence if there are `sequences`, else a row.

    `rows` have one leading entry per token, `sequences` one per sequence, `columns` one per token on their second
    axis. `spans` says how rows belong to sequences: by `cu_seqlens`, `width` to each, or `one` to each. `cumulative`
    outputs (running totals) follow no row. Unlisted outputs are the caches.
    """

    rows: tuple[str, ...] = ()
    sequences: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    spans: str = "one"
    row_outputs: tuple[str, ...] = ("out",)
    sequence_outputs: tuple[str, ...] = ()
    column_outputs: tuple[str, ...] = ()


_KDA_IN = ("qkv", "raw_gate", "beta_logits", "out_gate")
_ROUTED = Batching(("x", "ids", "weights"))
BATCHING: Mapping[str, Batching] = {
    "attn_res_mix": Batching(
        ("prefix", "delta"), columns=("blocks",), row_outputs=("out", "prefix"), column_outputs=("blocks",)
    ),
    "causal_conv1d": Batching(("x",), ("slots", "has_state"), spans="cu_seqlens"),
    "embed": Batching(("ids",)),
    "gated_rms_norm": Batching(("x", "gate")),
    "kda_chunk": Batching(("q", "k", "v", "g", "beta"), ("slots", "has_state"), spans="cu_seqlens"),
    "kda_commit": Batching((), ("u", "k", "raw_gate", "conv_in", "accepted", "slots"), row_outputs=()),
    "kda_decode": Batching(_KDA_IN, ("slots",)),
    "kda_gate": Batching(("raw_gate", "beta_logits"), row_outputs=("g", "beta")),
    "kda_prefill": Batching(_KDA_IN, ("slots", "has_state"), spans="cu_seqlens"),
    "kda_recurrent": Batching(("q", "k", "v", "g", "beta"), ("slots",)),
    "kda_verify": Batching(
        _KDA_IN, ("slots",), spans="width", sequence_outputs=("u", "k", "gate", "conv_in"), row_outputs=("out",)
    ),
    "latent_moe": _ROUTED,
    "head_linear": Batching(("x",)),
    "linear": Batching(("x",)),
    "linear_fp32": Batching(("x",)),
    "mla_cache_insert": Batching(("latent", "k_pe", "rows"), row_outputs=()),
    "mla_decode": Batching(("q",), ("page_table", "seq_lens")),
    "mla_prefill": Batching(("q",), ("page_table", "context_lens"), spans="cu_seqlens"),
    "moe_experts": _ROUTED,
    "moe_experts_a8w4": _ROUTED,
    "moe_experts_int4": _ROUTED,
    "moe_experts_mxfp4": _ROUTED,
    "moe_route": Batching(("logits",), row_outputs=("weights", "ids")),
    "mx_quantize": Batching(("x",), row_outputs=("packed", "scales")),
    "rms_norm": Batching(("x", "residual"), row_outputs=("out", "residual")),
    "sample": Batching(("logits", "temperature", "top_k", "top_p", "min_p", "uniform")),
    "sigmoid_gate": Batching(("x", "gate")),
    "silu_and_mul": Batching(("x",)),
    "situ_and_mul": Batching(("x",)),
    "verify_draft": Batching(
        ("draft_ids", "draft_probs", "target_probs", "uniform"), row_outputs=("num_accepted", "next_id")
    ),
}
"""Operators whose calls can be taken apart; the others have no independent rows."""


def units(case: Case) -> int:
    """How many sequences, or rows, a case has; 0 for an operator without."""
    batching = BATCHING.get(case.op)
    if batching is None:
        return 0
    for name in (*batching.sequences, *batching.rows):
        if isinstance(case.args[name], Tensor):
            return case.args[name].shape[0]
    return 0


def row_spans(case: Case) -> list[range]:
    """The rows of each unit."""
    batching, count = BATCHING[case.op], units(case)
    if batching.spans == "cu_seqlens":
        bounds = case.args["cu_seqlens"].tolist()
        return [range(a, b) for a, b in itertools.pairwise(bounds)]
    width = case.args["width"] if batching.spans == "width" else 1
    return [range(n * width, (n + 1) * width) for n in range(count)]


def select(case: Case, keep: Sequence[int]) -> Case:
    """The case with these units only, in this order. Neighbours in ascending order stay views with their strides."""
    batching, spans = BATCHING[case.op], row_spans(case)
    rows = [row for unit in keep for row in spans[unit]]
    changes: dict[str, Tensor] = {}
    for names, axis, index in (
        (batching.rows, 0, rows), (batching.sequences, 0, list(keep)), (batching.columns, 1, rows),
    ):  # fmt: skip
        changes |= {n: take(case.args[n], index, axis) for n in names if isinstance(case.args[n], Tensor)}
    changes |= {name: changes[name].contiguous() for name in batching.columns if name in changes}
    if batching.spans == "cu_seqlens":
        lengths = torch.tensor([0, *(len(spans[unit]) for unit in keep)])
        changes["cu_seqlens"] = lengths.cumsum(0).to(case.args["cu_seqlens"].dtype)
    return case.with_args(f"units{'_'.join(map(str, keep)) if len(keep) < 5 else len(keep)}", **changes)


def take(tensor: Tensor, index: Sequence[int], axis: int = 0) -> Tensor:
    """Entries of an axis: a view where they are neighbours in ascending order."""
    if list(index) == list(range(index[0], index[0] + len(index))) if index else False:
        return tensor.narrow(axis, index[0], len(index))
    return tensor.index_select(axis, torch.tensor(list(index), dtype=torch.int64))


def unit_outputs(case: Case, outputs: Mapping[str, Tensor], keep: Sequence[int]) -> dict[str, Tensor]:
    """The part of a case's outputs that belongs to these units, caches left out."""
    batching, spans = BATCHING[case.op], row_spans(case)
    rows = [row for unit in keep for row in spans[unit]]
    out = {}
    for names, axis, index in (
        (batching.row_outputs, 0, rows),
        (batching.sequence_outputs, 0, list(keep)),
        (batching.column_outputs, 1, rows),
    ):
        out |= {name: take(outputs[name], index, axis) for name in names if name in outputs}
    return out
