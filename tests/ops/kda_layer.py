"""A small KDA layer for tests: projected tokens, weights, caches, and the operators on them by implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from k3hal.dispatch import Call, DeviceDescription
from k3hal.dispatch.overrides import parse_overrides
from k3hal.dispatch.registry import default_registry, get_operator
from k3hal.dispatch.sampling_inputs import int32, offsets, poison
from k3hal.dispatch.select import Selector

CPU = DeviceDescription(id="cpu", vendor="cpu", arch="x86_64", present=True)
KINDS = ("reference", "cpu", "portable")
PROJECTIONS = ("qkv", "raw_gate", "beta_logits", "out_gate")
HEADS, DIM, WIDTH = 2, 32, 4
CHANNELS = 3 * HEADS * DIM


def _portable(op: str) -> str:
    return next(p.id for p in default_registry().of(op) if p.backend == "cpu" and p.name != "native")


@cache
def bound(op: str, kind: str, dtype: str = "float32") -> Callable[..., Any]:
    """The reference, what selection binds on this CPU, or (portable) on one that our own kernels do not run on.

    Takes weights as the contract lays them out.
    """
    operator = get_operator(op)
    if kind == "reference":
        return operator.reference
    registry = default_registry()
    overrides = parse_overrides("" if kind == "cpu" else f"{op}={_portable(op)}", "test", registry)
    decision = Selector(registry, overrides, fallback="warn").decide(Call(op, CPU, dtype))

    def run(**args: Any) -> Any:
        return decision.function()(**{**args, **decision.prepare(**{w: args[w] for w in operator.weights})})

    return run


@dataclass
class Layer:
    """Weights of one layer and caches of `count` slots, all poisoned: nothing may be read before it is written."""

    weights: dict[str, Tensor]
    conv_state: Tensor
    state: Tensor
    lower_bound: float | None
    kind: str

    @classmethod
    def make(cls, seed: int = 0, kind: str = "cpu", lower_bound: float | None = -5.0, count: int = 6) -> Layer:
        gen = torch.Generator().manual_seed(seed)
        weights = {
            "conv_weight": torch.randn(CHANNELS, WIDTH, generator=gen) * 0.5,
            "A_log": torch.rand(HEADS, generator=gen) * 2,
            "dt_bias": torch.randn(HEADS, DIM, generator=gen) * 0.5,
            "norm_weight": 1 + torch.randn(DIM, generator=gen) * 0.1,
        }
        conv_state = poison(torch.empty(count, WIDTH - 1, CHANNELS))
        return cls(weights, conv_state, poison(torch.empty(count, HEADS, DIM, DIM)), lower_bound, kind)

    @property
    def caches(self) -> dict[str, Tensor]:
        return {"conv_state": self.conv_state, "state": self.state}

    def prefill(self, chunks: Sequence[dict[str, Tensor]], slots: Sequence[int], known: Sequence[bool]) -> list[Tensor]:
        """Outputs of each sequence's chunk, packed into one call."""
        packed = {name: torch.cat([chunk[name] for chunk in chunks]) for name in PROJECTIONS}
        lengths = [len(chunk["qkv"]) for chunk in chunks]
        out = bound("kda_prefill", self.kind)(
            **packed, **self.weights, **self.caches, slots=int32(slots), cu_seqlens=offsets(lengths),
            has_state=torch.tensor(known), lower_bound=self.lower_bound, eps=1e-5,
        )  # fmt: skip
        return list(out.split(lengths))

    def decode(self, tokens: dict[str, Tensor], slots: Sequence[int]) -> Tensor:
        """One token a slot."""
        return bound("kda_decode", self.kind)(
            **tokens, **self.weights, **self.caches, slots=int32(slots), lower_bound=self.lower_bound, eps=1e-5
        )


def tokens(count: int, seed: int = 0, gate: float = 0.0) -> dict[str, Tensor]:
    """Projected rows of `count` tokens; `gate` shifts the raw decays."""
    gen = torch.Generator().manual_seed(seed)
    return {
        "qkv": torch.randn(count, CHANNELS, generator=gen),
        "raw_gate": torch.randn(count, HEADS, DIM, generator=gen) + gate,
        "beta_logits": torch.randn(count, HEADS, generator=gen) * 2,
        "out_gate": torch.randn(count, HEADS, DIM, generator=gen),
    }


def rows(of: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    return {name: x[start:stop] for name, x in of.items()}


def recurrence_fp64(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence of one sequence in fp64, in the notation of its definition: S is [H, K, V].

    q, k, g [T, H, K], v [T, H, V], beta [T, H], state [H, V, K] or None. Returns out [T, H, V], state [H, V, K].
    """
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    S = torch.zeros(q.shape[1], q.shape[2], v.shape[2]).double() if state is None else state.double().mT.contiguous()
    out = []
    for t in range(q.shape[0]):
        unit_q, unit_k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q[t], k[t]))
        S = torch.diag_embed(g[t].exp()) @ S
        u = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", S, unit_k))
        S = S + torch.einsum("hk,hv->hkv", unit_k, u)
        out.append(torch.einsum("hkv,hk->hv", S, unit_q * q.shape[2] ** -0.5))
    return torch.stack(out), S.mT


def relative_error(actual: Tensor, golden: Tensor) -> float:
    """RMS of the difference over RMS of the golden."""
    return float((actual.double() - golden.double()).norm() / golden.double().norm())
