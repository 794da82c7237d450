"""Faults of the gated activations: halves, caps and constants."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu

from k3hal.conform.faults.fault import Arguments, Catalogue, Right
from k3hal.conform.faults.norm import dense

ACTIVATION = Catalogue()
fault = ACTIVATION.fault
BOTH = ("silu_and_mul", "situ_and_mul")


@fault(*BOTH)
def halves_swapped(right: Right, args: Arguments) -> Any:
    """The up half is taken for the gate half."""
    return right(args, x=torch.cat(args["x"].chunk(2, dim=-1)[::-1], dim=-1))


@fault(*BOTH)
def halves_interleaved(right: Right, args: Arguments) -> Any:
    """Gate and up are read as alternating columns."""
    return right(args, x=torch.cat((args["x"][..., ::2], args["x"][..., 1::2]), dim=-1))


@fault(*BOTH, first="strided")
def rows_taken_as_packed(right: Right, args: Arguments) -> Any:
    """The row stride is ignored."""
    return right(args, x=dense(args["x"]))


@fault(*BOTH, first="odd")
def computed_in_bf16(right: Right, args: Arguments) -> Any:
    """Gate and up are multiplied after each was rounded to bf16."""
    gate, up = args["x"].bfloat16().chunk(2, dim=-1)
    if "beta" not in args:
        return (silu(gate) * up).to(args["x"].dtype)
    beta, cap = args["beta"], args["linear_beta"]
    return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (cap * torch.tanh(up / cap))).to(args["x"].dtype)


@fault("silu_and_mul")
def gelu(right: Right, args: Arguments) -> Any:
    """GELU in place of SiLU."""
    gate, up = args["x"].float().chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate) * up).to(args["x"].dtype)


@fault("situ_and_mul")
def silu_for_situ(right: Right, args: Arguments) -> Any:
    """SiLU in place of SiTU."""
    gate, up = args["x"].float().chunk(2, dim=-1)
    return (silu(gate) * up).to(args["x"].dtype)


@fault("situ_and_mul")
def sigmoid_sees_the_cap(right: Right, args: Arguments) -> Any:
    """The sigmoid is taken of the capped gate."""
    gate, up = args["x"].float().chunk(2, dim=-1)
    capped = args["beta"] * torch.tanh(gate / args["beta"])
    cap = args["linear_beta"]
    return (capped * torch.sigmoid(capped) * (cap * torch.tanh(up / cap))).to(args["x"].dtype)


@fault("situ_and_mul")
def beta_defaults_to_one(right: Right, args: Arguments) -> Any:
    """Both caps are left at the library's default, 1."""
    return right(args, beta=1.0, linear_beta=1.0)


@fault("situ_and_mul")
def betas_swapped(right: Right, args: Arguments) -> Any:
    """The two caps go to each other's half."""
    return right(args, beta=args["linear_beta"], linear_beta=args["beta"])


@fault("situ_and_mul", first="other_betas")
def betas_are_constants(right: Right, args: Arguments) -> Any:
    """4 and 25 are compiled into the kernel, the arguments ignored."""
    return right(args, beta=4.0, linear_beta=25.0)


@fault("situ_and_mul", first="saturated")
def up_uncapped(right: Right, args: Arguments) -> Any:
    """The cap of the up half is off, its default."""
    gate, up = args["x"].float().chunk(2, dim=-1)
    return (args["beta"] * torch.tanh(gate / args["beta"]) * torch.sigmoid(gate) * up).to(args["x"].dtype)


@fault("situ_and_mul", first="saturated")
def up_clamped(right: Right, args: Arguments) -> Any:
    """A hard clamp in place of the soft cap."""
    gate, up = args["x"].float().chunk(2, dim=-1)
    cap = args["linear_beta"]
    gate = args["beta"] * torch.tanh(gate / args["beta"]) * torch.sigmoid(gate)
    return (gate * up.clamp(-cap, cap)).to(args["x"].dtype)
