"""Attention residuals over a whole stack of layers, against the sums they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from k3hal.debug.golden import golden
from k3hal.dispatch.ops.attn_res_mix import OPERATOR, attn_res_mix, settle_ties
from k3hal.dispatch.ops.rms_norm import rms_norm

from .kda_layer import KINDS, bound, relative_error


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _mix(sources: list[Tensor], key: Tensor) -> Tensor:
    """The definition, in fp64: softmax over depth of scores on normalised keys, values raw."""
    wide = [x.double() for x in sources]
    scores = [(x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()) @ key.double() for x in wide]
    weights = torch.stack(scores).softmax(0)
    return sum((w[:, None] * x for w, x in zip(weights, wide, strict=True)), torch.zeros_like(wide[0]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "dim"), [(3, 64), (700, 256)])
def test_layers_mix_block_sums(kind: str, rows: int, dim: int) -> None:
    """Two sub-layers a layer, a block of two layers: the schedule of the model, with random sub-layer outputs."""
    run, block = bound("attn_res_mix", kind), 2
    embedding = _randn(rows, dim)
    prefix, blocks = embedding.clone(), torch.full((3, rows, dim), torch.nan)
    done: list[Tensor] = []
    current, pending, stored = embedding.clone(), None, 0
    for sublayer in range(10):
        layer, first = divmod(sublayer, 2)
        starts = not first and layer % block == 0
        key = _randn(dim, seed=100 + sublayer) * dim**-0.5
        resets = sublayer % (2 * block) == 1
        if pending is not None:
            current = pending.clone() if resets else current + pending
        out = run(
            prefix=prefix, delta=pending, blocks=blocks, num_blocks=stored, reset=resets, store=starts,
            key_weight=key, out_weight=None, eps=1e-5, out_eps=1e-5,
        )  # fmt: skip
        assert torch.equal(prefix, current)
        assert relative_error(out, _mix([*done, current], key)) < 1e-5
        if starts:
            done.append(current.clone())
            stored += 1
        pending = _randn(rows, dim, seed=sublayer)
    assert all(torch.equal(blocks[j], kept) for j, kept in enumerate(done)) and stored == 3


@pytest.mark.parametrize("kind", KINDS)
def test_result_is_never_the_accumulator(kind: str) -> None:
    prefix, blocks = _randn(2, 8), torch.full((1, 2, 8), torch.nan)
    out = bound("attn_res_mix", kind)(
        prefix=prefix, delta=None, blocks=blocks, num_blocks=0, reset=False, store=True,
        key_weight=_randn(8), out_weight=None, eps=1e-5, out_eps=1e-5,
    )  # fmt: skip
    assert torch.equal(out, prefix) and torch.equal(blocks[0], prefix)
    prefix += 1
    assert not torch.equal(out, prefix) and not torch.equal(blocks[0], prefix)


@pytest.mark.parametrize("kind", KINDS)
def test_norm_follows_the_mix(kind: str) -> None:
    prefix, blocks, key, weight = _randn(4, 32), _randn(2, 4, 32, seed=1), _randn(32, seed=2), _randn(32, seed=3)
    out = bound("attn_res_mix", kind)(
        prefix=prefix, delta=None, blocks=blocks, num_blocks=2, reset=False, store=False,
        key_weight=key, out_weight=weight, eps=1e-5, out_eps=1e-6,
    )  # fmt: skip
    mixed = _mix([blocks[0], blocks[1], prefix], key)
    expected = mixed / (mixed.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert relative_error(out, expected) < 1e-6


def _near_a_tie(distance: float) -> dict[str, Any]:
    """One row of two equal sources, but for the first element: its mix is `distance` above half way from 1 to the next
    bfloat16, and its result far out."""
    step, dim = 2.0**-7, 1024
    prefix = _randn(1, dim).bfloat16()
    prefix[0, 0] = 1.0 + step
    block = prefix.clone()
    block[0, 0] = 1.0
    key = torch.zeros(dim)
    # A difference of scores moves the mix away from the middle: by step / 4 times the difference.
    prefix[0, 1], block[0, 1] = 1.0, 0.0
    key[1] = 4 * distance / step
    return {
        "prefix": prefix, "delta": None, "blocks": block.unsqueeze(0), "num_blocks": 1, "reset": False, "store": False,
        "key_weight": key * float(prefix.double().square().mean().sqrt()), "out_weight": torch.ones(dim).bfloat16(),
        "eps": 0.0, "out_eps": 0.0,
    }  # fmt: skip


def _from_the_other_side(args: dict[str, Any], other: float, large: bool) -> Tensor:
    """The result if the first element of the mix is rounded to `other`; a weight makes it differ by more than a step;
    where it is `large`, by half to one."""
    mix = attn_res_mix(**{**args, "out_weight": None})
    mix[0, 0] = other
    least, most = (0.6 * 2.0**-7, 2.0**-7) if large else (2.0**-7, 1.0)
    for weight in (torch.arange(0.5, 1.0, 2.0**-8) * (8 if large else 1)).tolist():
        args["out_weight"][0] = weight
        out, wanted = rms_norm(mix, args["out_weight"], 0.0), golden(OPERATOR, args)["out"]
        if least < float((out.double() - wanted).abs()[0, 0] / wanted[0, 0]) <= most:
            return out
    raise AssertionError("no weight makes it differ so much")


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(("distance", "settles"), [(2e-7, True), (-2e-7, True), (1e-4, False), (-1e-4, False)])
def test_a_mix_half_way_between_two_values_may_be_either(distance: float, settles: bool, large: bool) -> None:
    args = _near_a_tie(distance)
    out = _from_the_other_side(args, 1.0 if distance > 0 else 1.0 + 2.0**-7, large)
    expected = golden(OPERATOR, args)
    state = {"prefix": args["prefix"], "blocks": args["blocks"]}
    settled = settle_ties(args, {"out": out, **state}, expected)["out"]
    assert torch.equal(settled[:, 1:], out[:, 1:])
    assert settled[0, 0] == (expected["out"].bfloat16() if settles else out)[0, 0]
    # What neither side gives is an error.
    out[0, 0] *= 1.02
    assert torch.equal(settle_ties(args, {"out": out, **state}, expected)["out"], out)
