"""Faults of the short convolution: its taps, its history and whose history it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from k3hal.conform.faults.fault import Arguments, Catalogue, Right, live_rows_of, reference_with

CONVOLUTION = Catalogue()
fault = CONVOLUTION.fault


@fault("causal_conv1d")
def taps_reversed(right: Right, args: Arguments) -> Any:
    """The first tap is put on the current token: the weight is read as a mathematical convolution."""
    return right(args, weight=args["weight"].flip(1))


@fault("causal_conv1d", first="empty_sequences")
def history_off_by_one(right: Right, args: Arguments) -> Any:
    """The history ring starts one entry too late, so that the oldest input counts as the newest."""
    out = right(args, conv_state=args["conv_state"].roll(1, 1))
    right(args)
    return out


@fault("causal_conv1d")
def no_activation(right: Right, args: Arguments) -> Any:
    """SiLU after the convolution is forgotten."""
    return reference_with("causal_conv1d", args, silu=lambda x: x)


@fault("causal_conv1d")
def sigmoid_activation(right: Right, args: Arguments) -> Any:
    """Sigmoid takes the place of SiLU."""
    return reference_with("causal_conv1d", args, silu=torch.sigmoid)


@fault("causal_conv1d")
def history_holds_outputs(right: Right, args: Arguments) -> Any:
    """The history keeps what came out of the convolution instead of the raw inputs."""
    out = right(args)
    bounds, keep = args["cu_seqlens"].tolist(), args["conv_state"].shape[1]
    for n, slot in enumerate(args["slots"].tolist()):
        rows = out[bounds[n] : bounds[n + 1]][-keep:]
        if slot and len(rows):
            args["conv_state"][slot, keep - len(rows) :] = rows
    return out


@fault("causal_conv1d", first="empty_sequences")
def short_sequence_clears_history(right: Right, args: Arguments) -> Any:
    """A sequence shorter than the history does not keep the older part of it."""
    out = right(args)
    keep = args["conv_state"].shape[1]
    for slot, length in zip(args["slots"].tolist(), args["cu_seqlens"].diff().tolist(), strict=True):
        if slot and 0 < length < keep:
            args["conv_state"][slot, : keep - length] = 0
    return out


@fault("causal_conv1d", first="padded_strided")
def history_of_the_neighbour(right: Right, args: Arguments) -> Any:
    """Packed sequences are convolved as one: the first rows of each see the end of the one before."""
    joined = torch.tensor([0, int(args["cu_seqlens"][-1])], dtype=torch.int32)
    fresh = {"slots": args["slots"].new_ones(1), "has_state": torch.zeros(1, dtype=torch.bool)}
    out = right(args, conv_state=args["conv_state"].clone(), cu_seqlens=joined, **fresh)
    right(args)
    return torch.where(live_rows_of(args).unsqueeze(-1), out, torch.zeros_like(out))


@fault("causal_conv1d")
def accumulates_in_bf16(right: Right, args: Arguments) -> Any:
    """The taps are multiplied and summed in bf16."""
    low = {name: args[name].bfloat16().to(args[name].dtype) for name in ("weight", "x")}
    out = right(args | low, conv_state=args["conv_state"].bfloat16().to(args["conv_state"].dtype).clone())
    right(args)
    return out.bfloat16().to(out.dtype)


@fault("causal_conv1d")
def channels_of_one_tap(right: Right, args: Arguments) -> Any:
    """The weight is read as [W, C]: it was meant to be transposed for this kernel."""
    return right(args, weight=args["weight"].T.reshape(args["weight"].shape))


STATEFUL = ("causal_conv1d", "kda_chunk")
"""Operators over packed sequences that own a state; the faults below are those of slots, lengths and padding."""


def states(args: Arguments) -> dict[str, Tensor]:
    """The states of a call by name."""
    return {name: args[name] for name in ("conv_state", "state") if name in args}


@fault(*STATEFUL, "kda_recurrent", "kda_decode", "kda_prefill", first="around_tile")
def slot_of_the_first_for_all(right: Right, args: Arguments) -> Any:
    """Every sequence uses the first one's slot: the kernel forgot to add the sequence to the table's address."""
    return right(args, slots=args["slots"][:1].expand(args["slots"].shape).contiguous())


@fault(*STATEFUL, "kda_recurrent", "kda_decode", "kda_prefill", "kda_commit", first="null_slot")
def null_slot_written(right: Right, args: Arguments) -> Any:
    """Padding sequences are computed like others, and their end state goes into the null slot."""
    out = right(args)
    if bool((args["slots"] == 0).any()):
        for state in states(args).values():
            state[0] = 0
    return out


@fault(*STATEFUL, "kda_prefill", first="one_token")
def stale_slot_read(right: Right, args: Arguments) -> Any:
    """A new sequence starts from whatever the slot's last owner left there."""
    return right(args, has_state=torch.ones_like(args["has_state"]))


@fault(*STATEFUL, "kda_prefill")
def state_never_read(right: Right, args: Arguments) -> Any:
    """A restored or continued sequence starts from zeros: the prefix cache's snapshot is ignored."""
    return right(args, has_state=torch.zeros_like(args["has_state"]))


@fault(*STATEFUL, "kda_prefill")
def state_never_written(right: Right, args: Arguments) -> Any:
    """The end state stays in registers: the next step starts from the old one."""
    return right(args, **{name: state.clone() for name, state in states(args).items()})


@fault(*STATEFUL, "kda_prefill", first="null_slot")
def padding_rows_unwritten(right: Right, args: Arguments) -> Any:
    """Rows that belong to no sequence are left as the allocator gave them."""
    live, out = live_rows_of(args), right(args)
    wrong = torch.empty_like(out)
    wrong[live] = out[live]
    return wrong


@fault("kda_recurrent", "kda_decode", first="null_slots")
def null_rows_unwritten(right: Right, args: Arguments) -> Any:
    """Rows of the null slot are skipped altogether: the result holds what the allocator gave."""
    out = right(args)
    wrong = torch.empty_like(out)
    wrong[args["slots"] != 0] = out[args["slots"] != 0]
    return wrong


@fault(*STATEFUL, "kda_prefill", first="empty_sequences")
def empty_sequence_clears_slot(right: Right, args: Arguments) -> Any:
    """A sequence without new tokens still writes its (zero) accumulator to its slot."""
    out = right(args)
    for slot, length in zip(args["slots"].tolist(), args["cu_seqlens"].diff().tolist(), strict=True):
        if slot and length == 0:
            for state in states(args).values():
                state[slot] = 0
    return out


@fault(*STATEFUL, "kda_prefill")
def last_token_cut(right: Right, args: Arguments) -> Any:
    """cu_seqlens is taken as inclusive ends: each sequence's last token is left out."""
    bounds = args["cu_seqlens"].clone()
    bounds[-1] -= int(bounds[-1] > bounds[-2])
    return right(args, cu_seqlens=bounds)


@fault(*STATEFUL, "kda_prefill", first="around_tile")
def sequence_starts_one_early(right: Right, args: Arguments) -> Any:
    """Every sequence but the first begins with its neighbour's last token."""
    bounds = args["cu_seqlens"].clone()
    bounds[1:-1] -= (bounds[1:-1] > bounds[:-2]).to(bounds.dtype)
    return right(args, cu_seqlens=bounds)


@fault(*STATEFUL, "kda_prefill", first="empty_sequences")
def empty_sequences_skipped(right: Right, args: Arguments) -> Any:
    """Empty sequences are dropped from the offsets and not from the slots: later ones get a neighbour's slot."""
    bounds = args["cu_seqlens"]
    kept = bounds.unique()
    count = len(kept) - 1
    return right(args, cu_seqlens=kept, slots=args["slots"][:count], has_state=args["has_state"][:count])
