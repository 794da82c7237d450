"""Attention residuals: the mix over depth that feeds each sub-layer, and its bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from k3hal.dispatch.operator import Cost, Operator, Outputs, Sample
from k3hal.dispatch.ops.rms_norm import rms_norm
from k3hal.dispatch.sampling_inputs import ACTIVATION_DTYPES, poison, randn


def attn_res_mix(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Tensor,
    num_blocks: int,
    reset: bool,
    store: bool,
    key_weight: Tensor,
    out_weight: Tensor | None,
    eps: float,
    out_eps: float,
) -> Tensor:
    """Add the last sub-layer's output, mix over the stored blocks and the running sum, normalise (k3_architecture §4).

    prefix [T, D] (mutated) is the running sum of the current block; blocks [B, T, D] (mutated when `store`) the sums
    of earlier ones, of which the first `num_blocks` are valid and the rest is never read; delta [T, D] or None. All in
    the activation dtype, and none may share memory with another. key_weight fp32 [D] is norm weight times projection.
    In this order:
    1. with a delta: `prefix = delta` if `reset`, else `prefix += delta`, rounded to the dtype, in place;
    2. for V_j over blocks[:num_blocks] and prefix: s_j = sum_d V_j * rsqrt(mean V_j^2 + eps) * key_weight, a = softmax
       of s over j, mix = sum_j a_j V_j with the raw V_j, in fp32 with one cast; with no blocks the mix is prefix;
    3. `store`: blocks[num_blocks] = prefix;
    4. the result is rms_norm(mix, out_weight, out_eps), or the mix where out_weight (activation dtype [D]) is None.
    Rows are independent. Returns a new tensor [T, D] in the activation dtype.
    """
    if delta is not None:
        prefix.copy_(delta if reset else prefix + delta)
    sources = torch.cat((blocks[:num_blocks], prefix.unsqueeze(0))).float()
    keys = sources * torch.rsqrt(sources.square().mean(-1, keepdim=True) + eps)
    weights = (keys * key_weight).sum(-1, keepdim=True).softmax(0)
    mix = (weights * sources).sum(0).to(prefix.dtype)
    if store:
        blocks[num_blocks] = prefix
    return mix if out_weight is None else rms_norm(mix, out_weight, out_eps)


SHOWS = 0.02
"""Of a row's RMS: an error below it is within every cap."""

FP32_SLACK = 2.0**-21
"""Of the sum of magnitudes that a mix is a sum of: what fp32 may be off by, eight of its roundings."""


def settle_ties(args: Mapping[str, Any], outputs: Outputs, golden: Outputs) -> Outputs:
    """The golden's result wherever the mix is as good as half way between two values of the dtype, and the result is
    what comes from the other of them: which is nearer, fp32 cannot tell."""
    out, wanted, norm = outputs["out"], golden["out"], args["out_weight"]
    if norm is None or out.dtype is torch.float32:
        return outputs
    step = torch.finfo(out.dtype).eps
    # One rounding explains half a step, the mix of the other side up to a whole one more. Many results are half to one
    # step off, and few of those so large that it shows.
    error, size = (out.double() - wanted).abs(), step * wanted.abs()
    odd = (error > size) | ((error > 0.51 * size) & (error > SHOWS * wanted.square().mean(-1, keepdim=True).sqrt()))
    rows = odd.any(-1).nonzero().squeeze(-1)
    if not rows.numel():
        return outputs
    weights, sources = _shares(args, golden["prefix"], rows)
    mix = (weights * sources).sum(0)
    nearest = mix.to(out.dtype).double()
    other = (2 * mix - nearest).to(out.dtype).double()
    slack = FP32_SLACK * (weights * sources).abs().sum(0)
    tie = (other != nearest) & (((mix - nearest).abs() - (mix - other).abs()).abs() <= slack)
    factor = torch.rsqrt(nearest.square().mean(-1, keepdim=True) + args["out_eps"]) * norm.double()
    explained = (out[rows].double() - other * factor).abs() <= 0.51 * step * (other * factor).abs()
    settled = out.clone()
    settled[rows] = torch.where(tie & explained, wanted[rows].to(out.dtype), out[rows])
    return {**outputs, "out": settled}


def _shares(args: Mapping[str, Any], prefix: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of these rows the weights [B + 1, T, 1] and what they weigh [B + 1, T, D], in fp64."""
    sources = torch.cat((args["blocks"][: args["num_blocks"], rows], prefix[rows].unsqueeze(0))).double()
    keys = sources * torch.rsqrt(sources.square().mean(-1, keepdim=True) + args["eps"])
    return (keys * args["key_weight"].double()).sum(-1, keepdim=True).softmax(0), sources


def _cost(prefix: Tensor, delta: Tensor | None, num_blocks: int, store: bool, **_: Any) -> Cost:
    rows = num_blocks + 2 + (0 if delta is None else 2) + int(store)
    return Cost(flops=6.0 * (num_blocks + 1) * prefix.numel(), bytes=float(rows * prefix.nbytes))


def _make(
    gen: Generator, rows: int, dim: int, dtype: str, filled: int, total: int = 4, key_scale: float = 1.0, **flags: Any
) -> dict[str, Any]:
    scale, eps, out_eps = (2e-3, 2e-6, 2e-5) if flags.get("faint", False) else (1.0, 1e-5, 1e-5)
    blocks = randn(gen, total, rows, dim, dtype=dtype, scale=scale)
    poison(blocks[filled:])
    delta = randn(gen, rows, dim, dtype=dtype, scale=scale) if flags.get("delta", True) else None
    norm = 1 + randn(gen, dim, dtype=dtype, scale=0.2) if flags.get("norm", True) else None
    return {
        "prefix": randn(gen, rows, dim, dtype=dtype, scale=scale),
        "delta": delta,
        "blocks": blocks,
        "num_blocks": filled,
        "reset": flags.get("reset", False),
        "store": flags.get("store", False),
        "key_weight": randn(gen, dim, scale=key_scale * dim**-0.5),
        "out_weight": norm,
        "eps": eps,
        "out_eps": out_eps,
    }


def _samples() -> Iterator[Sample]:
    edge, hard, big = frozenset({"edge"}), frozenset({"adversarial"}), frozenset({"k3", "device"})
    must, bench = frozenset({"must"}), frozenset({"device", "bench"})
    cases: list[tuple[str, dict[str, Any], frozenset[str]]] = [
        ("add", {"rows": 3, "dim": 48, "filled": 2}, frozenset({"tiny"})),
        ("first_layer", {"rows": 3, "dim": 48, "filled": 0, "delta": False, "store": True}, frozenset({"tiny"})),
        ("reset", {"rows": 3, "dim": 48, "filled": 1, "reset": True}, frozenset({"tiny", "must"})),
        ("block_end", {"rows": 5, "dim": 33, "filled": 3, "store": True}, edge),
        ("reset_and_store", {"rows": 2, "dim": 64, "filled": 1, "reset": True, "store": True}, edge),
        ("no_norm", {"rows": 5, "dim": 64, "filled": 4, "norm": False}, edge),
        ("no_rows", {"rows": 0, "dim": 64, "filled": 2, "store": True}, edge),
        ("many_rows", {"rows": 130, "dim": 64, "filled": 3}, edge),
        ("sharp_scores", {"rows": 9, "dim": 64, "filled": 3, "key_scale": 100.0}, hard),
        ("faint", {"rows": 5, "dim": 64, "filled": 3, "key_scale": 3.0, "faint": True}, hard | must),
        *((f"k3_{t}", {"rows": t, "dim": 7168, "filled": 8, "total": 8}, big) for t in (1, 65)),
        *((f"k3_store_{t}", {"rows": t, "dim": 7168, "filled": 7, "total": 8, "store": True}, big) for t in (3, 65)),
        *((f"k3_reset_{t}", {"rows": t, "dim": 7168, "filled": 4, "total": 8, "reset": True}, big) for t in (3, 65)),
        ("k3_first_65", {"rows": 65, "dim": 7168, "filled": 0, "total": 8, "delta": False, "store": True}, big),
        ("k3_no_norm_65", {"rows": 65, "dim": 7168, "filled": 8, "total": 8, "norm": False}, big),
        *((f"bench_{t}", {"rows": t, "dim": 7168, "filled": 8, "total": 8}, bench) for t in (1, 4096, 16_384)),
    ]
    for name, options, tags in cases:
        for dtype in ("bfloat16",) if tags == bench else ACTIVATION_DTYPES:

            def make(gen: Generator, o: Any = options, dtype: str = dtype) -> dict[str, Any]:
                return _make(gen, dtype=dtype, **o)

            dims = {"dim": options["dim"], "block_size": 12 if "device" in tags else 3}
            yield Sample(name, make, dims, dtype, tags=tags)


OPERATOR = Operator(
    reference=attn_res_mix,
    family="norm",
    outputs={"out": "norm", "prefix": "exact", "blocks": "exact"},
    samples=_samples,
    cost=_cost,
    mutates=("prefix", "blocks"),
    weights=("key_weight", "out_weight"),
    invariants=("batch",),
    settle_ties=settle_ties,
)
