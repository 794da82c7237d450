"""Ties of activations that `moe_experts_a8w4` rounds: either side is right, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from k3hal.debug.case import samples_of
from k3hal.debug.golden import golden
from k3hal.dispatch.ops import moe_experts_a8w4 as operator
from k3hal.dispatch.registry import get_operator

NAME = "moe_experts_a8w4"


def test_a_row_that_took_the_other_side_of_a_tie_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    (sample,) = samples_of(get_operator(NAME), names=["tiny"])
    args = sample.make(torch.Generator().manual_seed(3))
    args["x"] = args["x"].float()
    wanted = golden(get_operator(NAME), args)
    monkeypatch.setattr(operator, "_NEAR", 2.0**-5)  # so that some activation of these few is near a middle
    moves = operator._moves(args, 1)
    assert moves.shape[0] > 1
    off = wanted["out"].clone()
    off[1] += moves[0]
    settled = operator.settle_ties(args, {"out": off.float()}, wanted)["out"]
    torch.testing.assert_close(settled.double(), wanted["out"], rtol=1e-6, atol=1e-9)
    for wrong in (off[1] * 1.01, off[1] + 0.5 * moves[1], wanted["out"][1] + 3 * moves[0]):
        odd = off.float()
        odd[1] = wrong
        assert torch.equal(operator.settle_ties(args, {"out": odd}, wanted)["out"], odd)


def test_what_is_near_a_middle_is_little() -> None:
    """Else much would be explained. These rows have 15,360 activations."""
    (sample,) = samples_of(get_operator(NAME), names=["large_batch"])
    args = sample.make(torch.Generator().manual_seed(0))
    assert sum(operator._moves(args, row).shape[0] for row in range(0, 300, 10)) < 16
