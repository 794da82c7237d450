"""Faults of KDA layers as wholes: verification, commit, and every fault of the parts inside the fused operators."""

from __future__ import annotations

from typing import Any

import torch

from k3hal.conform.faults.convolution import CONVOLUTION
from k3hal.conform.faults.fault import Arguments, Catalogue, Right, reference_with
from k3hal.conform.faults.norm import NORM
from k3hal.conform.faults.recurrence import RECURRENCE

KDA = Catalogue()
fault = KDA.fault
_PARTS = [one for family in (CONVOLUTION, RECURRENCE, NORM) for one in family]
_ONLY_PREFILL = (
    "history_of_the_neighbour", "stale_slot_read", "padding_rows_unwritten", "empty_sequence_clears_slot",
    "empty_sequences_skipped", "sequence_starts_one_early", "null_slot_written", "null_rows_unwritten",
)  # fmt: skip
"""What a call with one token for each of its sequences, all of them with a state, cannot have. What a part leaves in
rows of nobody, the fused operators clear."""
KDA.within(
    "kda_prefill",
    [p for p in _PARTS if p.op in ("causal_conv1d", "kda_gate", "kda_chunk", "gated_rms_norm")],
    but=("padding_rows_unwritten",),
)
KDA.within(
    "kda_decode",
    [p for p in _PARTS if p.op in ("causal_conv1d", "kda_gate", "kda_recurrent", "gated_rms_norm")],
    but=_ONLY_PREFILL,
)


@fault("kda_decode")
def conv_history_not_shifted(right: Right, args: Arguments) -> Any:
    """The decode kernel writes the new input over the newest history entry and does not shift the others."""
    before = args["conv_state"].clone()
    out = right(args)
    live = args["slots"][args["slots"] != 0].long()
    args["conv_state"][live, :-1] = before[live, :-1]
    return out


@fault("kda_decode", first="contiguous_strided")
def dense_slots_assumed(right: Right, args: Arguments) -> Any:
    """Slots are addressed as if states lay densely, whatever the arena's slot stride."""
    state = args["state"]
    dense = state.as_strided(state.shape, torch.empty(state.shape, device="meta").stride())
    return right(args, state=dense)


@fault("kda_verify")
def states_advanced(right: Right, args: Arguments) -> Any:
    """Verification leaves the state after all drafts: a rejection cannot be undone."""
    out = right(args)
    for slot in args["slots"].tolist():
        if slot:
            args["state"][slot] *= 0.5
    return out


@fault("kda_verify")
def keys_recorded_normalised(right: Right, args: Arguments) -> Any:
    """The recorded keys are those after the L2 norm."""
    out, u, k, gate, conv_in = right(args)
    return out, u, torch.nn.functional.normalize(k.float(), dim=-1).to(k.dtype), gate, conv_in


@fault("kda_verify")
def corrections_without_beta(right: Right, args: Arguments) -> Any:
    """The recorded corrections lack beta."""
    out, u, k, gate, conv_in = right(args)
    beta = torch.sigmoid(args["beta_logits"].float()).view(*u.shape[:3], 1)
    return out, torch.where(u == 0, u, u / beta), k, gate, conv_in


@fault("kda_verify")
def gate_recorded_with_bias(right: Right, args: Arguments) -> Any:
    """The recorded gate has dt_bias added already, and commit will add it again."""
    out, u, k, gate, conv_in = right(args)
    return out, u, k, (gate.float() + args["dt_bias"]).to(gate.dtype), conv_in


@fault("kda_verify", first="eight")
def drafts_unordered(right: Right, args: Arguments) -> Any:
    """Rows are taken token-major where they are sequence-major."""
    count, width = args["slots"].shape[0], args["width"]
    turned = {}
    for name in ("qkv", "raw_gate", "beta_logits", "out_gate"):
        turned[name] = args[name].unflatten(0, (count, width)).transpose(0, 1).flatten(0, 1)
    return right(args, slots=args["slots"], **turned)


@fault("kda_verify", first="null_slots")
def null_rows_unwritten(right: Right, args: Arguments) -> Any:
    """Rows of the null slot are left as the allocator gave them."""
    out, *records = right(args)
    wrong = torch.empty_like(out)
    live = (args["slots"] != 0).repeat_interleave(args["width"])
    wrong[live] = out[live]
    return (wrong, *records)


@fault("kda_commit")
def snapshot_one_token_late(right: Right, args: Arguments) -> Any:
    """One draft too many is committed: the bonus token counts as accepted."""
    return right(args, accepted=(args["accepted"] + (args["accepted"] > 0)).clamp_max(args["k"].shape[1]).int())


@fault("kda_commit")
def snapshot_one_token_early(right: Right, args: Arguments) -> Any:
    """The last accepted draft is not committed."""
    return right(args, accepted=(args["accepted"] - 1).clamp_min(0))


@fault("kda_commit", first="eight")
def everything_accepted(right: Right, args: Arguments) -> Any:
    """All drafts are committed, accepted or not."""
    return right(args, accepted=torch.full_like(args["accepted"], args["k"].shape[1]))


@fault("kda_commit", first="eight")
def conv_history_of_all_drafts(right: Right, args: Arguments) -> Any:
    """The convolution's history ends with the last draft, not with the last accepted one."""
    before = args["conv_state"].clone()
    right(args)
    after = args["state"].clone()
    args["conv_state"].copy_(before)
    everything_accepted(right, args)
    args["state"].copy_(after)


@fault("kda_commit")
def keys_not_normalised(right: Right, args: Arguments) -> Any:
    """Recorded keys are taken as normalised already."""
    return reference_with("kda_commit", args, l2_normalise=lambda k: k.float())


@fault("kda_commit", first="faint")
def keys_normalised_by_mean(right: Right, args: Arguments) -> Any:
    """The epsilon of the recorded keys' norm is added to the mean of squares."""
    eps = 1e-6 * args["k"].shape[-1]
    norm = lambda k: k.float() * torch.rsqrt(k.float().square().sum(-1, keepdim=True) + eps)  # noqa: E731
    return reference_with("kda_commit", args, l2_normalise=norm)


@fault("kda_commit")
def decay_forgotten(right: Right, args: Arguments) -> Any:
    """Commit adds the corrections to a state that does not decay."""
    return right(args, raw_gate=torch.full_like(args["raw_gate"], -100.0))


@fault("kda_commit", first="eight")
def rejected_row_rewritten(right: Right, args: Arguments) -> Any:
    """A row with nothing accepted still moves its convolution history by one."""
    right(args)
    for slot, accepted in zip(args["slots"].tolist(), args["accepted"].tolist(), strict=True):
        if slot and not accepted:
            args["conv_state"][slot] = args["conv_state"][slot].roll(-1, 0)
