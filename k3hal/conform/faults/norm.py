"""Faults of the normalisations, the elementwise gates and the mix over depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from k3hal.conform.faults.fault import Arguments, Catalogue, Right
from k3hal.dispatch.ops.rms_norm import rms_norm

NORM = Catalogue()
fault = NORM.fault
NORMS = ("rms_norm", "gated_rms_norm")


def dense(x: Tensor) -> Tensor:
    """What a kernel reads that takes x's rows as packed, whatever its strides say."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())


@fault(*NORMS, first="faint")
def eps_missing(right: Right, args: Arguments) -> Any:
    """No epsilon."""
    return right(args, eps=0.0)


@fault(*NORMS, first="faint")
def eps_is_a_constant(right: Right, args: Arguments) -> Any:
    """An epsilon of 1e-5 is compiled into the kernel, the argument ignored."""
    return right(args, eps=1e-5)


@fault(*NORMS, first="faint")
def eps_of_another_model(right: Right, args: Arguments) -> Any:
    """The norm is built without its epsilon and takes a default of 1e-8."""
    return right(args, eps=1e-8)


@fault(*NORMS, first="faint")
def eps_on_the_sum(right: Right, args: Arguments) -> Any:
    """The epsilon is added to the sum of squares, not to their mean."""
    return right(args, eps=args["eps"] / args["x"].shape[-1])


@fault(*NORMS, first="faint")
def eps_outside_root(right: Right, args: Arguments) -> Any:
    """The epsilon is added to the root."""
    kept = {name: args[name].clone() for name in ("x", "residual") if args.get(name) is not None}
    out = right(args)
    x = args["residual"] if "residual" in kept else kept["x"]
    root = x.float().square().mean(-1, keepdim=True).sqrt()
    return (out.float() * (root.square() + args["eps"]).sqrt() / (root + args["eps"])).to(out.dtype)


@fault(*NORMS)
def weight_missing(right: Right, args: Arguments) -> Any:
    """The weight is not applied."""
    return right(args, weight=torch.ones_like(args["weight"]))


@fault(*NORMS)
def weight_plus_one(right: Right, args: Arguments) -> Any:
    """The weight is taken as an offset from 1, as another model family stores it."""
    return right(args, weight=1 + args["weight"])


@fault(*NORMS)
def mean_subtracted(right: Right, args: Arguments) -> Any:
    """Layer norm: the mean is subtracted first."""
    x = args["x"]
    return right(args, x=(x.float() - x.float().mean(-1, keepdim=True)).to(x.dtype))


@fault("rms_norm", first="row_strided")
def rows_taken_as_packed(right: Right, args: Arguments) -> Any:
    """The row stride of x is ignored."""
    return right(args, x=dense(args["x"]))


@fault("rms_norm")
def residual_not_updated(right: Right, args: Arguments) -> Any:
    """The sum is normalised and not stored."""
    residual = args["residual"]
    return right(args, residual=None if residual is None else residual.clone())


@fault("rms_norm", first="residual")
def residual_not_normalised(right: Right, args: Arguments) -> Any:
    """The residual is added and x alone normalised."""
    right(args)
    return right(args, residual=None)


@fault("rms_norm", first="residual")
def residual_added_twice(right: Right, args: Arguments) -> Any:
    """The caller adds the residual and so does the kernel."""
    if args["residual"] is not None:
        args["residual"].add_(args["x"])
    return right(args)


@fault("rms_norm", first="large")
def square_overflows(right: Right, args: Arguments) -> Any:
    """Squares are summed in fp16's range."""
    out = right(args)
    source = args["x"] if args["residual"] is None else args["residual"]
    return torch.where((source.float().abs() > 256).any(-1, keepdim=True), torch.zeros_like(out), out)


@fault("gated_rms_norm")
def silu_gate(right: Right, args: Arguments) -> Any:
    """The gate is SiLU, as in other gated norms."""
    out, gate = right(args), args["gate"].float()
    return (out.float() * gate).to(out.dtype)


@fault("gated_rms_norm")
def gate_before_norm(right: Right, args: Arguments) -> Any:
    """x is gated and then normalised."""
    gated = (args["x"].float() * torch.sigmoid(args["gate"].float())).to(args["x"].dtype)
    return right(args, x=gated, gate=torch.full_like(args["gate"], 100.0))


@fault("gated_rms_norm")
def norm_over_all_heads(right: Right, args: Arguments) -> Any:
    """One norm over all heads' channels."""
    x = args["x"].float()
    mean = x.square().mean((-2, -1), keepdim=True)
    out = x * torch.rsqrt(mean + args["eps"]) * args["weight"] * torch.sigmoid(args["gate"].float())
    return out.to(args["x"].dtype)


@fault("gated_rms_norm")
def no_gate(right: Right, args: Arguments) -> Any:
    """The gate is left to a later kernel that is not there."""
    return right(args, gate=torch.full_like(args["gate"], 100.0))


@fault("gated_rms_norm", "sigmoid_gate", first="row_strided")
def gate_taken_as_packed(right: Right, args: Arguments) -> Any:
    """The row stride of the gate, a column slice of a fused projection, is ignored."""
    return right(args, gate=dense(args["gate"]))


@fault("sigmoid_gate")
def silu_in_place_of_sigmoid(right: Right, args: Arguments) -> Any:
    """The gate is SiLU."""
    return (args["x"].float() * silu(args["gate"].float())).to(args["x"].dtype)


@fault("sigmoid_gate")
def operands_swapped(right: Right, args: Arguments) -> Any:
    """sigmoid(x) times the gate."""
    return right(args, x=args["gate"], gate=args["x"])


@fault("sigmoid_gate", first="saturated")
def exp_overflows(right: Right, args: Arguments) -> Any:
    """exp(g) / (1 + exp(g)), which is not a number for a large gate in half precision."""
    out = right(args)
    return torch.where(args["gate"].float() > 65.0, torch.nan, out)


@fault("attn_res_mix")
def snapshot_after_mixing(right: Right, args: Arguments) -> Any:
    """The stored block is the mixture, not the running sum."""
    out = right(args, out_weight=None)
    if args["store"]:
        args["blocks"][args["num_blocks"]] = out
    return out if args["out_weight"] is None else rms_norm(out, args["out_weight"], args["out_eps"])


@fault("attn_res_mix", first="block_end")
def snapshot_before_delta(right: Right, args: Arguments) -> Any:
    """The stored block lacks the last sub-layer's output."""
    before = args["prefix"].clone()
    out = right(args)
    if args["store"]:
        args["blocks"][args["num_blocks"]] = before
    return out


@fault("attn_res_mix", first="block_end")
def snapshot_in_the_last_block(right: Right, args: Arguments) -> Any:
    """The block is stored one place too early, over the last one."""
    if not (args["store"] and args["num_blocks"]):
        return right(args)
    out = right(args, store=False)
    args["blocks"][args["num_blocks"] - 1] = args["prefix"]
    return out


@fault("attn_res_mix")
def output_mix_omitted(right: Right, args: Arguments) -> Any:
    """The running sum is normalised and not mixed with the blocks."""
    return right(args, num_blocks=0, store=False) if not args["store"] else _unmixed(right, args)


def _unmixed(right: Right, args: Arguments) -> Tensor:
    right(args)
    mix = args["prefix"].clone()
    return mix if args["out_weight"] is None else rms_norm(mix, args["out_weight"], args["out_eps"])


@fault("attn_res_mix", first="reset")
def reset_ignored(right: Right, args: Arguments) -> Any:
    """The running sum is never begun anew."""
    return right(args, reset=False)


@fault("attn_res_mix")
def delta_ignored(right: Right, args: Arguments) -> Any:
    """The sub-layer's output is added after the mix."""
    delta = args["delta"]
    out = right(args, prefix=args["prefix"].clone(), delta=None)
    right(args, delta=delta)
    return out


@fault("attn_res_mix")
def one_block_too_many(right: Right, args: Arguments) -> Any:
    """The block about to be written is mixed in."""
    count = min(args["num_blocks"] + 1, args["blocks"].shape[0])
    return right(args, num_blocks=count, store=False) if count != args["num_blocks"] else right(args)


@fault("attn_res_mix")
def first_block_left_out(right: Right, args: Arguments) -> Any:
    """The token embedding's block is skipped."""
    kept = max(args["num_blocks"] - 1, 0)
    wrong = right(args, prefix=args["prefix"].clone(), blocks=args["blocks"][1:], num_blocks=kept, store=False)
    right(args)
    return wrong


def _mixed(
    args: Arguments,
    values: Callable[[Tensor, Tensor], Tensor] = lambda raw, keys: raw,
    scores: Callable[[Tensor], Tensor] = lambda s: s,
    eps: float | None = None,
    normalised: bool = True,
) -> Tensor:
    """The mix with something wrong in it, over the blocks and an updated prefix."""
    sources = torch.cat((args["blocks"][: args["num_blocks"]], args["prefix"].unsqueeze(0))).float()
    small: float = args["eps"] if eps is None else eps
    keys = sources * torch.rsqrt(sources.square().mean(-1, keepdim=True) + small) if normalised else sources
    weights = scores((keys * args["key_weight"]).sum(-1, keepdim=True)).softmax(0)
    mix = (weights * values(sources, keys)).sum(0).to(args["prefix"].dtype)
    return mix if args["out_weight"] is None else rms_norm(mix, args["out_weight"], args["out_eps"])


def _add_mix(name: str, bug: str, first: str = "", **wrong: Any) -> None:
    def mutant(right: Right, args: Arguments) -> Any:
        right(args)
        return _mixed(args, **wrong)

    NORM.add(name, "attn_res_mix", bug, mutant, first)


_add_mix("values_normalised", "The values are normalised like the keys", values=lambda raw, keys: keys)
_add_mix("keys_raw", "The keys are not normalised", normalised=False)
_add_mix("scores_scaled", "Scores are divided by the root of the width", scores=lambda s: s / 8)
_add_mix("scores_in_bf16", "Scores pass through bf16", "sharp_scores", scores=lambda s: s.bfloat16().float())
_add_mix("uniform_weights", "The blocks are averaged", scores=torch.zeros_like)
_add_mix("key_eps_constant", "The keys' epsilon is compiled in", "faint", eps=1e-5)


@fault("attn_res_mix", first="faint")
def out_eps_for_keys(right: Right, args: Arguments) -> Any:
    """One epsilon serves both norms."""
    return right(args, eps=args["out_eps"])


@fault("attn_res_mix", first="faint")
def key_eps_for_output(right: Right, args: Arguments) -> Any:
    """The keys' epsilon serves the output norm too."""
    return right(args, out_eps=args["eps"])


@fault("attn_res_mix")
def output_norm_missing(right: Right, args: Arguments) -> Any:
    """The mix is returned without the layer's norm."""
    return right(args, out_weight=None)
