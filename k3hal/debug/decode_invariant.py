"""Decoding a token equals prefilling it: an operator against its counterpart's reference."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from k3hal.debug.case import Case
from k3hal.debug.execute import Calls
from k3hal.debug.golden import Golden, golden
from k3hal.dispatch.registry import get_operator

Pair = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
_TO_PREFILL = {"kda_decode": "kda_prefill", "kda_recurrent": "kda_chunk"}


def decode_equals_prefill(calls: Calls, case: Case) -> list[Pair]:
    """The target's outputs beside the golden of the other operator; nothing for an operator without counterpart."""
    rows = slice(None)
    if case.op == "mla_decode":
        counterpart, args, rows = "mla_prefill", _absorbed_as_prefill(case), case.args["seq_lens"] > 0
    elif case.op in _TO_PREFILL:
        counterpart, args = _TO_PREFILL[case.op], _one_token_each(case)
    elif case.op == "mla_prefill":
        return _last_tokens_decoded(calls, case)
    else:
        return []
    expected = golden(get_operator(counterpart), args)
    actual = calls(case.args)
    mutated = calls.operator.mutates
    got, want = ({n: v if n in mutated else v[rows] for n, v in side.items()} for side in (actual, expected))
    return [(got, Golden(want, expected.dtypes))]


def _one_token_each(case: Case) -> dict[str, object]:
    count = case.args["slots"].shape[0]
    spans = {
        "cu_seqlens": torch.arange(count + 1, dtype=torch.int32),
        "has_state": torch.ones(count, dtype=torch.bool),
    }
    return {**case.args, **spans}


def _absorbed_as_prefill(case: Case) -> dict[str, object]:
    """Absorbed queries as a prefill of one token a sequence whose up-projections are the identity."""
    args, rank = case.args, case.args["kv_lora"]
    live = args["seq_lens"] > 0
    unit = torch.eye(rank, dtype=args["q"].dtype).expand(args["q"].shape[1], rank, rank)
    # A sequence of length 0 has no token: its row is padding, which prefill keeps at the end only, so it is zeroed.
    return {
        "q": torch.where(live[:, None, None], args["q"], 0),
        "kv_cache": args["kv_cache"],
        "page_table": torch.where(live[:, None], args["page_table"], 0),
        "cu_seqlens": torch.arange(len(live) + 1, dtype=torch.int32),
        "context_lens": (args["seq_lens"] - 1).clamp_min(0),
        "w_uk": unit,
        "w_uv": unit,
        "scale": args["scale"],
    }


def _last_tokens_decoded(calls: Calls, case: Case) -> list[Pair]:
    """The last token of every sequence, decoded with absorbed weights by the reference."""
    args = case.args
    new = args["cu_seqlens"][1:] - args["cu_seqlens"][:-1]
    live = new > 0
    if not bool(live.any()):
        return []
    last = args["cu_seqlens"][1:][live].long() - 1
    q, w_uk, w_uv = args["q"][last].double(), args["w_uk"].double(), args["w_uv"].double()
    nope = w_uk.shape[1]
    absorbed = torch.cat((torch.einsum("nhd,hdr->nhr", q[..., :nope], w_uk), q[..., nope:]), dim=-1)
    decode = {
        "q": absorbed,
        "kv_cache": args["kv_cache"],
        "page_table": args["page_table"][live],
        "seq_lens": (args["context_lens"] + new)[live],
        "scale": args["scale"],
        "kv_lora": w_uk.shape[2],
    }
    latent = golden(get_operator("mla_decode"), decode)["out"].double()
    out = calls(args)["out"][last]
    expected = {"out": torch.einsum("nhr,hvr->nhv", latent, w_uv)}
    return [({"out": out}, Golden(expected, {"out": args["q"].dtype}))]
