"""Faults of routed experts in every number format, and of the latent MoE around them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from k3hal.conform.faults.activation import ACTIVATION
from k3hal.conform.faults.fault import Arguments, Catalogue, Right
from k3hal.dispatch.ops.latent_moe import EXPERTS as EXPERTS_OF
from k3hal.dispatch.ops.moe_experts_mxfp4 import moe_experts_mxfp4

EXPERTS, LATENT = Catalogue(), Catalogue()
MXFP4, A8W4, INT4 = "moe_experts_mxfp4", "moe_experts_a8w4", "moe_experts_int4"
FORMATS = ("moe_experts", MXFP4, A8W4, INT4)


@EXPERTS.fault(*FORMATS)
def gate_and_up_swapped(right: Right, args: Arguments) -> Any:
    """w13's rows are read as [up; gate]."""
    names = [name for name in ("w13", "w13_scale") if name in args]
    return right(args, **{name: torch.cat(args[name].chunk(2, dim=1)[::-1], dim=1) for name in names})


@EXPERTS.fault(*FORMATS)
def silu_for_situ(right: Right, args: Arguments) -> Any:
    """SiLU in place of SiTU."""
    return right(args, activation="silu")


@EXPERTS.fault(*FORMATS, first="silu")
def situ_for_silu(right: Right, args: Arguments) -> Any:
    """SiTU in place of SiLU, for a checkpoint of the older model."""
    return right(args, activation="situ")


@EXPERTS.fault(*FORMATS)
def beta_defaults_to_one(right: Right, args: Arguments) -> Any:
    """The gate's cap is left at the library's default, 1."""
    return right(args, beta=1.0)


@EXPERTS.fault(*FORMATS, first="loud")
def up_uncapped(right: Right, args: Arguments) -> Any:
    """The up half's cap is off, its default."""
    return right(args, linear_beta=1e6)


@EXPERTS.fault(*FORMATS, first="loud")
def betas_are_constants(right: Right, args: Arguments) -> Any:
    """4 and 25 are compiled into the kernel, the arguments ignored."""
    return right(args, beta=4.0, linear_beta=25.0)


@EXPERTS.fault(*FORMATS)
def weights_not_applied(right: Right, args: Arguments) -> Any:
    """The experts are added up unweighted."""
    return right(args, weights=torch.ones_like(args["weights"]))


@EXPERTS.fault(*FORMATS)
def weight_before_activation(right: Right, args: Arguments) -> Any:
    """The router's weight multiplies an expert's input, not its output."""
    total = torch.zeros_like(args["x"], dtype=torch.float32)
    for k in range(args["ids"].shape[1]):
        weight = args["weights"][:, k : k + 1]
        used = {"ids": args["ids"][:, k : k + 1], "weights": torch.ones_like(weight)}
        total += right(args, x=(args["x"] * weight).to(args["x"].dtype), **used).float()
    return total.to(args["x"].dtype)


@EXPERTS.fault(*FORMATS, first="negative")
def negative_id_is_the_last(right: Right, args: Arguments) -> Any:
    """A negative id, an expert of another rank, wraps to the last expert."""
    ids = args["ids"]
    return right(args, ids=torch.where(ids < 0, args["w13"].shape[0] - 1, ids))


@EXPERTS.fault(*FORMATS, first="negative")
def negative_id_is_the_first(right: Right, args: Arguments) -> Any:
    """A negative id is clamped to expert 0."""
    return right(args, ids=args["ids"].clamp_min(0))


@EXPERTS.fault(*FORMATS, first="padding")
def padding_rows_unwritten(right: Right, args: Arguments) -> Any:
    """Rows without an expert are left as the allocator gave them."""
    out, used = right(args), (args["ids"] >= 0).any(-1)
    wrong = torch.empty_like(out)
    wrong[used] = out[used]
    return wrong


@EXPERTS.fault(*FORMATS, first="all_to_one")
def capacity_exceeded(right: Right, args: Arguments) -> Any:
    """An expert takes at most 32 rows; the rest is dropped."""
    ids = args["ids"].clone()
    for expert in ids.unique().tolist():
        where = (ids == expert).nonzero()[32:]
        ids[where[:, 0], where[:, 1]] = -1
    out = right(args, ids=ids)
    return torch.where((args["ids"] >= 0).any(-1, keepdim=True), out, torch.zeros_like(out)).nan_to_num(0.0)


@EXPERTS.fault(*FORMATS)
def summed_in_bf16(right: Right, args: Arguments) -> Any:
    """The experts' outputs are added one by one in bf16."""
    total = torch.zeros_like(args["x"], dtype=torch.bfloat16)
    for k in range(args["ids"].shape[1]):
        total += right(args, ids=args["ids"][:, k : k + 1], weights=args["weights"][:, k : k + 1]).bfloat16()
    return total.to(args["x"].dtype)


@EXPERTS.fault(*FORMATS)
def last_choice_left_out(right: Right, args: Arguments) -> Any:
    """A loop over k - 1 choices."""
    ids = args["ids"].clone()
    ids[:, -1] = -1
    return right(args, ids=ids).nan_to_num(0.0)


@EXPERTS.fault(*FORMATS, first="one_token")
def wrong_for_one_token(right: Right, args: Arguments) -> Any:
    """The path for a single token ignores the second half of the hidden channels."""
    if args["x"].shape[0] != 1:
        return right(args)
    x = args["x"].clone()
    x[:, x.shape[1] // 2 :] = 0
    return right(args, x=x)


@EXPERTS.fault(MXFP4)
def one_scale_doubled(right: Right, args: Arguments) -> Any:
    """One group of 32 weights has twice its scale in one expert."""
    scale = args["w2_scale"].clone()
    scale[int(args["ids"].max().clamp_min(0)) if args["ids"].numel() else 0, 0, 0] += 1
    return right(args, w2_scale=scale)


@EXPERTS.fault(MXFP4, A8W4, INT4)
def nibbles_swapped(right: Right, args: Arguments) -> Any:
    """The high nibble comes first."""
    return right(args, **{name: args[name] >> 4 | (args[name] & 15) << 4 for name in ("w13", "w2")})


@EXPERTS.fault(MXFP4, A8W4, INT4)
def scale_of_the_next_group(right: Right, args: Arguments) -> Any:
    """Every group has its neighbour's scale."""
    return right(args, **{name: args[name].roll(1, -1) for name in ("w13_scale", "w2_scale")})


@EXPERTS.fault(MXFP4, A8W4, INT4)
def scale_of_the_next_row(right: Right, args: Arguments) -> Any:
    """Every row has its neighbour's scales: the scale tensor was swizzled and not read so."""
    return right(args, w13_scale=args["w13_scale"].roll(1, 1))


@EXPERTS.fault(MXFP4, A8W4, INT4)
def scale_of_the_first_expert(right: Right, args: Arguments) -> Any:
    """All experts use the first one's scales."""
    return right(args, w2_scale=args["w2_scale"][:1].expand_as(args["w2_scale"]).contiguous())


@EXPERTS.fault(MXFP4)
def activations_quantised(right: Right, args: Arguments) -> Any:
    """Activations are rounded to fp8 on the way in: W4A8 under the name of W4A16."""
    return right(args, x=args["x"].to(torch.float8_e4m3fn).to(args["x"].dtype))


@EXPERTS.fault(A8W4)
def rounded_to_two_bits_of_mantissa(right: Right, args: Arguments) -> Any:
    """Activations are rounded to E5M2, the other format of eight bits."""
    return right(args, x=args["x"].to(torch.float8_e5m2).to(args["x"].dtype))


@EXPERTS.fault(A8W4)
def activations_not_rounded(right: Right, args: Arguments) -> Any:
    """Activations are multiplied as they are: W4A16 under the name of W4A8."""
    return moe_experts_mxfp4(**args)


@EXPERTS.fault(INT4)
def codes_signed(right: Right, args: Arguments) -> Any:
    """Codes are read as two's complement, where 8 is their zero."""
    return right(args, **{name: args[name] ^ 0x88 for name in ("w13", "w2")})


@EXPERTS.fault(INT4)
def zero_is_seven(right: Right, args: Arguments) -> Any:
    """The codes' zero is one too low."""
    codes = {}
    for name in ("w13", "w2"):
        low, high = (args[name] & 15).clamp_max(14) + 1, (args[name] >> 4).clamp_max(14) + 1
        codes[name] = low | high << 4
    return right(args, **codes)


@LATENT.fault("latent_moe")
def norm_before_reduction(right: Right, args: Arguments) -> Any:
    """Each rank's share of the latent sum is normalised before they are added: two ranks share the experts."""
    half, none = args["w13"].shape[0] // 2, torch.zeros_like(args["shared_down"])
    ranks = [args["ids"] < half, args["ids"] >= half]
    parts = [right(args, ids=torch.where(mine, args["ids"], -1), shared_down=none) for mine in ranks]
    shared = right(args, up_weight=torch.zeros_like(args["up_weight"]))
    return parts[0] + parts[1] + shared


@LATENT.fault("latent_moe")
def norm_missing(right: Right, args: Arguments) -> Any:
    """The latent sum is not normalised."""
    return right(args, norm_weight=None)


@LATENT.fault("latent_moe")
def norm_weight_missing(right: Right, args: Arguments) -> Any:
    """The latent norm has no weight."""
    norm = args["norm_weight"]
    return right(args, norm_weight=None if norm is None else torch.ones_like(norm))


@LATENT.fault("latent_moe", first="faint_mxfp4")
def norm_eps_missing(right: Right, args: Arguments) -> Any:
    """The latent norm has no epsilon."""
    return right(args, eps=0.0)


@LATENT.fault("latent_moe", first="faint_mxfp4")
def norm_eps_is_a_constant(right: Right, args: Arguments) -> Any:
    """The latent norm's epsilon, 1e-5, is compiled in."""
    return right(args, eps=1e-5)


@LATENT.fault("latent_moe")
def shared_gated(right: Right, args: Arguments) -> Any:
    """The shared experts go through a sigmoid gate, as another model family has it."""
    routed, both = _apart(right, args)
    shared = both.float() - routed.float()
    return (routed.float() + torch.sigmoid(args["x"].float().mean(-1, keepdim=True)) * shared).to(routed.dtype)


def _apart(right: Right, args: Arguments) -> tuple[Tensor, Tensor]:
    """The routed part alone, and everything."""
    return right(args, shared_down=torch.zeros_like(args["shared_down"])), right(args)


@LATENT.fault("latent_moe")
def shared_left_out(right: Right, args: Arguments) -> Any:
    """The shared experts are missing."""
    return _apart(right, args)[0]


@LATENT.fault("latent_moe")
def shared_added_twice(right: Right, args: Arguments) -> Any:
    """Two ranks add the same replicated shared output."""
    routed, both = _apart(right, args)
    return (2 * both.float() - routed.float()).to(both.dtype)


@LATENT.fault("latent_moe")
def shared_scaled(right: Right, args: Arguments) -> Any:
    """The shared output is averaged over its two experts."""
    routed, both = _apart(right, args)
    return ((both.float() + routed.float()) / 2).to(both.dtype)


@LATENT.fault("latent_moe", first="padding_mxfp4")
def shared_only_for_routed_rows(right: Right, args: Arguments) -> Any:
    """A row none of whose experts is here loses its shared output too."""
    out = right(args)
    return torch.where((args["ids"] >= 0).any(-1, keepdim=True), out, torch.zeros_like(out))


_UNSEEN = ("rows_taken_as_packed", "situ_for_silu", "betas_are_constants", "wrong_for_one_token")
"""What no sample of latent_moe has: strided rows, one row of an odd kind, and in each format SiLU and other betas."""
for _format, _op in EXPERTS_OF.items():
    _parts = [replace(one, first=f"{one.first or 'tiny'}_{_format}") for one in EXPERTS if one.op == _op]
    LATENT.within("latent_moe", _parts, but=_UNSEEN)
LATENT.within("latent_moe", [replace(p, first="loud_mxfp4") for p in ACTIVATION if p.op == "situ_and_mul"], but=_UNSEEN)
