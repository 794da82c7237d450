"""Faults of KDA's gates and of the gated delta rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from k3hal.conform.faults.fault import Arguments, Catalogue, Right, reference_with
from k3hal.dispatch.ops._kda import L2_EPS, l2_normalise

RECURRENCE = Catalogue()
fault = RECURRENCE.fault
RULE = ("kda_chunk", "kda_recurrent")


@fault("kda_gate")
def A_log_per_channel(right: Right, args: Arguments) -> Any:  # noqa: N802 - a fault is called by its function's name
    """The stored 128 values of A_log are taken for the 128 channels of a head."""
    heads, dim = args["dt_bias"].shape
    rate = args["A_log"].repeat(-(-dim // heads))[:dim].exp()
    shifted = args["raw_gate"].float() + args["dt_bias"]
    bound = args["lower_bound"]
    g = -rate * softplus(shifted) if bound is None else bound * torch.sigmoid(rate * shifted)
    return g, torch.sigmoid(args["beta_logits"].float())


@fault("kda_gate")
def clamped_softplus(right: Right, args: Arguments) -> Any:
    """The bounded decay is taken for the unbounded one, clamped at the bound."""
    g, beta = right(args, lower_bound=None)
    return (g if args["lower_bound"] is None else g.clamp_min(args["lower_bound"])), beta


@fault("kda_gate", first="unbounded_mixed")
def always_bounded(right: Right, args: Arguments) -> Any:
    """Kimi-Linear's unbounded decay goes down K3's bounded path."""
    return right(args, lower_bound=args["lower_bound"] or -5.0)


@fault("kda_gate", first="bound_of_three")
def bound_is_a_constant(right: Right, args: Arguments) -> Any:
    """The bound -5 is compiled into the kernel, the argument ignored."""
    return right(args, lower_bound=None if args["lower_bound"] is None else -5.0)


@fault("kda_gate")
def dt_bias_dropped(right: Right, args: Arguments) -> Any:
    """dt_bias is not added."""
    return right(args, dt_bias=torch.zeros_like(args["dt_bias"]))


@fault("kda_gate")
def dt_bias_after_the_rate(right: Right, args: Arguments) -> Any:
    """dt_bias is added after the product with exp(A_log)."""
    return right(args, dt_bias=args["dt_bias"] / args["A_log"].exp().unsqueeze(-1))


@fault("kda_gate")
def dt_bias_of_the_first_head(right: Right, args: Arguments) -> Any:
    """All heads take the first head's dt_bias."""
    return right(args, dt_bias=args["dt_bias"][:1].expand_as(args["dt_bias"]).contiguous())


@fault("kda_gate")
def A_log_not_exponentiated(right: Right, args: Arguments) -> Any:  # noqa: N802
    """A_log itself is the rate."""
    return right(args, A_log=args["A_log"].clamp_min(1e-9).log())


@fault("kda_gate")
def A_log_negated(right: Right, args: Arguments) -> Any:  # noqa: N802
    """The rate is exp(-A_log): the sign of the state-space form was carried over."""
    return right(args, A_log=-args["A_log"])


@fault("kda_gate")
def decay_in_base_2(right: Right, args: Arguments) -> Any:
    """The gate is handed over in base 2, for a recurrence that takes natural logarithms."""
    g, beta = right(args)
    return g / math.log(2), beta


@fault("kda_gate")
def beta_without_sigmoid(right: Right, args: Arguments) -> Any:
    """beta arrives as a logit: a flag that defaults to False was not set."""
    return right(args)[0], args["beta_logits"].float()


@fault("kda_gate")
def beta_doubled(right: Right, args: Arguments) -> Any:
    """beta is 2 sigmoid: negative eigenvalues were allowed."""
    g, beta = right(args)
    return g, 2 * beta


@fault("kda_gate")
def gate_rounded_to_bf16(right: Right, args: Arguments) -> Any:
    """The log decay passes through bf16 on its way."""
    g, beta = right(args)
    return g.bfloat16().float(), beta


def rule(
    normalise: Callable[[Tensor], Tensor] = l2_normalise,
    *,
    q_scale: float | None = None,
    normalise_q: bool = True,
    decay: Callable[[Tensor], Tensor] = torch.exp,
    decay_first: bool = True,
    delta: bool = True,
    corrects_undecayed: bool = False,
    reads_before: bool = False,
    beta_on_value_only: bool = False,
    state: Callable[[Tensor], Tensor] = lambda s: s,
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """`delta_step` with something wrong in it."""

    def step(old: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = (normalise(q) if normalise_q else q.float()) * (q.shape[-1] ** -0.5 if q_scale is None else q_scale)
        k, factor = normalise(k), decay(g.float()).unsqueeze(-2)
        decayed = old * factor if decay_first else old
        predicted = ((old if corrects_undecayed else decayed) * k.unsqueeze(-2)).sum(-1) if delta else 0.0
        strength = beta.unsqueeze(-1)
        u = strength * v.float() - predicted if beta_on_value_only else strength * (v.float() - predicted)
        new = decayed + u.unsqueeze(-1) * k.unsqueeze(-2)
        new = state(new if decay_first else new * factor)
        return new, u, ((decayed if reads_before else new) * q.unsqueeze(-2)).sum(-1)

    return step


def _over_mean(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + L2_EPS) * x.shape[-1] ** -0.5


def _over_larger(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-5)


def _outside_root(x: Tensor) -> Tensor:
    x = x.float()
    return x / (x.square().sum(-1, keepdim=True).sqrt() + L2_EPS)


def _without_eps(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x.float(), dim=-1, eps=1e-12)


def _per_head(g: Tensor) -> Tensor:
    return g.mean(-1, keepdim=True).exp().expand_as(g)


_RULES: dict[str, tuple[str, dict[str, Any], str]] = {
    "l2_eps_on_mean": ("The L2 norm's epsilon is added to the mean of squares", {"normalise": _over_mean}, "faint"),
    "l2_eps_1e_5": ("The L2 norm takes the RMS norm's epsilon", {"normalise": _over_larger}, "faint"),
    "l2_eps_outside_root": ("The L2 norm's epsilon is added outside the root", {"normalise": _outside_root}, "faint"),
    "l2_eps_missing": ("The L2 norm has no epsilon", {"normalise": _without_eps}, "faint"),
    "q_not_normalised": ("q skips the L2 norm", {"normalise_q": False}, ""),
    "q_scale_missing": ("q's scale is left to a caller who does not know", {"q_scale": 1.0}, ""),
    "q_scale_of_all_heads": ("q is scaled by (heads x dim)^-0.5", {"q_scale": 64**-0.5}, ""),
    "decay_after_update": ("The state is decayed after the update", {"decay_first": False}, ""),
    "decay_in_base_2": ("exp2 of a natural logarithm", {"decay": torch.exp2}, ""),
    "decay_per_head": ("One decay a head, as in the gated delta net", {"decay": _per_head}, ""),
    "decay_missing": ("The state does not decay", {"decay": torch.ones_like}, ""),
    "no_delta": ("Plain linear attention: what is known is not subtracted", {"delta": False}, ""),
    "corrects_undecayed": ("The correction is taken from the state before decay", {"corrects_undecayed": True}, ""),
    "reads_old_state": ("The output is read before the token is written", {"reads_before": True}, ""),
    "beta_on_value_only": ("beta multiplies v and not the correction", {"beta_on_value_only": True}, ""),
    "state_in_bf16": ("The state is rounded to bf16", {"state": lambda s: s.bfloat16().float()}, ""),
    "state_transposed": ("The state is written K-first", {"state": lambda s: s.mT.contiguous()}, ""),
}


def _with_rule(op: str, wrong: dict[str, Any]) -> Callable[[Right, Arguments], Any]:
    step = rule(**wrong)
    return lambda right, args: reference_with(op, args, delta_step=step)


for _name, (_bug, _wrong, _first) in _RULES.items():
    for _op in (*RULE, "kda_verify"):
        RECURRENCE.add(_name, _op, _bug, _with_rule(_op, _wrong), _first)


def _in_chunks(right: Right, args: Arguments, between: Callable[[Tensor, int], object], size: int = 64) -> Any:
    """The right rule over each sequence alone, chunk by chunk, with something done to its slot in between."""
    out, bounds = torch.zeros_like(args["v"], memory_format=torch.contiguous_format), args["cu_seqlens"].tolist()
    known = args["has_state"].clone()
    for n, slot in enumerate(args["slots"].tolist()):
        for start in range(bounds[n], bounds[n + 1], size):
            rows = slice(start, min(start + size, bounds[n + 1]))
            piece = {name: args[name][rows] for name in ("q", "k", "v", "g", "beta")}
            one = {"slots": args["slots"][n : n + 1], "has_state": known[n : n + 1]}
            ends = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
            out[rows] = right(args, **piece, **one, cu_seqlens=ends)
            known[n] = True
            if slot and rows.stop < bounds[n + 1]:
                between(args["state"], slot)
    return out


@fault("kda_chunk", first="around_chunk")
def chunk_carry_lost(right: Right, args: Arguments) -> Any:
    """The state is not carried from one chunk of 64 to the next."""
    return _in_chunks(right, args, lambda state, slot: state[slot].zero_())


@fault("kda_chunk", first="around_chunk")
def chunk_state_rounded(right: Right, args: Arguments) -> Any:
    """The state is carried between chunks in bf16."""
    return _in_chunks(right, args, lambda state, slot: state[slot].copy_(state[slot].bfloat16()))


@fault("kda_chunk", first="around_chunk")
def tail_chunk_not_in_state(right: Right, args: Arguments) -> Any:
    """The end state is the one after the last whole chunk of 64."""
    out = right(args, state=args["state"].clone())
    bounds = args["cu_seqlens"]
    lengths = bounds.diff()
    rows = [torch.arange(int(a), int(a + n - n % 64)) for a, n in zip(bounds, lengths, strict=False)]
    kept = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
    whole = {name: args[name][kept] for name in ("q", "k", "v", "g", "beta")}
    ends = torch.cat((bounds[:1], (lengths - lengths % 64).cumsum(0).int()))
    right(args, **whole, cu_seqlens=ends)
    return out


@fault("kda_chunk", first="gates_at_bound")
def growth_overflows(right: Right, args: Arguments) -> Any:
    """exp(-G) is formed over a whole chunk and leaves fp32's range where the gates are strong."""
    out = right(args)
    bounds = args["cu_seqlens"].tolist()
    for a, b in itertools.pairwise(bounds):
        total = args["g"][a:b].float().cumsum(0)
        out[a:b] = torch.where((total.exp() * (-total).exp()).isnan(), torch.nan, out[a:b])
    return out


@fault("kda_chunk", "kda_prefill", first="around_tile")
def one_row_tail_is_nan(right: Right, args: Arguments) -> Any:
    """The tile of 16 gives NaN for a last tile with a single row (prompts of 1 mod 16 tokens)."""
    out = right(args)
    for end, length in zip(args["cu_seqlens"][1:].tolist(), args["cu_seqlens"].diff().tolist(), strict=True):
        if length % 16 == 1 and length > 1:
            out[end - 1] = torch.nan
    return out
