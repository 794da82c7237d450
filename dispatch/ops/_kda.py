"""What the KDA operators share: the recurrence of one token, and the cases their samples try."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from k3hal.dispatch.call import DimValue
from k3hal.dispatch.operator import Sample
from k3hal.dispatch.sampling_inputs import (
    ACTIVATION_DTYPES,
    DTYPES,
    RAGGED,
    int32,
    offsets,
    poison,
    randn,
    spread,
    with_padding,
)

L2_EPS = 1e-6
"""Inside the root, on the sum of squares (not the mean)."""


def l2_normalise(x: Tensor) -> Tensor:
    """`x / sqrt(sum x^2 + 1e-6)` over the last axis, fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def delta_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One token of the gated delta rule: decay, correct, read (k3_architecture §2.4).

    `state` [H, V, K] fp32; q, k, g [H, K]; v [H, V]; beta [H]. q and k are raw: normalised here, q also scaled by
    K^-0.5. Returns the new state, the correction u [H, V] and the output [H, V], all fp32.
    """
    q, k = l2_normalise(q) * q.shape[-1] ** -0.5, l2_normalise(k)
    decayed = state * g.float().exp().unsqueeze(-2)
    u = beta.unsqueeze(-1) * (v.float() - (decayed * k.unsqueeze(-2)).sum(-1))
    new = decayed + u.unsqueeze(-1) * k.unsqueeze(-2)
    return new, u, (new * q.unsqueeze(-2)).sum(-1)


def in_fp32(recurrence: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """kda_chunk or kda_recurrent with q, k, v widened, so that its output is not rounded."""
    return lambda q, k, v, *rest: recurrence(q.float(), k.float(), v.float(), *rest)


def split_qkv(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views q, k, v [T, H, K] of convolved rows [T, 3 H K]."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).unbind(1)
    return q, k, v


def live_rows(cu_seqlens: Tensor, slots: Tensor, rows: int) -> Tensor:
    """Bool [rows]: whether a packed row belongs to a sequence with a slot. No value leaves the device."""
    sequence = torch.searchsorted(cu_seqlens[1:], torch.arange(rows, device=slots.device), right=True)
    live = torch.cat((slots != 0, torch.zeros_like(slots[:1], dtype=torch.bool)))
    return live[sequence]


@dataclass(frozen=True, slots=True)
class KdaCase:
    """One set of sequences. Slots default to distinct ones in no order, `has_state` to True for each.

    `gate` says where the decays lie: `usual`, `open` (near 0), `closed` (at the bound; about -50 a token without
    one) or `mixed` (both, token by token). `padding` rows follow the last sequence. `scale` is that of q, k and
    v: where it is small, the L2 norm's epsilon decides. `eps` is the output norm's.
    """

    name: str
    lengths: tuple[int, ...]
    heads: int = 2
    head_dim: int = 32
    slots: tuple[int, ...] = ()
    has_state: tuple[bool, ...] = ()
    lower_bound: float | None = -5.0
    gate: str = "usual"
    strided: bool = False
    padding: int = 0
    scale: float = 1.0
    eps: float = 1e-5
    tags: frozenset[str] = frozenset({"tiny"})

    @property
    def dims(self) -> dict[str, DimValue]:
        bounded = self.lower_bound is not None
        return {"heads": self.heads, "head_dim": self.head_dim, "conv_width": 4, "bounded": bounded}

    @property
    def slot_ids(self) -> tuple[int, ...]:
        count = len(self.lengths)
        return self.slots or tuple((3 * i + 2) % count + 1 if count % 3 else count - i for i in range(count))

    @property
    def states(self) -> tuple[bool, ...]:
        return self.has_state or (True,) * len(self.lengths)


_EDGE, _HARD, _DEVICE = frozenset({"edge"}), frozenset({"adversarial"}), frozenset({"k3", "device"})
_MUST, _BENCH = frozenset({"must"}), frozenset({"device", "bench"})
_K3 = {"head_dim": 128, "tags": _DEVICE}

PREFILL_CASES = (
    KdaCase("three_tokens", (3,)),
    KdaCase("one_token", RAGGED["one_token"]),
    # Its result is q k times v: where that cancels rounding is all there is, so that seeds differ widely in fp32.
    KdaCase("fresh_token", RAGGED["one_token"], has_state=(False,), tags=_EDGE),
    KdaCase(
        "empty_sequences",
        RAGGED["empty_first_and_last"],
        has_state=(False, True, True, False, False),
        tags=_HARD | _MUST,
    ),
    KdaCase("around_tile", RAGGED["around_tile"], heads=3, tags=_EDGE),
    KdaCase("around_chunk", RAGGED["around_chunk"], has_state=(True, False, True), tags=_EDGE | _MUST),
    KdaCase("null_slot", (5, 4, 2), slots=(2, 0, 1), strided=True, padding=3, tags=_HARD | _MUST),
    KdaCase(
        "padded_strided", RAGGED["mixed"], has_state=(True, False) * 2 + (True,), strided=True, padding=9, tags=_HARD
    ),
    KdaCase("gates_open", (70,), gate="open", tags=_HARD),
    KdaCase("gates_at_bound", (70,), gate="closed", tags=_HARD),
    KdaCase("gates_mixed", (65, 33), gate="mixed", tags=_HARD),
    KdaCase("unbounded_strong", (70,), gate="closed", lower_bound=None, tags=_HARD),
    KdaCase("unbounded_mixed", (130,), gate="mixed", lower_bound=None, tags=_HARD),
    KdaCase("faint", (5, 1), scale=2e-4, tags=_HARD | _MUST),
    KdaCase("other_constants", (5, 1), lower_bound=-3.0, eps=0.1, tags=_HARD | _MUST),
    KdaCase("head_dim_128", (20,), heads=1, head_dim=128, tags=_EDGE),
    KdaCase("k3_tp16_short", (17, 1), heads=6, head_dim=128, tags=frozenset({"k3"})),
    *(KdaCase(f"k3_heads_{h}", (1000, 1, 257), heads=h, **_K3) for h in (6, 12, 96)),
)
"""For operators over packed sequences."""

PREFILL_BENCH = tuple(KdaCase(f"bench_heads_{h}_16k", (16_384,), heads=h, head_dim=128, tags=_BENCH) for h in (12, 96))
"""One long prompt on a rank of eight, and on one that has all heads."""

DECODE_CASES = (
    KdaCase("one", (1,)),
    KdaCase("one_null", (1,), slots=(0,), tags=_HARD),
    KdaCase("seven", (1,) * 7, heads=3, tags=_EDGE),
    KdaCase("contiguous_slots", (1,) * 4, slots=(2, 3, 4, 5), tags=_EDGE),
    KdaCase("null_slots", (1,) * 5, slots=(0, 4, 0, 1, 0), strided=True, tags=_HARD | _MUST),
    KdaCase("contiguous_strided", (1,) * 4, slots=(1, 2, 3, 4), strided=True, tags=_HARD | _MUST),
    KdaCase("gates_open", (1,) * 2, gate="open", tags=_HARD),
    KdaCase("gates_at_bound", (1,) * 2, gate="closed", tags=_HARD),
    KdaCase("unbounded", (1,) * 3, lower_bound=None, tags=_EDGE),
    KdaCase("unbounded_strong", (1,) * 3, lower_bound=None, gate="closed", tags=_HARD),
    KdaCase("faint", (1,) * 3, scale=2e-4, tags=_HARD | _MUST),
    KdaCase("other_constants", (1,) * 3, lower_bound=-3.0, eps=0.1, tags=_HARD | _MUST),
    KdaCase("head_dim_128", (1,) * 2, heads=1, head_dim=128, tags=_EDGE),
    KdaCase("k3_tp8_batch_2", (1,) * 2, heads=12, head_dim=128, tags=frozenset({"k3"})),
    *(KdaCase(f"k3_heads_{h}_batch_{n}", (1,) * n, heads=h, **_K3) for h in (6, 12, 96) for n in (1, 17)),
)
"""For operators with one token a row."""

DECODE_BENCH = tuple(
    KdaCase(f"bench_heads_{h}_batch_{n}", (1,) * n, heads=h, head_dim=128, tags=_BENCH)
    for h in (12, 96)
    for n in (1, 64, 256)
)
"""Batches of a rank of eight, and of one that has all heads."""

VERIFY_CASES = (
    KdaCase("one_token", (1,)),
    KdaCase("eight", (8,) * 3, tags=_EDGE),
    KdaCase("null_slots", (4,) * 4, slots=(0, 3, 0, 1), strided=True, tags=_HARD | _MUST),
    KdaCase("gates_at_bound", (8,) * 2, gate="closed", tags=_HARD),
    KdaCase("unbounded_strong", (5,) * 2, gate="closed", lower_bound=None, tags=_HARD),
    KdaCase("faint", (4,) * 2, scale=2e-4, tags=_HARD | _MUST),
    KdaCase("two", (2,) * 4, tags=_EDGE | _MUST),
    KdaCase("other_constants", (4,) * 2, lower_bound=-3.0, eps=0.1, tags=_HARD | _MUST),
    *(KdaCase(f"k3_heads_{h}", (8,) * 17, heads=h, **_K3) for h in (6, 12, 96)),
)
"""For operators over draft tokens: the same count for every sequence."""

_RAW_GATE = {"usual": (0.0, 1.0), "open": (-14.0, 0.5), "closed": (14.0, 0.5)}


def kda_samples(cases: tuple[KdaCase, ...], make: Any, phase: Any) -> Iterator[Sample]:
    """Samples of the cases in each activation dtype, those for timing in bf16 alone; `make(generator, case, dtype)`
    builds the arguments."""
    for case in cases:
        for dtype in ("bfloat16",) if case.tags == _BENCH else ACTIVATION_DTYPES:

            def build(gen: Generator, case: KdaCase = case, dtype: str = dtype) -> dict[str, Any]:
                return make(gen, case, dtype)

            yield Sample(case.name, build, case.dims, dtype, phase, case.tags)


def _raw_gate(gen: Generator, case: KdaCase, rows: int) -> Tensor:
    noise = randn(gen, rows, case.heads, case.head_dim)
    if case.gate != "mixed":
        shift, scale = _RAW_GATE[case.gate]
        return noise * scale + shift
    sign = torch.where(torch.rand(rows, 1, 1, generator=gen) < 0.5, -14.0, 14.0)
    return noise + sign


def _laid_out(x: Tensor, case: KdaCase) -> Tensor:
    """The rows [T, ...] with null sequences and padding poisoned, strided where the case asks for it."""
    of_each = zip(case.slot_ids, case.lengths, strict=True)
    live = torch.tensor([slot != 0 for slot, length in of_each for _ in range(length)], dtype=torch.bool)
    x[~live] = torch.nan
    x = with_padding(x, case.padding)
    return spread(x) if case.strided else x


def projection_inputs(gen: Generator, case: KdaCase, dtype: str) -> dict[str, Any]:
    """`qkv`, `raw_gate`, `beta_logits` and `out_gate` of a case, with its strides and padding rows."""
    rows, heads, dim = sum(case.lengths), case.heads, case.head_dim
    made = {
        "qkv": randn(gen, rows, 3 * heads * dim, dtype=dtype, scale=case.scale),
        "raw_gate": _raw_gate(gen, case, rows).to(DTYPES[dtype]),
        "beta_logits": randn(gen, rows, heads, dtype=dtype, scale=2.0),
        "out_gate": randn(gen, rows, heads, dim, dtype=dtype),
    }
    return {name: _laid_out(x, case) for name, x in made.items()}


def weight_inputs(gen: Generator, case: KdaCase) -> dict[str, Tensor]:
    """The layer's small fp32 weights. `A_log` spans the published initial range, log 1 to log 16."""
    heads, dim = case.heads, case.head_dim
    A_log = (torch.rand(heads, generator=gen) * 15 + 1).log()
    if case.gate == "open":
        A_log = torch.zeros(heads)
    return {
        "conv_weight": randn(gen, 3 * heads * dim, 4, scale=0.5),
        "A_log": A_log,
        "dt_bias": randn(gen, heads, dim, scale=0.5),
        "norm_weight": 1 + randn(gen, dim, scale=0.1),
    }


def cache_inputs(gen: Generator, case: KdaCase, dtype: str) -> dict[str, Tensor]:
    """`conv_state`, `state` and `slots`. The null slot and every slot that holds no state yet are poisoned."""
    count, heads, dim = max(case.slot_ids) + 2, case.heads, case.head_dim
    conv_state = randn(gen, count, 3, 3 * heads * dim, dtype=dtype, scale=case.scale)
    state = randn(gen, count, heads, dim, dim, scale=0.3)
    stale = [slot for slot, has in zip(case.slot_ids, case.states, strict=True) if not has]
    for slot in (0, *stale):
        poison(conv_state[slot])
        poison(state[slot])
    if case.strided:
        conv_state, state = spread(conv_state), spread(state)
    return {"conv_state": conv_state, "state": state, "slots": int32(case.slot_ids)}


def sequence_inputs(case: KdaCase) -> dict[str, Tensor]:
    """`cu_seqlens` and `has_state`."""
    return {"cu_seqlens": offsets(case.lengths), "has_state": torch.tensor(case.states)}


def recurrence_inputs(gen: Generator, case: KdaCase, dtype: str) -> dict[str, Tensor]:
    """`q`, `k`, `v`, `g`, `beta` after the convolution and the gate: what the recurrence alone takes.

    A `mixed` or `closed` gate without a bound reaches -50 a token, some of it next to tokens near 0.
    """
    rows, heads, dim = sum(case.lengths), case.heads, case.head_dim
    raw = _raw_gate(gen, case, rows)
    if case.lower_bound is None:
        g = -4.0 * torch.nn.functional.softplus(raw)
    else:
        g = case.lower_bound * torch.sigmoid(raw)
    made = {
        "q": randn(gen, rows, heads, dim, dtype=dtype, scale=case.scale),
        "k": randn(gen, rows, heads, dim, dtype=dtype, scale=case.scale),
        "v": randn(gen, rows, heads, dim, dtype=dtype, scale=case.scale),
        "g": g,
        "beta": torch.sigmoid(randn(gen, rows, heads, scale=2.0)),
    }
    return {name: _laid_out(x, case) for name, x in made.items()}
